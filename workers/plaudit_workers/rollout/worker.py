"""Run the rollout process: load the announced policy → take prompts → generate → publish each finished sample.

``serve`` is the process (``python -m plaudit_workers.rollout``, or an actor that awaits it); ``RolloutWorker`` is the
same without a job file, for tests and benchmarks. A pod of a replica that is not its leader only follows: it computes
part of the model, takes no prompts, never sees Redis. Heavy packages are imported only where an engine or agent needs
them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plaudit_job.processes import ENDPOINT_HOST_VARIABLE, ENDPOINT_PORT_VARIABLE
from plaudit_job.spec.rljob import RLJob
from plaudit_reward.machines import RunMachines
from plaudit_sandbox.privileges import forbid_inspection
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_wire.records import WorkerRecord
from plaudit_workers.agents.processes import AgentProcesses, opened_tools, sources_of
from plaudit_workers.job_start import accepts, await_environments, load_training_job
from plaudit_workers.process import (
    HealthServer,
    ProcessSettings,
    Supervised,
    alone_on_gpu,
    drained,
    exit_when_stopped,
    shares_gpu,
    unless_stopped,
)
from plaudit_workers.rollout.agents.agent import Agent, CustomAgent, MachineCounts, SingleTurn
from plaudit_workers.rollout.engine import Engine, EngineFailedError, WeightSwitch
from plaudit_workers.rollout.prompt_work import Claim, PromptWork, Slots
from plaudit_workers.rollout.vllm_arguments import (
    WHOLE,
    ReplicaMember,
    VllmSettings,
    engine_arguments,
    job_of_group,
    prepare_environment,
    refuse_hidden_gpus,
)
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.stream.calls import Delivery
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions
from plaudit_workers.stream.transport import Transport
from plaudit_workers.timeline import stamp

logger = get_logger(__name__)
_BEAT_EVERY_S = 5.0
_LEADER_DRAINS_WITHIN_S = 45.0
"""More than the leader's own limit, less than the pod's grace period."""
_LOOK_EVERY_S = 0.5
_CONNECT_WITHIN_S = 2.0


@dataclass(frozen=True)
class RolloutOptions:
    """Hold sizes and times of a worker."""

    max_concurrent_samples: int = 256
    max_samples_in_agents: int = 0
    """Samples that may wait for their agents' tools while others take their places in the engine."""
    samples_per_prompt: int = 1
    """Of training prompts: determines how many prompts fill the free places (``Slots``)."""
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
    """Run a rollout worker until ``stop`` is set."""
    job = job_of_group(load_training_job(settings.job_path))
    member = ReplicaMember.from_environment(job)
    if not member.leads:
        return await follow(settings, job, member, stop)
    if job.spec.rollout.agent.kind != "singleTurn":
        forbid_inspection()  # by users' agents and tools, which run in processes of the same user
    await await_environments(job)
    machines = MachineCounts() if job.spec.uses_sandboxes else None
    async with open_agent(job, settings.run_folder, machines) as agent:
        engine = build_engine(job, member, settings.run_folder)
        transport = await Transport.open(settings.redis, settings.run, spill=settings.run_folder / "spill", stop=stop)
        try:
            worker = RolloutWorker(settings.worker, transport, engine, agent, _options(job), machines)
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
        machines: those of the agent; None: it has none.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        engine: Engine,
        agent: Agent,
        options: RolloutOptions = RolloutOptions(),
        machines: MachineCounts | None = None,
    ) -> None:
        self._name = name
        self._machines = machines
        self._transport = transport
        self._engine = engine
        self._options = options
        self._slots = Slots(options.max_concurrent_samples, options.samples_per_prompt, options.max_samples_in_agents)
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
        """Start the engine, work until ``stop`` is set, drain, close the engine."""
        try:
            async with Supervised() as tasks:
                tasks.start(self._beats())
                if not await unless_stopped(stop, self._weights.begin()):
                    return
                async with alone_on_gpu(self._transport.names.run):
                    await self._engine.start()
                stamp("started the engine")
                tasks.start(self._weights.watch())
                await self._work(tasks, stop)
        finally:
            await self._engine.close()
            await self._weights.close()

    async def _work(self, tasks: Supervised, stop: asyncio.Event) -> None:
        # Leaving the consumer returns unfinished prompts to the stream, at once after a failure.
        async with Consumer[Prompt](self._transport, "prompts", self._name, self._options.consumer) as consumer:
            await unless_stopped(stop, self._weights.hold())
            stamp("loaded the policy")
            while not stop.is_set():
                await self._take(tasks, consumer, stop)
            await self._drain()

    async def _take(self, tasks: Supervised, consumer: Consumer[Prompt], stop: asyncio.Event) -> None:
        if not self._slots.free and not await unless_stopped(stop, self._slots.wait_free()):
            return
        if not self._weights.holds() and not await unless_stopped(stop, self._weights.hold()):
            return
        prompts = max(1, self._slots.free // self._options.samples_per_prompt)
        for delivery in await consumer.take(min(prompts, self._options.prompts_per_take)):
            claim = Claim(self._slots, delivery.payload.n)
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
            in_agents=self._slots.in_agents,
            sandboxes=self._machines.work if self._machines is not None else None,
            loaded_s=weights.loaded_s,
            engine=self._engine.status(),
        )
        await self._transport.beat(record)


