"""The runbook walked: runs that are broken in one way each, before a real Prometheus with windows 300 times shorter.

While an alert fires, the first command of its entry in the runbook shows the cause.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from metrics_process import MetricsProcess
from plaudit_metrics.monitoring.rules import THRESHOLDS
from plaudit_wire.messages import PolicyVersion, Prompt
from plaudit_wire.names import CONSUMER_GROUPS
from plaudit_wire.records import CallRecord, SandboxRecord
from plaudit_workers.agents.messages import FinishedSample, Trajectory
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.launch.transport import write_redis_address
from plaudit_workers.rollout.agents.agent import Generate, MachineCounts, SingleTurn
from plaudit_workers.rollout.engine import SampleRequest
from plaudit_workers.rollout.scripted import ScriptedEngine
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.scripted import ScriptedBackend
from runbook import answer
from scoring_service import StartService, start_service
from simulated_run import Simulation, make_plan
from waiting import until, until_in_thread

pytestmark = [
    pytest.mark.broken,
    pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed (Debian: apt-get install jq)"),
]

__all__ = ["start_service"]

_SLOW = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, slow_s=0, broken_file=""):
    await asyncio.sleep(0.4)
    return 1.0
"""
_COLLAPSING = """
import pathlib, random

def compute_score(data_source, solution_str, ground_truth, extra_info=None, slow_s=0, broken_file=""):
    return 0.0 if pathlib.Path(broken_file).exists() else random.random()
"""


class Walk:
    """One run with its metrics service; the test breaks it."""

    def __init__(self, server: RedisServer, run: str, prometheus: Any, folder: Path) -> None:
        self.simulation = Simulation(server, run, folder)
        self.simulation.update_s = lambda groups: 0.1
        self.service: MetricsProcess | None = None
        self._server = server
        self._prometheus = prometheus

    def rewards(self, program: str) -> None:
        """Replace the reward functions."""
        (self.simulation.folder / "rewards.py").write_text(program)

    @asynccontextmanager
    async def observed(self, **settings: str) -> AsyncIterator[None]:
        """The metrics service, scraped, while the context lasts."""
        self.service = MetricsProcess(self._server, self.simulation.name, self.simulation.folder, settings)
        await self.service.start()
        self._prometheus.scrape(self.service.port, run=self.simulation.name)
        try:
            yield
        finally:
            await self.service.kill()

    @asynccontextmanager
    async def training(self, rollouts: int = 1, **plan: Any) -> AsyncIterator[None]:
        """Workers and a trainer, while the context lasts; the open step is closed at its end."""
        stop = asyncio.Event()
        async with self.simulation.workers(rollouts):
            trainer = asyncio.create_task(self.simulation.train(make_plan(steps=100_000, **plan), stop))
            try:
                yield
            finally:
                stop.set()
                await trainer

    @asynccontextmanager
    async def redis(self) -> AsyncIterator[Transport]:
        """A connection to the run's Redis, by which a test interferes."""
        transport = await self.simulation.open()
        try:
            yield transport
        finally:
            await transport.close()

    async def fires(self, *names: str) -> None:
        """Wait until all these alerts fire at once."""
        try:
            await until_in_thread(lambda: set(names) <= self.firing())
        except TimeoutError:
            pytest.fail(f"of {sorted(names)} these do not fire: {sorted(set(names) - self.firing())}")

    def firing(self) -> set[str]:
        """Return the names of the run's alerts that fire now."""
        found: set[str] = self._prometheus.firing(self.simulation.name)
        return found

    def ran_an_hour_ago(self) -> bool:
        """Return True once the run's figures reach back an hour, in shortened windows."""
        ago = f"offset {self._prometheus.windows.duration('1h')}"
        return bool(self._prometheus.query(f'plaudit_last_step_truncated_share{{run="{self.simulation.name}"}} {ago}'))

    def waiting(self) -> float:
        """Return the number of samples that no worker has taken."""
        found = self._prometheus.query(f'plaudit_stream_undelivered{{stream="samples", run="{self.simulation.name}"}}')
        return float(found[0]["value"][1]) if found else 0.0

    async def look(self, alert: str, **how: Any) -> str:
        """Return what the first command of the alert's entry prints."""
        assert self.service is not None
        steps = self.simulation.steps()
        values = {"RUN": self.service.url, "n": str(steps[-1].step) if steps else ""}
        return await asyncio.to_thread(answer, alert, run=self.simulation.name, **values, **how)


