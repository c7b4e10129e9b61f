"""Run the rollout process: load the announced policy → take prompts → generate → publish each finished sample.

``serve`` is the process (``python -m plaudit_workers.rollout``, or an actor that awaits it); ``RolloutWorker`` is the
same without a job file, for tests and benchmarks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from plaudit_reward.code.sandbox.confinement.privileges import forbid_inspection
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_wire.records import WorkerRecord
from plaudit_workers.environment_urls import await_environments
from plaudit_workers.gpu_start import alone_on_gpu, shares_gpu
from plaudit_workers.health import HealthServer
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import ProcessSettings, exit_when_stopped
from plaudit_workers.rollout.agents.agent import Agent
from plaudit_workers.rollout.engines.protocol import Engine, WeightSwitch
from plaudit_workers.rollout.factory import build_engine, open_agent
from plaudit_workers.rollout.follower import follow
from plaudit_workers.rollout.prompt_work import PromptWork
from plaudit_workers.rollout.replica import ReplicaMember, job_of_group
from plaudit_workers.rollout.slots import Claim, Slots
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.worker.consumer import Consumer, ConsumerOptions
from plaudit_workers.stream.worker.lease import Delivery
from plaudit_workers.supervision import Supervised, drained, unless_stopped
from plaudit_workers.training_job import load_training_job

logger = get_logger(__name__)

_BEAT_EVERY_S = 5.0


@dataclass(frozen=True)
class RolloutOptions:
    """Hold sizes and times of a worker."""

    max_concurrent_samples: int = 256
    max_samples_in_agents: int = 0
    """Samples that may wait for their agents' tools while others take their places in the engine."""
    samples_per_prompt: int = 1
    """Of training prompts: determines how many prompts fill the free places. One more prompt waits in the engine, so
    that a freed place is refilled in the next engine step, without waiting for a stream read."""
    weight_switch: WeightSwitch = "continue"
    """How running samples are treated when the weights change."""
    sleeps: bool = True
    """The engine frees its GPUs while the trainer needs them; False: only reward models do."""
    shares: bool = False
    """Other processes of the run use its GPUs too."""
    drain_grace_s: float = 20.0
    """Seconds that running prompts get after a stop; prompts that are not finished then are returned to the stream."""
    prompts_per_take: int = 4
    """Most prompts in one read: few, so that several rollouts share a burst of prompts."""
    consumer: ConsumerOptions = field(default_factory=ConsumerOptions)
    """Leases."""


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run a rollout worker until ``stop`` is set.

    Raises:
        RefusedError: the job, the transport, the model or the agent cannot work.
        EngineFailedError: the engine broke.
    """
    job = job_of_group(load_training_job(settings.job_path))
    member = ReplicaMember.from_environment(job)
    if not member.leads:
        return await follow(settings, job, member, stop)
    if job.spec.rollout.agent.kind != "singleTurn":
        forbid_inspection()  # by users' agents and tools, which run in processes of the same user
    await await_environments(job)
    async with open_agent(job) as agent:
        engine = build_engine(job, member, settings.run_folder)
        transport = await Transport.open(settings.redis, settings.run, spill=settings.run_folder / "spill", stop=stop)
        try:
            worker = RolloutWorker(settings.worker, transport, engine, agent, _options(job))
            async with HealthServer(settings.health_port, ready=lambda: worker.ready):
                await worker.run(stop)
        finally:
            await transport.close()
    return exit_when_stopped()


def _options(job: RLJob) -> RolloutOptions:
    rollout = job.spec.rollout
    return RolloutOptions(
        max_concurrent_samples=rollout.engine.max_concurrent_samples,
        max_samples_in_agents=0 if rollout.agent.kind == "singleTurn" else rollout.agent.max_concurrent_samples,
        samples_per_prompt=job.spec.algorithm.samples_per_prompt,
        weight_switch=rollout.in_flight,
        sleeps=rollout.sleep_during_updates,
        shares=shares_gpu(),
    )


class RolloutWorker:
    """Take prompts and generate their samples.

    Args:
        name: in heartbeats, records and the consumer group.
        transport: the run's streams; closed by the caller.
        engine: started and closed here.
    """

    def __init__(
        self, name: str, transport: Transport, engine: Engine, agent: Agent, options: RolloutOptions = RolloutOptions()
    ) -> None:
        self._name = name
        self._transport = transport
        self._engine = engine
        self._options = options
        self._slots = Slots(options.max_concurrent_samples + options.samples_per_prompt, options.max_samples_in_agents)
        self._weights = PolicyWeights(
            transport, engine, options.weight_switch, self._beat, sleeps=options.sleeps, shares=options.shares
        )
        self._prompt_work = PromptWork(name, transport, engine, agent, self._weights)
        self._works: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._readable = True

    @property
    def ready(self) -> bool:
        """Return True while the worker takes prompts: policy loaded, volume readable, no stop requested."""
        return self._weights.ready and self._readable and not self._stopping

    @property
    def busy(self) -> int:
        """Return the number of samples being generated."""
        return self._slots.busy

    async def run(self, stop: asyncio.Event) -> None:
        """Start the engine, work until ``stop`` is set, drain, close the engine.

        Raises:
            EngineFailedError: the engine broke.
        """
        try:
            async with Supervised() as tasks:
                tasks.start(self._beats())
                if not await unless_stopped(stop, self._weights.begin()):
                    return
                async with alone_on_gpu(self._transport.names.run):
                    await self._engine.start()
                tasks.start(self._weights.watch())
                await self._work(tasks, stop)
        finally:
            await self._engine.close()
            await self._weights.close()

    async def _work(self, tasks: Supervised, stop: asyncio.Event) -> None:
        # Leaving the consumer returns unfinished prompts to the stream, at once after a failure.
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
        self._readable = consumer.readable

    async def _work_prompt(self, consumer: Consumer[Prompt], delivery: Delivery[Prompt], claim: Claim) -> None:
        await self._prompt_work.run(delivery, claim)
        consumer.finished(delivery)

    async def _drain(self) -> None:
        self._stopping = True
        if works := set(self._works):
            finished, returned = await drained(works, self._options.drain_grace_s)
            logger.info("drained", finished=finished, returned=returned)

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
            needs_files=weights.needs_files,
            asleep=weights.asleep,
            engine=self._engine.status(),
        )
        await self._transport.beat(record)