def build_engine(job: RLJob, member: ReplicaMember = WHOLE, run_folder: Path = Path()) -> Engine:
    """Build the engine of ``spec.rollout.engine`` for the leader of a replica; it is not started."""
    if job.spec.rollout.engine.kind == "vllm":
        from plaudit_workers.rollout.vllm_engine import VllmEngine

        return VllmEngine(VllmSettings.from_job(job, member), run_folder)
    from plaudit_workers.rollout.scripted import Script, ScriptedEngine

    rollout = job.spec.rollout
    script = Script.from_arguments(rollout.engine.arguments)
    tokenizer = None
    if script.turns:
        from plaudit_workers.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(job.spec.model)
    return ScriptedEngine(script, max_concurrent_samples=rollout.engine.max_concurrent_samples, tokenizer=tokenizer)


@asynccontextmanager
async def open_agent(
    job: RLJob, run_folder: Path = Path(), counts: MachineCounts | None = None
) -> AsyncIterator[Agent]:
    """Open the agent of ``spec.rollout.agent``, which counts its machines; its processes end with the context."""
    agent = job.spec.rollout.agent
    if agent.kind == "singleTurn":
        yield SingleTurn()
        return
    processes = AgentProcesses(sources_of(job))
    machines = RunMachines.of_job(job, run_folder)
    try:
        await processes.open()
        if agent.kind == "endpoint":
            async with _endpoint(job, processes, machines, counts) as opened:
                yield opened
            return
        if agent.kind == "custom" or processes.environment == "loop":
            yield CustomAgent(processes, agent.timeout_seconds)
        else:
            yield await _conversations(job, processes, machines, counts)
    finally:
        await processes.close()
        if machines is not None:
            await machines.close()


async def _conversations(
    job: RLJob, processes: AgentProcesses, machines: RunMachines | None, counts: MachineCounts | None
) -> Agent:
    prepare_environment(job.spec.model.source)  # before anything imports torch
    from plaudit_workers.rollout.agents.machine_tools import MachineTools
    from plaudit_workers.rollout.agents.tool_calls import ToolCallParser, opens_reasoning
    from plaudit_workers.rollout.agents.tools import EnvironmentAgent, ToolAgent, ToolLimits
    from plaudit_workers.tokenizer import ChatTemplate

    spec, tools = job.spec.rollout.agent, await opened_tools(job, processes)
    schemas = [tool.schema for tool in tools]
    template = ChatTemplate.of_model(job.spec.model, schemas)
    parser = ToolCallParser(spec.tool_parser, template.tokenizer, schemas, opened=opens_reasoning(template))
    machine_tools = await MachineTools.of_job(job, machines, counts)
    chat = template, parser, processes, tools, ToolLimits.from_spec(spec), machine_tools
    if spec.kind == "tools":
        agent = ToolAgent(*chat)
    else:
        agent = EnvironmentAgent(
            *chat, reads_text=processes.environment == "text", step_limit_s=spec.environment_timeout_seconds
        )
    if remark := agent.suffix.check(tools[0].name if tools else "", job.spec.rollout.sampling.stops):
        logger.warning(remark)
    return agent