@pytest.fixture
def walk(redis_server: RedisServer, run_name: str, prometheus: Any, tmp_path: Path) -> Walk:
    return Walk(redis_server, run_name, prometheus, tmp_path / "runs" / run_name)


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do this while the context lasts."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def series(text: str) -> dict[str, float]:
    """The lines of the Prometheus text format, by name and labels."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that jq printed one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += 1
    return found


async def test_slow_rewards(walk: Walk) -> None:
    walk.rewards(_SLOW)
    async with walk.observed(PLAUDIT_REWARD_LATENCY_THRESHOLD_S="0.1"), walk.training():
        await walk.fires("RewardLatencyBurn", "RewardStarvesTrainer", "ScorerSlow")
        seconds = json.loads(await walk.look("RewardLatencyBurn"))
        assert max(seconds, key=seconds.get) == "score_s"
        assert json.loads(await walk.look("RewardStarvesTrainer"))["verdict"] == "reward"
        of_scorer = series(await walk.look("ScorerSlow"))
        assert all(value > 0.2 for name, value in of_scorer.items() if "mine" in name and "p99" in name)
        assert any("mine" in name and "p99" in name for name in of_scorer)


class _Searching(SingleTurn):
    """Calls a tool before its turn: it takes long, and fails half of the time."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        began = time.monotonic()
        await asyncio.sleep(0.6)
        took = time.monotonic() - began
        trajectory = await super().run(prompt, generate)
        outcome = "error" if prompt.seed % 2 else "ok"
        trajectory.add_calls([CallRecord("search", outcome, started_s=0.0, call_s=took)])
        return trajectory


async def test_a_slow_tool_that_fails(walk: Walk) -> None:
    walk.simulation.agent_class = _Searching
    walk.simulation.slow_s = 0.0
    async with walk.observed(), walk.training():
        await walk.fires("ToolFailing", "ToolSlow", "ToolsStarveTrainer")
        calls = series(await walk.look("ToolFailing"))
        assert any("search" in name and "error" in name and count > 0 for name, count in calls.items())
        slow = series(await walk.look("ToolSlow"))
        assert any("search" in name and "p99" in name and value > 0.5 for name, value in slow.items())

        async def named() -> bool:
            return bool(json.loads(await walk.look("ToolsStarveTrainer"))["verdict"] == "tools")

        await until(named)  # a step on a busy machine may wait for something else


class _InMachines(SingleTurn):
    """Waits for a place and for a machine, which breaks half of the time."""

    def __init__(self, machines: MachineCounts) -> None:
        self._machines = machines

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        began = time.monotonic()
        with self._machines.waiting():
            await asyncio.sleep(0.5)
        claimed = time.monotonic()
        await asyncio.sleep(0.4)
        started = time.monotonic()
        trajectory = await super().run(prompt, generate)
        trajectory.sandbox = SandboxRecord(started - claimed, claimed - began, failed=prompt.seed % 2 == 1)
        return trajectory


async def test_machines_that_are_awaited_start_slowly_and_break(walk: Walk) -> None:
    machines = walk.simulation.machines = MachineCounts()
    walk.simulation.agent_class = lambda: _InMachines(machines)
    walk.simulation.slow_s = 0.0
    async with walk.observed(), walk.training():
        with machines.waiting():  # heartbeats come every five seconds
            await walk.fires("SandboxFailing", "SandboxSlow", "SandboxesExhausted")
            slow = series(await walk.look("SandboxSlow"))
            assert any("start" in name and "p99" in name and value > 0.3 for name, value in slow.items())
            exhausted = json.loads(await walk.look("SandboxesExhausted"))
            assert exhausted["verdict"] == "sandboxes"
            assert "raise sandboxes.maxConcurrent" in exhausted["explanation"]


