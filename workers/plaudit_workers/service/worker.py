"""Run the reward process: take → score → commit, for finished samples and for groups that are to be scored as a whole.

``serve`` is the process (``python -m plaudit_workers.scoring``, or an actor that awaits it); ``ScoringWorker`` is the
same without a job file, for tests and benchmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import RLJob
from plaudit_reward.endpoint.served import CallGate
from plaudit_reward.machines import RunMachines
from plaudit_reward.pipeline import Pipeline
from plaudit_sandbox.privileges import forbid_inspection
from plaudit_wire.logs import collect_seldom, get_logger
from plaudit_wire.messages import GroupDelivery, encode
from plaudit_wire.plain import plain_text
from plaudit_wire.records import Sample, ScoringRecord, WorkerRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.job_start import service_of
from plaudit_workers.process import (
    EXIT_DONE,
    HealthServer,
    ProcessSettings,
    Supervised,
    drained,
    set_within,
    unless_stopped,
)
from plaudit_workers.service.build import BuildContext, build_pipeline, scoring_version
from plaudit_workers.stream.calls import Delivery
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, commit_group
from plaudit_workers.stream.groups import Group, read_group
from plaudit_workers.stream.transport import Transport
from plaudit_workers.timeline import FIRST_SCORE, stamp

if TYPE_CHECKING:
    from plaudit_workers.service.auditor import Auditor

logger = get_logger(__name__)
T = TypeVar("T")
_BEAT_EVERY_S = 5.0
_LOOK_FOR_LOST_EVERY_S = 1.0
_LOOK_FOR_ROOM_EVERY_S = 0.05
_GONE_PAUSE_S = 2.0
_UNSTORABLE = (ValueError, TypeError, OverflowError)
"""What an encoder raises; Redis's errors are others."""
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
    version = settings.scoring_version or scoring_version(job)
    workers: list[ScoringWorker] = []
    gate = CallGate()
    async with HealthServer(settings.health_port, ready=lambda: any(worker.ready for worker in workers)):
        transport = await Transport.open(settings.redis, settings.run, settings.run_folder / "spill", stop=stop)
        try:
            context = _context(job, settings, version, gate)
            workers.append(
                ScoringWorker(
                    settings.worker,
                    transport,
                    await build_pipeline(job.spec.reward, settings.worker, context),
                    ScoringOptions(job.spec.reward.workers.max_concurrent_samples, version=version),
                    ModelTurns(transport, gate) if job.spec.reward.sleeping_models else None,
                    await _auditor(job, context, transport, settings.run_folder),
                )
            )
            collect_seldom()
            async with offering(job, transport, version):
                await workers[0].run(stop)
        finally:
            await transport.close()
    return EXIT_DONE


def _context(job: RLJob, settings: ProcessSettings, version: str, gate: CallGate) -> BuildContext:
    return BuildContext(
        job.spec.reward,
        settings.worker,
        run=settings.run,
        redis=settings.redis,
        model_servers=settings.model_servers,
        gate=gate,
        version=version,
        machines=RunMachines.of_job(job, settings.run_folder),
        max_concurrent_tests=job.spec.sandboxes.max_concurrent,
        traced_share=job.spec.metrics.traces.share if job.spec.metrics.traces.endpoint else None,
    )


async def _auditor(job: RLJob, context: BuildContext, transport: Transport, run_folder: Path) -> Auditor | None:
    if not (job.spec.reward.auditors or job.spec.reward.watched):
        return None
    from plaudit_workers.service.auditor import open_auditor  # reads Parquet

    return await open_auditor(job.spec.reward, context, transport, run_folder, trains=job.spec.trains)