@asynccontextmanager
async def _endpoint(
    job: RLJob, processes: AgentProcesses, machines: RunMachines | None, counts: MachineCounts | None
) -> AsyncIterator[Agent]:
    of_pods = _address_for_pods(job)
    prepare_environment(job.spec.model.source)  # before anything imports torch
    from plaudit_workers.rollout.agents.endpoint import EndpointAgent, EndpointServer, MachineProgram
    from plaudit_workers.rollout.agents.machine_tools import MachineTools
    from plaudit_workers.rollout.agents.session import ChatFormats
    from plaudit_workers.tokenizer import load_tokenizer

    model, spec = job.spec.model, job.spec.rollout.agent
    chat_formats = ChatFormats(load_tokenizer(model), model.chat_template_arguments, spec.tool_parser)
    if remark := chat_formats.of([]).suffix.remarks(job.spec.rollout.sampling.stops):
        logger.warning(remark)
    machine_tools = await MachineTools.of_job(job, machines, counts)
    async with EndpointServer(of_pods) as server:
        limits = spec.max_turns, spec.timeout_seconds
        inside = MachineProgram(machine_tools, spec.command, spec.path) if machine_tools is not None else None
        answers = spec.ground_truth
        yield EndpointAgent(processes, server, chat_formats, *limits, ground_truth=answers, inside=inside)


def _address_for_pods(job: RLJob, environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return where programs in pods reach this rollout; None where no program is in one. Raises ``RefusedError``."""
    if not job.spec.programs_in_pods:
        return None
    host, port = (environment.get(name, "") for name in (ENDPOINT_HOST_VARIABLE, ENDPOINT_PORT_VARIABLE))
    if not host or not port.isdigit():
        raise RefusedError(
            "spec.rollout.agent.sandbox: a program in a pod reaches rollouts on Kubernetes alone, where the operator "
            f"sets {ENDPOINT_HOST_VARIABLE} and {ENDPOINT_PORT_VARIABLE}. To try the agent here, set "
            "sandboxes.provider: container or process"
        )
    return host, int(port)


class EnginePart(Protocol):
    """Compute one follower's part of an engine. All methods block."""

    def start(self) -> None:
        """Join the leader; return when the whole engine is up."""

    def wait(self) -> None:
        """Return when the part has failed or was closed."""

    def close(self) -> None:
        """End ``wait`` and free the part's resources."""


async def follow(settings: ProcessSettings, job: RLJob, member: ReplicaMember, stop: asyncio.Event) -> int:
    """Compute a part of the model until ``stop`` is set and the leader has ended.

    A leader that is stopped finishes running samples first, and needs the other pods for them. So a follower that is
    stopped at the same moment stays until the leader's health port is closed.
    """
    part, ready = _engine_part(job, member), False
    async with HealthServer(settings.health_port, ready=lambda: ready):
        try:
            if await unless_stopped(stop, asyncio.to_thread(part.start)):
                ready = True
                logger.info("follows", leader=member.leader, rank=member.rank)
                await unless_stopped(stop, asyncio.to_thread(part.wait))
                await until_closed(member.leader, settings.health_port)
        finally:
            await asyncio.to_thread(part.close)
    return exit_when_stopped()


async def until_closed(host: str, port: int) -> None:
    """Return when the leader's health port accepts no connections any more (at once for port 0), or after its drain."""
    try:
        async with asyncio.timeout(_LEADER_DRAINS_WITHIN_S):
            while port and await accepts(host, port, _CONNECT_WITHIN_S):  # noqa: ASYNC110 - another process closes it
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        logger.warning("leader still running; exiting", leader=host, waited_s=_LEADER_DRAINS_WITHIN_S)


def _engine_part(job: RLJob, member: ReplicaMember) -> EnginePart:
    if job.spec.rollout.engine.kind == "vllm":
        return VllmPart(VllmSettings.from_job(job, member))
    from plaudit_workers.rollout.scripted import ScriptedPart

    return ScriptedPart()


class VllmPart:
    """Run an ``EnginePart`` as ``vllm serve --headless`` does: workers on this pod's GPUs, led by the leader's engine.

    Args:
        settings: as those of the leader, but for the rank.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._executor: Any = None
        self._closed = False

    def start(self) -> None:
        """Start the worker processes; return when those of all pods have met."""
        refuse_hidden_gpus()
        prepare_environment(self._settings.source)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = engine_arguments(self._settings).create_engine_config(headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def wait(self) -> None:
        """Return after ``close``; raise when a worker process has ended by itself."""
        self._executor.start_worker_monitor(inline=True)
        if not self._closed:
            raise EngineFailedError("a worker process of this pod's part of the engine ended")

    def close(self) -> None:
        """End the worker processes."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown()