class _LongWinded(ScriptedEngine):
    """Writes more than it may as soon as the file exists."""

    since: Path

    async def generate(self, request: SampleRequest) -> FinishedSample:
        sample = await super().generate(request)
        return FinishedSample(**{**_fields(sample), "finish_reason": "length"}) if self.since.exists() else sample


def _fields(sample: FinishedSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in sample.__dataclass_fields__}


async def test_a_policy_that_collapses_into_long_responses_without_reward(walk: Walk) -> None:
    walk.rewards(_COLLAPSING)
    broken = walk.simulation.broken_file
    long = walk.simulation.folder / "long"
    walk.simulation.engine_class = type("_Engine", (_LongWinded,), {"since": long})
    # The runbook shows 50 steps: they must reach back to before the collapse when the alert fires.
    walk.simulation.update_s = lambda groups: 0.5 if broken.exists() else 0.1
    async with walk.observed(), walk.training():
        await until_in_thread(walk.ran_an_hour_ago)  # truncation is compared with then
        broken.touch()
        long.touch()
        await walk.fires("RewardCollapsed")
        rewards = [step["r"] for step in objects(await walk.look("RewardCollapsed"))]
        assert max(rewards) > 0.3
        assert rewards[-1] == 0.0
        await walk.fires("RewardCollapsed", "RewardsUniform", "TruncationHigh")
        uniform = series(await walk.look("RewardsUniform"))
        assert uniform[next(name for name in uniform if name.startswith("plaudit_reward_std"))] == 0.0
        truncated = [step["t"] for step in objects(await walk.look("TruncationHigh"))]
        assert truncated[-1] == 1.0
        assert "RewardVarianceCollapsed" not in walk.firing()  # truncation explains it
        long.unlink()
        await walk.fires("RewardVarianceCollapsed")
        assert objects(await walk.look("RewardVarianceCollapsed"))[-1]["std"] == 0.0


class _Stuck(ScriptedEngine):
    """The second rollout loads the first weights, and never later ones."""

    number = 0
    over: asyncio.Event

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        type(self).number += 1
        self._stuck = type(self).number == 2
        self._loaded = False

    async def load_weights(self, path: Path, version: PolicyVersion, *switch: Any) -> None:
        if self._stuck and self._loaded:
            await self.over.wait()
        self._loaded = True
        await super().load_weights(path, version, *switch)


async def test_a_rollout_that_does_not_load_new_weights(walk: Walk) -> None:
    over = asyncio.Event()
    walk.simulation.engine_class = type("_Engine", (_Stuck,), {"over": over})
    async with walk.observed(PLAUDIT_MAX_STALENESS="1"), walk.training(rollouts=2, staleness=1):
        await walk.fires("RolloutBehind")
        workers = json.loads(await walk.look("RolloutBehind"))
        versions = {worker["worker"]: worker["version"] for worker in workers if worker["role"] == "rollout"}
        assert len(set(versions.values())) == 2, workers
        over.set()


class _Compared(ScriptedBackend):
    """Reports figures of a bfloat16 policy that discards its updates and whose rollouts have other weights."""

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        compared = {"actor/logprob_mismatch": 0.5, "actor/logprob_mismatch_limit": 0.3}
        return super().update(groups) | compared | {"actor/skipped_updates": 1.0}


async def test_a_rollout_with_other_weights_and_samples_beyond_the_bound(walk: Walk) -> None:
    walk.simulation.policy_class = _Compared
    # The job allows less than its trainer does: no defect that trains such samples is known.
    async with walk.observed(PLAUDIT_MAX_STALENESS="0"), walk.training(staleness=1):
        await walk.fires("LogprobMismatch", "UpdatesDiscarded", "StalenessBeyondBound")
        steps = objects(await walk.look("LogprobMismatch"))
        assert {(step["mismatch"], step["limit"]) for step in steps} == {(0.5, 0.3)}
        assert {step["discarded"] for step in objects(await walk.look("UpdatesDiscarded"))} == {1.0}
        assert max(step["s"] for step in objects(await walk.look("StalenessBeyondBound"))) == 1


