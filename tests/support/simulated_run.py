"""Whole runs in one process: a conductor on a scripted policy, a rollout on a scripted engine, real scoring and Redis.

``Simulation`` starts the three as tasks. The trainer can be killed: its task is cancelled at any point, without
notice to other processes. The next trainer starts with a new connection and the files on disk.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from plaudit_job.spec.rewards import RewardSpec
from plaudit_metrics.sources.steps import read_steps
from plaudit_wire.messages import Sampling
from plaudit_wire.records import StepRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.data_facts import DataFacts
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.rollout.agents.agent import Agent, MachineCounts, SingleTurn
from plaudit_workers.rollout.scripted import Script, ScriptedEngine
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker
from plaudit_workers.service.auditor import open_auditor
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.service.worker import ModelTurns, ScoringOptions, ScoringWorker
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import SpillFolder
from plaudit_workers.training.conductor import conduct
from plaudit_workers.training.schedule import Schedule
from plaudit_workers.training.scripted import ScriptedBackend
from plaudit_workers.training.sinks import Sinks
from plaudit_workers.training.state import PromptRow, RunContext, RunPlan, ServerClock, ValidationPlan

SAMPLES = 4

SCORERS = """
import asyncio, random

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, slow_s=0.02, broken_file=""):
    import pathlib
    await asyncio.sleep(random.uniform(0, slow_s))
    if broken_file and pathlib.Path(broken_file).exists():
        raise ConnectionError("connection to the judge refused")
    if ground_truth == "varied":
        return random.random()
    return None if ground_truth == "skip" else float(ground_truth)

def spread(rewards):
    return rewards