class ScoringWorker:
    """Score samples and groups by the opened ``pipeline``, and close that; the caller closes the transport."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        pipeline: Pipeline,
        options: ScoringOptions = ScoringOptions(),
        turns: ModelTurns | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        self._name = name
        self._transport = transport
        self._pipeline = pipeline
        self._options = options
        self._turns = turns
        self._auditor = auditor
        self._full: dict[str, bool] = {}
        """Streams of which the newest look found as many entries as there were free slots: more may wait."""
        self._works: dict[asyncio.Task[None], Delivery[Any]] = {}
        self._freed = asyncio.Event()
        self._scored = False
        self.ready = False

    @property
    def busy(self) -> int:
        """Return the number of samples and groups in work."""
        return len(self._works)

    def has_room(self) -> bool:
        """Return True if nothing waits in the streams and half of the slots are free: there is room for an audit."""
        return self.ready and not any(self._full.values()) and 2 * self.busy <= self._options.max_concurrent_samples

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; then drain and close the pipeline."""
        try:
            async with Supervised() as tasks:
                tasks.start(self._beats())
                tasks.start(self._drop_lost())
                if self._turns is not None:
                    tasks.start(self._turns.watch(self._beat))
                if self._auditor is not None:
                    tasks.start(self._auditor.run(stop, self.has_room))
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
            stamp("ready")
            async with asyncio.TaskGroup() as taking:
                taking.create_task(self._take(tasks, samples, self._pipeline.room, self._score_sample, stop))
                if self._pipeline.scores_groups:
                    taking.create_task(self._take(tasks, groups, self._pipeline.group_room, self._score_group, stop))
            self.ready = False
            if works := set(self._works):
                finished, returned = await drained(works, self._options.drain_grace_s)
                logger.info("drained", finished=finished, returned=returned)

    async def _take(
        self,
        tasks: Supervised,
        consumer: Consumer[T],
        room: Callable[[], int],
        score: Callable[[Consumer[T], Delivery[T]], Coroutine[Any, Any, None]],
        stop: asyncio.Event,
    ) -> None:
        while not stop.is_set():
            free = min(self._options.max_concurrent_samples - self.busy, room())
            if free <= 0:
                await unless_stopped(stop, set_within(self._freed, _LOOK_FOR_ROOM_EVERY_S))
                continue
            taken = await consumer.take(free)
            self._full[consumer.stream] = len(taken) == free
            for delivery in taken:
                task = tasks.start(score(consumer, delivery))
                self._works[task] = delivery
                task.add_done_callback(self._ended)
            if consumer.stream == "samples":
                self.ready = consumer.readable

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._works[task]
        self._freed.set()

    async def _score_sample(self, consumer: Consumer[Sample], delivery: Delivery[Sample]) -> None:
        try:
            scoring = await self._pipeline.score(delivery.payload)
            await commit(self._transport, delivery, self._stamped(scoring))
        except _UNSTORABLE as error:
            await commit(self._transport, delivery, self._stamped(self._unstorable(error)))
        consumer.finished(delivery)
        if not self._scored:
            self._scored = True
            stamp(FIRST_SCORE)

    async def _score_group(self, consumer: Consumer[GroupDelivery], delivery: Delivery[GroupDelivery]) -> None:
        group = await self._transport.retry_through_outage(lambda: read_group(self._transport, delivery.group))
        if group is None:
            # The stream ends entries of closed groups, but only when they are older than this.
            await asyncio.sleep(_GONE_PAUSE_S)
            await consumer.hand_back([delivery])
            return
        try:
            await commit_group(self._transport, delivery, group, await self._scored_group(group))
        except _UNSTORABLE as error:
            failed = [self._stamped(self._unstorable(error))] * len(group.samples)
            await commit_group(self._transport, delivery, group, failed)
        consumer.finished(delivery)

    def _unstorable(self, error: Exception) -> ScoringRecord:
        """Return the end of a sample whose result cannot be stored: it ends the sample, not the worker."""
        reason = plain_text(f"its result cannot be stored: {type(error).__name__}: {error}")[:500]
        logger.error("a result cannot be stored", error=reason)
        return ScoringRecord("data_error", reason=reason, worker=self._name)

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


_LOOK_EVERY_S = 0.2


class ModelTurns:
    """Let one reward worker call no served model while the trainer uses its GPU (``sleepDuringUpdates``).

    The model's servers follow the trainer's announcements and ask for it in their heartbeats. ``gate`` is closed until
    the first look. Calls under way finish first; then the worker's own heartbeat says so, for which the servers wait.
    """

    def __init__(self, transport: Transport, gate: CallGate) -> None:
        self._transport = transport
        self._gate = gate
        self.asleep = ""
        """The servers' request (``calls_held_for``), once no call is under way and none begins."""
        gate.close()

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Hold calls when a live server asks for it, until cancelled; report each change by ``changed``."""
        await changed()  # a server that does not know this worker would not wait for its calls
        while True:
            before = self.asleep
            await self._transport.retry_through_outage(self._look)
            if self.asleep != before:
                logger.info("calls to served models are held" if self.asleep else "calls to served models continue")
                await changed()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        asked = max((each.calls_held_for for each in await self._transport.workers()), default="")
        if not asked:
            self._gate.open()
            self.asleep = ""
            return
        self._gate.close()
        self.asleep = asked if self._gate.idle else ""


_OFFER_EVERY_S = 10.0
"""Seconds between writes of the offer: after a loss of data, Redis has it again within this time."""


@contextlib.asynccontextmanager
async def offering(job: RLJob, transport: Transport, version: str = "") -> AsyncIterator[None]:
    """Write the service's offer to Redis while the context lasts; a job with a trainer offers nothing.

    The workers score samples of any origin; only this record makes a run a service.
    """
    if job.spec.trains:
        yield
        return
    async with Supervised() as tasks:
        tasks.start(_offer(transport, encode(service_of(job, version))))
        yield


async def _offer(transport: Transport, service: bytes) -> None:
    while True:
        try:
            await transport.commands.set(transport.names.service, service)
        except OUTAGE as error:
            transport.outages.report(error)
        await asyncio.sleep(_OFFER_EVERY_S)
