"""Run the trainer process: rank 0 conducts the run, the others follow."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.steps import RunEnding, write_ending
from plaudit_wire.errors import JobFailedError, RefusedError, StoppedError, described
from plaudit_wire.logs import get_logger
from plaudit_workers.agents.processes import described_tools
from plaudit_workers.job_start import await_environments, has_group_scorers, load_training_job
from plaudit_workers.process import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REFUSED,
    RESTARTED,
    HealthServer,
    ProcessSettings,
    exit_when_stopped,
)
from plaudit_workers.server_tasks import with_server_tasks
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import StaleIncarnationError, TrainerStreams, expire_run, keep_run
from plaudit_workers.stream.transport import Transport
from plaudit_workers.timeline import imports, stamp
from plaudit_workers.training.state import Lineage, RunPlan

logger = get_logger(__name__)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Train the job; return an exit code of ``process``."""
    prefer_expandable_segments(os.environ)
    job = load_training_job(settings.job_path)
    rank, world_size = ranks(os.environ, job.spec.trainer.ranks)
    if rank > 0:
        return await _follow(job, settings, rank, world_size)
    _record_ending(settings.run_folder, None)
    transport = await Transport.open(settings.redis, settings.run, spill=settings.run_folder / "spill", stop=stop)
    try:
        async with HealthServer(settings.health_port, ready=lambda: True):
            done = await _conduct(job, settings, transport, world_size, stop)
    except StaleIncarnationError as error:
        raise RefusedError(f"{error}. This trainer shuts down; no work is lost") from error
    except (RefusedError, JobFailedError) as error:
        code = EXIT_FAILED if isinstance(error, JobFailedError) else EXIT_REFUSED
        _record_ending(settings.run_folder, RunEnding(code, str(error), time.time()))
        raise
    finally:
        await transport.close()
    if not done:
        return exit_when_stopped()
    _record_ending(settings.run_folder, RunEnding(EXIT_DONE, "", time.time()))
    return EXIT_DONE


def _record_ending(run_folder: Path, ending: RunEnding | None) -> None:
    """Record the end for the live page and reports. ``plaudit run`` knows more of it, and replaces it."""
    with suppress(OSError):  # a full disk is the run's own failure
        write_ending(run_folder, ending)


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's GPU allocator grow its segments, unless the environment configures the allocator.

    Each micro-batch has another length. With segments of fixed sizes, freed blocks of one do not fit the next, and the
    trainer runs out of memory that is reserved but unused. torch reads the variable at its first use of a GPU. Set here
    and not by the launcher, it cannot override what a pod gets from ``envFrom`` or a Ray worker from its node.
    """
    if not any(name in environment for name in _ALLOCATOR_VARIABLES):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def ranks(environment: Mapping[str, str], expected: int) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torch's launchers set them and the job expects."""
    rank, world_size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", str(expected)))
    if world_size != expected:
        raise RefusedError(
            f"WORLD_SIZE is {world_size}, but the job's trainer.ranks is {expected}; start one process for each rank"
        )
    return rank, world_size


@contextmanager
def prepared(what: str, run_folder: Path) -> Iterator[None]:
    """Refuse the job for whatever escapes while a part of the run is prepared: a restart would meet it again.

    Two kinds of error escape as they are: those of a trainer that begins anew, since what fails now was possible
    before, and those of the network between ranks, whose cause is another rank.
    """
    try:
        yield
    except (RefusedError, JobFailedError, StoppedError):
        raise
    except Exception as error:
        begins_anew = RESTARTED in os.environ or Lineage.read(run_folder / "checkpoints").newest > 0
        if begins_anew or type(error).__module__.startswith("torch.distributed"):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
        raise RefusedError(
            f"{what} cannot be prepared: {described(error)} ({where}). Mend what it names, then start again"
        ) from error