"""

# As scripts: a group that is admitted between two commands would be half in the state, which no file of Redis shows.
_DUMP = """
local state = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  state[#state + 1], state[#state + 2] = key, redis.call('DUMP', key)
end
return state
"""
_REWIND = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end
for i = 2, #ARGV, 2 do redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1]) end
"""


class Rows:
    """An endless supply of prompts; the ground truth of each is its number."""

    def __init__(self, num_rows: int, data_source: str, special: Mapping[int, str]) -> None:
        self._num_rows = num_rows
        self._data_source = data_source
        self._special = special

    def __len__(self) -> int:
        return self._num_rows

    def row_at(self, position: int) -> int:
        return position % self._num_rows

    def prompt_at(self, position: int) -> PromptRow:
        ids = np.array([position % 7 + 1], "<i4").tobytes()
        truth = self._special.get(position, float(self.row_at(position)))
        return PromptRow(self.row_at(position), self._data_source, f"prompt {position}", ids, truth)


def make_plan(
    *,
    steps: int = 4,
    prompts_per_step: int = 4,
    mini_batches: int = 1,
    staleness: int = 0,
    order: Any = "step",
    max_replaced: int = 0,
    max_tokens: int = 8,
    validate_every: int | None = None,
    **changes: Any,
) -> RunPlan:
    sampling = Sampling(max_tokens=max_tokens)
    validation = None if validate_every is None else ValidationPlan(validate_every, 1, Sampling(8, 0.0))
    schedule = Schedule(steps, prompts_per_step, mini_batches, staleness, order, max_replaced=max_replaced)
    given: dict[str, Any] = {"checkpoint_every_steps": 2, **changes}
    return RunPlan(schedule, SAMPLES, sampling, validation=validation, **given)


class Simulation:
    """One run with all its processes."""

    def __init__(self, server: RedisServer, run_name: str, folder: Path) -> None:
        self.server = server
        self.name = run_name
        self.folder = folder
        self.broken_file = folder / "broken"
        self.update_s: Callable[[Sequence[Group]], float] = lambda groups: 0.01
        self.latency_s = 0.01
        self.slow_s = 0.02
        self.limits: dict[str, Any] = {}
        self.broken: set[int] = set()
        """Positions whose samples cannot be scored."""
        self.skipped: set[int] = set()
        """Positions whose samples the scorer skips: it returns None."""
        self.num_rows = 1000
        self.data_facts: DataFacts | None = None
        self.varied: set[int] = set()
        """Positions whose samples get different scores; those of another position are all equal."""
        self.on_none = "mask"
        self.scorer: dict[str, Any] | None = None
        """The scorer's section; None: a function that returns the ground truth."""
        self.auditor: dict[str, Any] | None = None
        """The section of a scorer that audits; None: there is none."""
        self.scorers: list[dict[str, Any]] = []
        """The sections of several scorers, in place of the one."""
        self.model_servers: dict[str, list[str]] = {}
        """Addresses of the servers of its model."""
        self.broken_validation: set[int] = set()
        self.policy_class = ScriptedBackend
        self.engine_class = ScriptedEngine
        self.options: dict[str, Any] = {}
        """Options of rollouts."""
        self.agent_class: Callable[[], Agent] = SingleTurn
        self.machines: MachineCounts | None = None
        """What rollouts tell of their samples' machines."""
        self.spill_above_bytes: int | None = None
        """Larger records lie on the volume; None keeps all in Redis."""
        self.consumer: dict[str, Any] = {"block_s": 0.1}
        self.port: int | None = None
        """Port of a network between the processes and Redis; None: they connect directly."""
        self._trainers: list[asyncio.subprocess.Process] = []
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._stop_workers = asyncio.Event()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rewards.py").write_text(SCORERS)

    @property
    def address(self) -> RedisAddress:
        url = self.server.url if self.port is None else f"redis://127.0.0.1:{self.port}/0"
        return RedisAddress(url, self.server.password)

    async def open(self) -> Transport:
        """Connect as a process does: it waits while Redis is away."""
        transport = await Transport.open(self.address, self.name, stop=asyncio.Event())
        if self.spill_above_bytes is not None:
            transport.volume = SpillFolder(self.folder / "spill", self.spill_above_bytes)
        return transport

    async def train(self, plan: RunPlan, stop: asyncio.Event | None = None) -> tuple[bool, ScriptedBackend]:
        """Run a trainer; return True if all steps are done, and its policy at the end."""
        transport = await self.open()
        sinks = Sinks(self.folder)
        policy = self.policy_class(self.folder, self.update_s)
        limits = {
            "max_open_groups": plan.schedule.max_in_flight,
            "min_samples_per_group": 2,
            **self.limits,
        }
        run = RunContext(
            plan=plan,
            folder=self.folder,
            transport=transport,
            streams=TrainerStreams(transport, StreamLimits(**limits)),
            data=Rows(
                self.num_rows,
                "train",
                dict.fromkeys(self.broken, "no number")
                | dict.fromkeys(self.skipped, "skip")
                | dict.fromkeys(self.varied, "varied"),
            ),
            sinks=sinks,
            clock=ServerClock(transport.now),
            validation_data=Rows(6, "held-out", dict.fromkeys(self.broken_validation, "no number"))
            if plan.validation
            else None,
            data_facts=self.data_facts,
        )
        try:
            return await conduct(run, policy, stop or asyncio.Event()), policy
        finally:
            sinks.close()
            await transport.close()

    async def killed(self, plan: RunPlan, after_s: float) -> bool:
        """A trainer that dies after so many seconds; True when it was done before that."""
        life = asyncio.create_task(self.train(plan))
        done, _ = await asyncio.wait([life], timeout=after_s)
        if done:
            await life
            return True
        life.cancel()
        await asyncio.wait([life])
        return False

    async def trainer_process(self, settings: dict[str, Any]) -> asyncio.subprocess.Process:
        """Run a trainer in a child process."""
        about = {"url": self.server.url, "password": self.server.password, "run": self.name, **settings}
        program = str(Path(__file__).with_name("trainer_program.py"))
        arguments = json.dumps({**about, "folder": str(self.folder)})
        process = await asyncio.create_subprocess_exec(sys.executable, program, arguments)
        self._trainers.append(process)
        return process

    async def end_trainers(self) -> None:
        """Kill the trainer processes that a failed test has left."""
        for process in self._trainers:
            if process.returncode is None:
                process.kill()
                await process.wait()

    @asynccontextmanager
    async def workers(self, rollouts: int = 1, reward_workers: int = 1) -> AsyncIterator[None]:
        """Rollouts and reward workers, until the context ends."""
        self._stop_workers.clear()
        for role, count in (("rollout", rollouts), ("reward", reward_workers)):
            for number in range(count):
                self._start_worker(f"{role}-{number}")
        try:
            yield
        finally:
            self._stop_workers.set()
            await asyncio.gather(*self._workers.values())
            self._workers.clear()

    async def kill_worker(self, chance: random.Random) -> None:
        """A rollout or reward worker dies at whatever line it is, and another one starts under a new name."""
        name = chance.choice(sorted(self._workers))
        killed = self._workers.pop(name)
        killed.cancel()
        await asyncio.wait([killed])
        role, _, number = name.partition("-")
        self._start_worker(f"{role}-{int(number) + 100}")

    def _start_worker(self, name: str) -> None:
        self._workers[name] = asyncio.create_task(self.serve(name, self._stop_workers))

    async def serve(self, name: str, stop: asyncio.Event) -> None:
        """Be the rollout or the reward worker of this name until ``stop`` is set."""
        await (self._rollout if name.startswith("rollout") else self._reward)(name, stop)

    async def _rollout(self, name: str, stop: asyncio.Event) -> None:
        transport = await self.open()
        script = Script.from_arguments(
            {
                "latencySeconds": {"kind": "uniform", "low": 0.0, "high": self.latency_s},
                "responseTokens": {"kind": "constant", "value": 4},
            }
        )
        options = RolloutOptions(
            256, SAMPLES, drain_grace_s=0.5, consumer=ConsumerOptions(**self.consumer), **self.options
        )
        worker = RolloutWorker(name, transport, self.engine_class(script), self.agent_class(), options, self.machines)
        try:
            await worker.run(stop)
        finally:
            await transport.close()

    async def _reward(self, name: str, stop: asyncio.Event) -> None:
        transport = await self.open()
        arguments = {"slow_s": self.slow_s, "broken_file": str(self.broken_file)}
        python = {"path": str(self.folder / "rewards.py"), "function": "compute_score", "arguments": arguments}
        scorer = self.scorer or {"name": "mine", "kind": "python", "python": python, "onNone": self.on_none}
        scorers = [*(self.scorers or [scorer]), *([self.auditor] if self.auditor else [])]
        sections = {"scorers": scorers, "retries": 0}
        reward = RewardSpec.model_validate(sections, by_alias=True, by_name=False)
        options = ScoringOptions(drain_grace_s=0.5, consumer=ConsumerOptions(**self.consumer))
        context = BuildContext(reward, name, model_servers=self.model_servers)
        turns = ModelTurns(transport, context.gate) if reward.sleeping_models else None
        auditor = await open_auditor(reward, context, transport, self.folder) if self.auditor else None
        worker = ScoringWorker(name, transport, await build_pipeline(reward, name, context), options, turns, auditor)
        try:
            await worker.run(stop)
        finally:
            await transport.close()

    async def state(self) -> list[bytes]:
        """Everything that Redis holds of the run, as of one moment, to be put back later: keys and their dumps."""
        state: list[bytes] = await self._at_once(_DUMP)
        return state

    async def has_open_groups(self) -> bool:
        """Tell whether Redis holds groups that are not closed."""
        transport = await self.open()
        try:
            return bool(await transport.commands.exists(transport.names.open))
        finally:
            await transport.close()

    async def rewind(self, state: list[bytes]) -> None:
        """Redis comes back with an older state; an empty one is what FLUSHALL leaves."""
        await self._at_once(_REWIND, *state)

    async def _at_once(self, script: str, *arguments: bytes) -> Any:
        transport = await self.open()
        try:
            answer: Any = await transport.commands.eval(script, 0, f"plaudit:{{{self.name}}}:*", *arguments)
            return answer
        finally:
            await transport.close()

    async def until_steps(self, count: int) -> None:
        """Return once this many steps are recorded."""
        async with asyncio.timeout(120):
            while len(self.steps()) < count:
                await asyncio.sleep(0.01)

    def steps(self) -> list[StepRecord]:
        return read_steps(self.folder / "steps.jsonl")

    def ledger(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "ledger.json").read_text())
        return content


def positions(policy: ScriptedBackend) -> list[list[int]]:
    """The data positions of each update."""
    return [[int(group.split("-")[1]) for group in update] for update in policy.trained]
