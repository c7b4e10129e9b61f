"""The reward process: take → score → commit, for finished samples and for groups that are to be scored as a whole.

``serve`` is the process (``python -m plaudit_workers.scoring``, or an actor that awaits it); ``ScoringWorker`` is the
same without a job file, for tests and benchmarks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from plaudit_reward.code.sandbox.confinement.privileges import forbid_inspection
from plaudit_reward.pipeline.pipeline import Pipeline
from plaudit_reward.served.gate import CallGate
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import GroupDelivery
from plaudit_wire.records import ScoringRecord, WorkerRecord
from plaudit_wire.sample import Sample
from plaudit_workers.health import HealthServer
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import EXIT_DONE, ProcessSettings
from plaudit_workers.scoring.build import build_pipeline
from plaudit_workers.scoring.kinds.context import BuildContext
from plaudit_workers.scoring.model_turns import ModelTurns
from plaudit_workers.scoring.offer import offering
from plaudit_workers.scoring.version import scoring_version
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group import Group
from plaudit_workers.stream.worker.commits import commit, commit_group, read_group
from plaudit_workers.stream.worker.consumer import Consumer, ConsumerOptions
from plaudit_workers.stream.worker.lease import Delivery
from plaudit_workers.supervision import Supervised, drained, set_within, unless_stopped

logger = get_logger(__name__)

_BEAT_EVERY_S = 5.0
_LOOK_FOR_LOST_EVERY_S = 1.0
_LOOK_FOR_ROOM_EVERY_S = 0.05
_GONE_PAUSE_S = 2.0
_GIVEN_UP = ScoringRecord("given_up", reason="it was not scored when its group was")


@dataclass(frozen=True)
class ScoringOptions:
    """Hold the sizes and times of a worker, and the version of its scoring."""

    max_concurrent_samples: int = 256
    drain_grace_s: float = 20.0
    """Seconds after a stop in which samples in work may finish; the rest is handed back."""
    consumer: ConsumerOptions = field(default_factory=ConsumerOptions)
    version: str = ""
    """In each of its results."""


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run a reward worker until ``stop`` is set."""
    forbid_inspection()  # by users' functions, which run in processes of the same user
    job = load_job(settings.job_path)
    workers: list[ScoringWorker] = []
    gate = CallGate()
    async with HealthServer(settings.health_port, ready=lambda: any(worker.ready for worker in workers)):
        transport = await Transport.open(settings.redis, settings.run, settings.run_folder / "spill", stop=stop)
        try:
            workers.append(
                ScoringWorker(
                    settings.worker,
                    transport,
                    await _pipeline(job, settings, gate),
                    _options(job, settings),
                    ModelTurns(transport, gate) if job.spec.reward.sleeping_models else None,
                )
            )
            async with offering(job, transport):
                await workers[0].run(stop)
        finally:
            await transport.close()
    return EXIT_DONE


async def _pipeline(job: RLJob, settings: ProcessSettings, gate: CallGate) -> Pipeline:
    context = BuildContext(
        job.spec.reward,
        settings.worker,
        run=settings.run,
        redis=settings.redis,
        model_servers=settings.model_servers,
        gate=gate,
        version=_version(job, settings),
        traced_share=job.spec.metrics.traces.share if job.spec.metrics.traces.endpoint else None,
    )
    return await build_pipeline(job.spec.reward, settings.worker, context)


def _options(job: RLJob, settings: ProcessSettings) -> ScoringOptions:
    return ScoringOptions(
        max_concurrent_samples=job.spec.reward.workers.max_concurrent_samples,
        version=_version(job, settings),
    )


def _version(job: RLJob, settings: ProcessSettings) -> str:
    return settings.scoring_version or scoring_version(job)