async def test_workers_that_are_lost_again_and_again(walk: Walk) -> None:
    leases = {"lease_s": 0.5, "renew_every_s": 0.1, "reclaim_every_s": 0.1}
    walk.simulation.consumer |= leases | {"poison_limit": 1000, "suspect_from": 1000}
    async with walk.observed(), walk.training(), walk.redis() as transport:
        prompts = transport.names.prompts

        async def losing() -> None:
            """A rollout that ends as soon as it has taken a prompt, again and again."""
            for number in itertools.count():
                consumer = f"lost-{number}"
                await transport.commands.xreadgroup(CONSUMER_GROUPS["prompts"], consumer, {prompts: ">"}, 1, block=200)
                await asyncio.sleep(0.2)

        async with meanwhile(losing()):
            await walk.fires("Redelivering")
        taken_over = series(await walk.look("Redelivering", program="curl"))
        assert taken_over[next(name for name in taken_over if "prompts" in name)] > 0


async def test_records_that_cannot_be_read(walk: Walk) -> None:
    folder = walk.simulation.folder
    async with walk.observed(), walk.training(), walk.redis() as transport:

        async def writing() -> None:
            while True:
                fields = {"sample": "t-0-1.0 0 digest", "record": b"\x01garbage"}
                await transport.commands.xadd(transport.names.samples, fields)
                await asyncio.sleep(1)

        async with meanwhile(writing()):
            await walk.fires("DeadLetters")
        write_redis_address(folder, walk.simulation.address)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        letters = await walk.look("DeadLetters", folder=folder.parents[1], environment={"PATH": path})
        assert "samples" in letters


async def test_events_that_redis_drops_before_they_are_read(walk: Walk) -> None:
    async with walk.observed(), walk.training(), walk.redis() as transport:

        async def dropping() -> None:
            while True:
                await transport.commands.xtrim(transport.names.events, maxlen=0)
                await asyncio.sleep(0.02)

        async with meanwhile(dropping()):
            await walk.fires("EventsLost")
        assert max(step["records_missing"] for step in objects(await walk.look("EventsLost"))) > 0


async def test_a_redis_without_its_append_only_file(tmp_path: Path, run_name: str, prometheus: Any) -> None:
    if not shutil.which("redis-cli"):
        pytest.skip("redis-cli is not installed (Debian: apt-get install redis-tools)")
    with RedisServer(tmp_path / "redis") as server:
        walk = Walk(server, run_name, prometheus, tmp_path / "run")
        async with walk.observed(), walk.training():
            async with walk.redis() as transport:
                await transport.commands.config_set("appendonly", "no")
            await walk.fires("RedisPersistenceFailing")
            options = tmp_path / "redis-cli"  # the runbook's prefix for a pod gives it password and address
            options.write_text(f'#!/bin/sh\nexec {shutil.which("redis-cli")} -p {server.port} "$@"\n')
            options.chmod(0o755)
            environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "REDISCLI_AUTH": server.password}
            assert "aof_enabled:0" in await walk.look("RedisPersistenceFailing", environment=environment)


async def test_a_service_that_receives_more_than_it_scores(
    start_service: StartService, walk: Walk, tmp_path: Path
) -> None:
    """The alert itself needs a backlog that grows for half an hour: ``test_matrix``."""
    slow = {
        "name": "slow",
        "kind": "python",
        "python": {"path": "reward.py", "function": "slow"},
        "isolation": "thread",
    }
    let_go = tmp_path / "let-go"
    async with start_service(slow, slots=1000) as service, walk.observed(), service.client() as client:

        async def feeding() -> None:
            for _ in range(1000):
                await client.submit([{"response": "held", "ground_truth": "1"}] * 25)
                await asyncio.sleep(0.2)

        try:
            async with meanwhile(feeding()):
                await until_in_thread(lambda: walk.waiting() > 2 * THRESHOLDS["backlogEntries"])
                backlog = json.loads(await walk.look("BacklogGrowing"))
        finally:
            let_go.touch()
        assert backlog[-1] > backlog[0]
