"""The trainer's process: rank 0 conducts the run, the other ranks follow it. Called by ``__main__`` and by actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from plaudit_wire.logs import get_logger
from plaudit_workers.health import HealthServer
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import EXIT_DONE, ProcessSettings, RefusedError
from plaudit_workers.scoring.group_scope import has_group_scorers
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.trainer.groups import StaleIncarnationError, StreamLimits, TrainerStreams
from plaudit_workers.training.run.plan import RunPlan
from plaudit_workers.training_job import load_training_job

logger = get_logger(__name__)


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Trains the job; see ``process`` for what it returns.

    Raises:
        RefusedError: job, data, model, checkpoint, disk or Redis are wrong, or another trainer took over.
        JobFailedError: too many scores failed, again and again.
    """
    job = load_training_job(settings.job_path)
    rank, world_size = ranks(os.environ, job.spec.trainer.ranks)
    if rank > 0:
        return await _follow(job, rank, world_size)
    transport = await Transport.open(settings.redis, settings.run, spill=settings.run_folder / "spill", stop=stop)
    try:
        async with HealthServer(settings.health_port, ready=lambda: True):
            done = await _conduct(job, settings, transport, world_size, stop)
    except StaleIncarnationError as error:
        raise RefusedError(f"{error}. This trainer leaves; nothing of the run is lost") from error
    finally:
        await transport.close()
    # Where an exit code is all that is seen of a process, a stop must not look like the end of the run.
    return EXIT_DONE if done else int(os.environ.get("PLAUDIT_EXIT_WHEN_STOPPED", EXIT_DONE))


def ranks(environment: Mapping[str, str], expected: int) -> tuple[int, int]:
    """This process's rank and the number of ranks, as torch's launchers tell them.

    Raises:
        RefusedError: the number of ranks is not the job's.
    """
    rank, world_size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", str(expected)))
    if world_size != expected:
        raise RefusedError(f"WORLD_SIZE is {world_size}, but the job's trainer.ranks is {expected}; start one a rank")
    return rank, world_size


async def _follow(job: RLJob, rank: int, world_size: int) -> int:
    from plaudit_workers.training.backend.commands import Follower
    from plaudit_workers.training.backend.policy import build_policy

    follower = await asyncio.to_thread(build_policy, job, rank, world_size)
    assert isinstance(follower, Follower)
    await asyncio.to_thread(follower.follow)
    return EXIT_DONE


async def _conduct(
    job: RLJob, settings: ProcessSettings, transport: Transport, world_size: int, stop: asyncio.Event
) -> bool:
    # Heavy imports only here: a refusal for the job's or Redis's sake needs none of them.
    from plaudit_workers.training.backend.commands import Follower
    from plaudit_workers.training.backend.job_policy import JobPolicy
    from plaudit_workers.training.backend.policy import build_policy
    from plaudit_workers.training.conductor.conductor import conduct
    from plaudit_workers.training.data.dataset import PromptData
    from plaudit_workers.training.model.model import load_tokenizer
    from plaudit_workers.training.run.server_clock import ServerClock
    from plaudit_workers.training.run.sinks import Sinks
    from plaudit_workers.training.run.state import Run

    plan = RunPlan.from_job(job)
    tokenizer = load_tokenizer(job.spec.model)
    data = PromptData.for_training(job.spec.data, tokenizer, job.spec.seed)
    validation_data = PromptData.for_validation(job.spec.data, tokenizer)
    sinks = Sinks(settings.run_folder, job.spec.trainer.sinks)
    policy = await asyncio.to_thread(build_policy, job, 0, world_size)
    assert not isinstance(policy, Follower)
    run = Run(
        plan=plan,
        folder=settings.run_folder,
        transport=transport,
        streams=TrainerStreams(transport, stream_limits(job, plan)),
        data=data,
        sinks=sinks,
        clock=ServerClock(transport.now),
        validation_data=validation_data,
        worker=settings.worker,
    )
    try:
        done = await conduct(run, JobPolicy(job, policy, settings.run_folder), stop)
    finally:
        sinks.close()
    logger.info("trainer leaves", all_steps_done=done)
    return done


def stream_limits(job: RLJob, plan: RunPlan) -> StreamLimits:
    """What the job allows in the streams."""
    reward = job.spec.reward
    return StreamLimits(
        max_open_groups=plan.schedule.max_in_flight,
        max_open_validation_groups=plan.max_validation_in_flight,
        group_deadline_s=reward.group_deadline_seconds,
        group_scoring_deadline_s=reward.group_deadline_seconds,
        min_samples_per_group=reward.min_samples_per_group,
        has_group_scorers=has_group_scorers(reward),
    )