async def _follow(job: RLJob, settings: ProcessSettings, rank: int, world_size: int) -> int:
    from plaudit_workers.images import ImageProcessor
    from plaudit_workers.training.model.policy_model import build_model

    with prepared("the model", settings.run_folder):
        images = ImageProcessor.of_job(job, settings.run_folder)
        model = await asyncio.to_thread(build_model, job, rank, world_size, images)
    await asyncio.to_thread(model.follow)
    return EXIT_DONE


async def _conduct(
    job: RLJob, settings: ProcessSettings, transport: Transport, world_size: int, stop: asyncio.Event
) -> bool:
    # Heavy imports only here: refusing a job needs none of them.
    with imports("imported torch and transformers"):
        from plaudit_workers.images import ImageProcessor
        from plaudit_workers.tokenizer import ChatTemplate
        from plaudit_workers.training.backend import TorchBackend
        from plaudit_workers.training.conductor import conduct
        from plaudit_workers.training.data import PromptData
        from plaudit_workers.training.model.policy_model import build_model
        from plaudit_workers.training.prompts import PromptRenderer
        from plaudit_workers.training.sinks import Sinks, configuration
        from plaudit_workers.training.state import RunContext, ServerClock

    plan = RunPlan.from_job(job)
    if job.spec.rollout.agent.environment:
        await await_environments(job)  # it describes its tools, and may have the tasks
    with prepared("the tasks of the environment's server", settings.run_folder):
        job = await asyncio.to_thread(with_server_tasks, job, settings.run_folder)
    with prepared("the tools of spec.rollout.agent", settings.run_folder):
        tools = await described_tools(job)
    with prepared("the chat template and the images' processor of spec.model", settings.run_folder):
        template = ChatTemplate.of_model(job.spec.model, tools)
        images = ImageProcessor.of_job(job, settings.run_folder)
        if images is not None:
            images.give_template(template, job.spec.model)
    renderer = PromptRenderer.of_job(job, template, images)
    with prepared("the rows of spec.data.train", settings.run_folder):
        data = PromptData.for_training(job.spec.data, renderer, job.spec.seed, settings.run_folder)
    with prepared("the rows of spec.data.validation", settings.run_folder):
        validation_data = PromptData.for_validation(job.spec.data, renderer, settings.run_folder)
    with prepared("the sinks of spec.trainer.sinks", settings.run_folder):
        sinks = Sinks(settings.run_folder, job.spec.trainer.sinks, configuration(job))
    stamp("read template and data")
    with prepared("the model", settings.run_folder):
        model = await asyncio.to_thread(build_model, job, 0, world_size, images)
    stamp("built the model")
    run = RunContext(
        plan=plan,
        folder=settings.run_folder,
        transport=transport,
        streams=TrainerStreams(transport, stream_limits(job, plan)),
        data=data,
        sinks=sinks,
        clock=ServerClock(transport.now),
        validation_data=validation_data,
        data_facts=data.facts,
        data_notice=data.notice(job),
        worker=settings.worker,
    )
    external = bool(job.spec.transport.url)
    try:
        if external:
            await transport.retry_through_outage(lambda: keep_run(transport))
        done = await conduct(run, TorchBackend(job, model, settings.run_folder, settings.redis.url), stop)
        if external and done:
            await expire_run(transport, job.spec.transport.ttl_seconds_after_finished)
    finally:
        sinks.close()
    logger.info("trainer shutting down", all_steps_done=done)
    return done


def stream_limits(job: RLJob, plan: RunPlan) -> StreamLimits:
    """Return the job's limits in the streams."""
    reward = job.spec.reward
    return StreamLimits(
        max_open_groups=plan.schedule.max_in_flight,
        max_open_validation_groups=plan.max_validation_in_flight,
        group_deadline_s=reward.group_deadline_seconds,
        group_scoring_deadline_s=reward.group_deadline_seconds,
        min_samples_per_group=reward.min_samples_per_group,
        has_group_scorers=has_group_scorers(reward),
    )
