"""The rollout process: hold the announced policy → take prompts → generate → publish each sample as it finishes.

``serve`` is the process (``python -m plaudit_workers.rollout``, or an actor that awaits it); ``RolloutWorker`` is the
same without a job file, for tests and benchmarks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_wire.records import WorkerRecord
from plaudit_workers.health import HealthServer
from plaudit_workers.job.loading.load import JobError, load_job
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import EXIT_DONE, ProcessSettings, RefusedError
from plaudit_workers.rollout.agents.agent import Agent
from plaudit_workers.rollout.engines.generation import Generation
from plaudit_workers.rollout.engines.protocol import Engine, InFlight
from plaudit_workers.rollout.factory import build_agent, build_engine
from plaudit_workers.rollout.prompt_work import PromptWork
from plaudit_workers.rollout.slots import Claim, Slots
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.worker.consumer import Consumer, ConsumerOptions
from plaudit_workers.stream.worker.lease import Delivery
from plaudit_workers.supervision import Supervised, unless_stopped

logger = get_logger(__name__)

_BEAT_EVERY_S = 5.0


@dataclass(frozen=True)
class RolloutOptions:
    """What a worker is told besides its engine and its agent."""

    max_concurrent_samples: int = 256
    samples_per_prompt: int = 1
    """Of training prompts: says how many prompts fill the free places. One prompt more waits in the engine, so that a
    place that falls free is taken in the next step and not a read of the stream later."""
    in_flight: InFlight = "continue"
    """What happens to running samples when the weights change."""
    drain_grace_s: float = 20.0
    """After a stop, what is running may end within this; the rest is handed back."""
    prompts_per_take: int = 4
    """Prompts read at once: few, so that several rollouts share a burst of prompts."""
    consumer: ConsumerOptions = field(default_factory=ConsumerOptions)
    """Leases."""


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Runs a rollout worker until ``stop`` is set.

    Raises:
        RefusedError: the job, the transport, the model or the agent cannot work.
        EngineFailedError: the engine broke.
    """
    job = _read_job(settings)
    agent = build_agent(job)
    engine = build_engine(job)
    transport = await Transport.open(settings.redis, settings.run, spill=settings.run_folder / "spill", stop=stop)
    try:
        worker = RolloutWorker(settings.worker, transport, engine, agent, _options(job))
        async with HealthServer(settings.health_port, ready=lambda: worker.ready):
            await worker.run(stop)
    finally:
        await transport.close()
    return EXIT_DONE


def _read_job(settings: ProcessSettings) -> RLJob:
    try:
        job = load_job(settings.job_path)
    except JobError as error:
        raise RefusedError(str(error)) from error
    if job.spec.rollout is None or job.spec.algorithm is None:
        raise RefusedError(f"{settings.job_path}: spec.rollout is missing; a reward service has no rollout workers")
    return job


def _options(job: RLJob) -> RolloutOptions:
    assert job.spec.rollout is not None
    assert job.spec.algorithm is not None
    return RolloutOptions(
        max_concurrent_samples=job.spec.rollout.engine.max_concurrent_samples,
        samples_per_prompt=job.spec.algorithm.samples_per_prompt,
        in_flight=job.spec.rollout.in_flight,
    )


class RolloutWorker:
    """Generates the samples of the prompts that it takes.

    Args:
        name: of this process, in heartbeats, records and the consumer group.
        transport: the run's streams; closed by the caller.
        engine: started and closed here.
        agent: turns a prompt into a trajectory.
        options: sizes and times.
    """

    def __init__(
        self, name: str, transport: Transport, engine: Engine, agent: Agent, options: RolloutOptions = RolloutOptions()
    ) -> None:
        self._name = name
        self._transport = transport
        self._engine = engine
        self._options = options
        self._slots = Slots(options.max_concurrent_samples + options.samples_per_prompt)
        self._weights = PolicyWeights(transport, engine, options.in_flight, self._beat)
        self._generation = Generation(engine)
        self._prompt_work = PromptWork(name, transport, engine, self._generation, agent, self._weights)
        self._works: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def ready(self) -> bool:
        """Whether it takes prompts: it holds an announced policy and was not told to stop."""
        return self._weights.ready and not self._stopping

    @property
    def busy(self) -> int:
        """Samples in work."""
        return self._slots.busy

    async def run(self, stop: asyncio.Event) -> None:
        """Starts the engine, works until ``stop`` is set, drains, closes the engine.

        Raises:
            EngineFailedError: the engine broke.
        """
        try:
            async with Supervised() as tasks:
                tasks.start(self._beats())
                await self._engine.start()
                tasks.start(self._generation.pump())
                tasks.start(self._weights.watch())
                await self._work(tasks, stop)
        finally:
            await self._engine.close()

    async def _work(self, tasks: Supervised, stop: asyncio.Event) -> None:
        # Leaving the consumer hands back what is still in work, at once after a failure.
        async with Consumer[Prompt](self._transport, "prompts", self._name, self._options.consumer) as consumer:
            while not stop.is_set():
                await self._take(tasks, consumer, stop)
            await self._drain()

    async def _take(self, tasks: Supervised, consumer: Consumer[Prompt], stop: asyncio.Event) -> None:
        if not await unless_stopped(stop, self._slots.wait_free()):
            return
        if not await unless_stopped(stop, self._weights.hold()):
            return
        prompts = max(1, self._slots.free // self._options.samples_per_prompt)
        for delivery in await consumer.take(min(prompts, self._options.prompts_per_take)):
            claim = self._slots.claim(delivery.payload.n)
            work = tasks.start(self._work_prompt(consumer, delivery, claim))
            self._works.add(work)
            work.add_done_callback(self._works.discard)

    async def _work_prompt(self, consumer: Consumer[Prompt], delivery: Delivery[Prompt], claim: Claim) -> None:
        await self._prompt_work.run(delivery, claim)
        consumer.finished(delivery)

    async def _drain(self) -> None:
        self._stopping = True
        works = set(self._works)
        if not works:
            return
        done, left = await asyncio.wait(works, timeout=self._options.drain_grace_s)
        for work in left:
            work.cancel()
        await asyncio.wait(works)
        logger.info("drained", finished=len(done), handed_back=len(left))

    async def _beats(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(_BEAT_EVERY_S)

    async def _beat(self) -> None:
        weights = self._weights
        record = WorkerRecord(
            worker=self._name,
            role="rollout",
            slots=self._options.max_concurrent_samples,
            busy=self._slots.busy,
            ready=self.ready,
            version=str(weights.held or ""),
            loading=str(weights.loading or ""),
        )
        await self._transport.beat(record)