class ScoringWorker:
    """Score the samples and groups that it takes.

    Args:
        transport: the run's streams; closed by the caller.
        pipeline: the job's scorers, opened; closed here.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        pipeline: Pipeline,
        options: ScoringOptions = ScoringOptions(),
        turns: ModelTurns | None = None,
    ) -> None:
        self._name = name
        self._transport = transport
        self._pipeline = pipeline
        self._options = options
        self._turns = turns
        self._works: dict[asyncio.Task[None], Delivery[Any]] = {}
        self._freed = asyncio.Event()
        self.ready = False

    @property
    def busy(self) -> int:
        """Return the number of samples and groups in work."""
        return len(self._works)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; then drain and close the pipeline."""
        try:
            async with Supervised() as tasks:
                tasks.start(self._beats())
                tasks.start(self._drop_lost())
                if self._turns is not None:
                    tasks.start(self._turns.watch(self._beat))
                await self._work(tasks, stop)
        finally:
            self.ready = False
            await self._pipeline.close()

    async def _work(self, tasks: Supervised, stop: asyncio.Event) -> None:
        # Leaving a consumer hands back unfinished work, at once after a failure.
        async with (
            Consumer[Sample](self._transport, "samples", self._name, self._options.consumer) as samples,
            Consumer[GroupDelivery](self._transport, "groups", self._name, self._options.consumer) as groups,
        ):
            self.ready = True
            loops = [self._take_samples(tasks, samples, stop)]
            if self._pipeline.scores_groups:
                loops.append(self._take_groups(tasks, groups, stop))
            async with asyncio.TaskGroup() as taking:
                for loop in loops:
                    taking.create_task(loop)
            self.ready = False
            if works := set(self._works):
                finished, returned = await drained(works, self._options.drain_grace_s)
                logger.info("drained", finished=finished, returned=returned)

    async def _take_samples(self, tasks: Supervised, consumer: Consumer[Sample], stop: asyncio.Event) -> None:
        while not stop.is_set():
            room = min(self._free, self._pipeline.room())
            if room <= 0:
                await unless_stopped(stop, self._wait_for_room())
                continue
            for delivery in await consumer.take(room):
                self._start(tasks, delivery, self._score_sample(consumer, delivery))
            self.ready = consumer.readable

    async def _take_groups(self, tasks: Supervised, consumer: Consumer[GroupDelivery], stop: asyncio.Event) -> None:
        while not stop.is_set():
            room = min(self._free, self._pipeline.group_room())
            if room <= 0:
                await unless_stopped(stop, self._wait_for_room())
                continue
            for delivery in await consumer.take(room):
                self._start(tasks, delivery, self._score_group(consumer, delivery))

    def _start(self, tasks: Supervised, delivery: Delivery[Any], work: Coroutine[Any, Any, None]) -> None:
        task = tasks.start(work)
        self._works[task] = delivery
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._works[task]
        self._freed.set()

    async def _score_sample(self, consumer: Consumer[Sample], delivery: Delivery[Sample]) -> None:
        scoring = await self._pipeline.score(delivery.payload)
        await commit(self._transport, delivery, self._stamped(scoring))
        consumer.finished(delivery)

    async def _score_group(self, consumer: Consumer[GroupDelivery], delivery: Delivery[GroupDelivery]) -> None:
        group = await self._transport.retry_through_outage(lambda: read_group(self._transport, delivery.group))
        if group is None:
            # The stream ends entries of closed groups, but only when they are older than this.
            await asyncio.sleep(_GONE_PAUSE_S)
            await consumer.hand_back([delivery])
            return
        scorings = await self._scored_group(group)
        await commit_group(self._transport, delivery, group, scorings)
        consumer.finished(delivery)

    async def _scored_group(self, group: Group) -> list[ScoringRecord]:
        scorings = [sample.scoring or _GIVEN_UP for sample in group.samples]
        present = [(i, sample.body.sample) for i, sample in enumerate(group.samples) if sample.body is not None]
        results = await self._pipeline.score_group([sample for _, sample in present], [scorings[i] for i, _ in present])
        for (i, _), scoring in zip(present, results, strict=True):
            scorings[i] = self._stamped(scoring, scorings[i].version)
        return scorings

    def _stamped(self, scoring: ScoringRecord, earlier: str = "") -> ScoringRecord:
        """Return a scoring with the version of this worker's scorers, and of those that scored the sample earlier."""
        own = self._options.version
        return msgspec.structs.replace(scoring, version=own if earlier in ("", own) else f"{earlier}+{own}")

    @property
    def _free(self) -> int:
        return self._options.max_concurrent_samples - self.busy

    async def _wait_for_room(self) -> None:
        await set_within(self._freed, _LOOK_FOR_ROOM_EVERY_S)

    async def _drop_lost(self) -> None:
        """Cancel the work on entries that another worker now holds."""
        while True:
            await asyncio.sleep(_LOOK_FOR_LOST_EVERY_S)
            for task, delivery in self._works.items():
                if delivery.lost.is_set():
                    task.cancel()

    async def _beats(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(_BEAT_EVERY_S)

    async def _beat(self) -> None:
        record = WorkerRecord(
            worker=self._name,
            role="reward",
            slots=self._options.max_concurrent_samples,
            busy=self.busy,
            ready=self.ready,
            asleep=self._turns.asleep if self._turns is not None else "",
            circuits_open=self._pipeline.circuits_open,
            scorers=self._pipeline.work,
        )
        await self._transport.beat(record)
