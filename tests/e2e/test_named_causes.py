"""One real run whose parts are slowed or stopped, one after the other: the verdict names each, and so do the records.

While a fault lasts, ``/api/v1/verdict``, the page's first line and that of ``plaudit top`` say what the open step waits
for; the record of the step that it held names the same cause afterwards. The seconds from the fault until the right
sentence, which then stays, are printed (``pytest -s``), and in the file ``named_causes.txt``.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bad_network import BadNetwork
from faulty_roles import FaultyRun
from faulty_server import FaultyServer, Reply
from metrics_process import MetricsProcess
from plaudit_metrics.sources.steps import read_steps
from plaudit_metrics.terminal.overview import MetricsService
from plaudit_metrics.terminal.top import frame
from plaudit_wire.records import StepRecord
from plaudit_workers.launch.redis import RedisServer
from waiting import until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.broken]

NAMED_WITHIN_S = 240.0
"""Ten seconds where a processor is free, as the printed table shows."""


_HELD_S = 10.0
"""Other steps are shorter, also where a processor is busy."""
_BEATEN_S = 7.0
"""After so long, a heartbeat tells what a process does for this step, not for the one before."""


@dataclass
class Observed:
    """A faulty run, its judge, its network and its metrics service."""

    run: FaultyRun
    redis: RedisServer
    network: BadNetwork
    service: MetricsProcess
    judge_late_s: float = 0.0
    table: str = ""

    async def verdict(self) -> dict[str, Any]:
        """Return ``/api/v1/verdict``."""
        found: dict[str, Any] = await self.service.get("verdict")
        return found

    async def busy(self, role: str) -> str:
        """Return a process of the role that holds work of a step which is held; wait for one."""
        found: list[str] = []

        async def works() -> bool:
            queues = await self.service.get("queues")
            workers = queues["workers"] if (queues["open"]["seconds"] or 0.0) >= _BEATEN_S else []
            found[:] = [each["worker"] for each in workers if each["role"] == role and each.get("busy", 0)]
            return bool(found)

        await until(works, within_s=60, every_s=0.1)
        return found[0]

    async def closed(self, count: int) -> None:
        """Wait until so many steps have closed."""
        await until(lambda: len(self.steps()) >= count, within_s=400, every_s=0.2)

    def steps(self) -> list[StepRecord]:
        """Return the closed steps."""
        return read_steps(self.run.folder / "steps.jsonl")

    async def named(self, fault: str, cause: str, words: str, held_s: float = _HELD_S) -> int:
        """Wait until a step that is open for so long is said to wait for this cause; return its number."""
        began, seen, step, since = time.monotonic(), dict[str, None](), 0, math.inf

        async def said() -> bool:
            nonlocal step, since
            found = (await self.verdict())["open"]
            seen[f"{found['waits_for']}: {found['text']}"] = None
            step = found["step"]
            right = found["waits_for"] == cause and words in found["text"]
            since = min(since, time.monotonic()) if right else math.inf
            return bool(right and (found["seconds"] or 0.0) >= held_s and await self._is_shown(words))

        try:
            await until(said, within_s=NAMED_WITHIN_S, every_s=0.2)
        except TimeoutError:
            pytest.fail(f"{fault}: {cause!r} with {words!r} was not said, but {list(seen)}")
        self.table += f"{fault:24} {since - began:6.1f} s  {list(seen)[-1]}\n"
        return step

    async def _is_shown(self, words: str) -> bool:
        """Return True if the page's first line and that of ``plaudit top`` say so too."""
        page = (await self.service.get("queues"))["open"]["text"]
        first = await asyncio.to_thread(self._first_of_top)
        return words in page and "now: " in first and words in first

    def _first_of_top(self) -> str:
        console = Console(width=400, file=io.StringIO(), record=True)
        console.print(frame(MetricsService(self.service.url).read()))
        return console.export_text().splitlines()[1]

    async def recorded(self, fault: str, step: int, verdict: str, words: str) -> None:
        """Wait for the record of the step that the fault held; compare its verdict.

        The fault ends in the middle of the step, whose last sample may then be the slowest by far: a straggler.
        """
        await until(lambda: self._knows(step + 1), within_s=400, every_s=0.2)
        found = await self.service.get(f"steps/{step}")
        if found["verdict"] != "straggler":
            assert (found["verdict"], words in found["explanation"]) == (verdict, True), (fault, found)
        self.table += f"{'':24} step {step}: {found['verdict']}. {found['explanation']}\n"

    async def _knows(self, step: int) -> bool:
        return "verdict" in await self.service.get(f"steps/{step}")


@pytest.fixture
async def observed(run_name: str, tmp_path: Path) -> AsyncIterator[Observed]:
    """A run that trains."""
    judge = FaultyServer()
    with RedisServer(tmp_path / "redis") as redis:
        async with judge, BadNetwork(int(redis.url.rsplit(":", 1)[1].partition("/")[0])) as network:
            run = FaultyRun(redis, run_name, tmp_path / "run", port=network.port, judge_url=judge.url, staleness=0)
            service = MetricsProcess(redis, run_name, run.folder, {"PLAUDIT_MAX_STALENESS": "0"})
            found = Observed(run, redis, network, service)
            judge.reply = lambda request, number: Reply(after_s=found.judge_late_s)
            async with run.running():
                try:
                    await service.start()
                    await found.closed(3)
                    yield found
                finally:
                    await service.kill()
                    print(f"\n{found.table}")
                    (tmp_path / "named_causes.txt").write_text(found.table)


SLOWED = [
    ("slow scorer", {"scorer": 16.0}, "scorer", "calls of exact in flight", "reward", "The slowest is exact"),
    ("slow engine", {"engine": 16.0}, "generation", "prompts are with rollouts", "generation", "add rollouts"),
    ("slow tool", {"tool": 16.0}, "tools", "wait for tools", "tools", "The slowest is press"),
    ("slow environment", {"environment": 16.0}, "tools", "wait for tools", "tools", "tools of agents"),
    ("slow trainer", {"trainer": 40.0}, "trainer", "the trainer updates the policy", "trainer", "the update itself"),
    ("slow weights", {"weights": 16.0}, "weights", "new weights", "generation", "s to load new weights"),
]


async def test_each_fault_is_named_while_it_lasts_and_in_the_record_of_its_step(observed: Observed) -> None:
    for fault, seconds, cause, said, verdict, recorded in SLOWED:
        observed.run.break_(**seconds)
        step = await observed.named(fault, cause, said)
        observed.run.mend()
        await observed.recorded(fault, step, verdict, recorded)

    observed.judge_late_s = 6.0
    step = await observed.named("judge at its limit", "limiter", "calls of judge wait for a limit")
    observed.judge_late_s = 0.0
    await observed.recorded("judge at its limit", step, "limiter", "limits of a scorer")

    observed.run.break_(scorer=16.0)
    await observed.busy("reward")
    observed.run.freeze("trainer")
    observed.run.mend()
    waited_s = 4 * 16.0  # most of the step's wait is then for the trainer
    step = await observed.named("frozen trainer", "silent-trainer", "for which scored groups wait", held_s=waited_s)
    observed.run.thaw("trainer")
    await observed.recorded("frozen trainer", step, "trainer", "Groups were ready")

    for role, slow, verdict, recorded in (
        ("reward", {"scorer": 16.0}, "reward-queue", "with a reward worker that was frozen or lost"),
        ("rollout", {"engine": 16.0}, "generation", "taken over from a rollout that was frozen or lost"),
    ):
        observed.run.break_(**slow)
        frozen = await observed.busy(role)
        observed.run.freeze(frozen)
        observed.run.mend()
        step = await observed.named(f"frozen {role}", f"silent-{role}", f"{frozen} with", held_s=0.0)
        await observed.closed(step)
        observed.run.thaw(frozen)
        await observed.recorded(f"frozen {role}", step, verdict, recorded)

    late = random.Random(1)
    observed.network.late_s = lambda: late.uniform(0.1, 0.9)
    step = 1 + await observed.named("slow Redis", "redis-slow", "for a reply", held_s=0.0)
    await observed.closed(step)
    observed.network.late_s = lambda: 0.0
    await observed.recorded("slow Redis", step, "redis", "Redis replied slowly")

    observed.network.cut()
    step = await observed.named("cut network", "silent", "no process of the run has sent a heartbeat", held_s=0.0)
    observed.network.restore()
    await observed.recorded("cut network", step, "redis", "Redis ")

    assert observed.redis.pid is not None
    os.kill(observed.redis.pid, signal.SIGSTOP)
    try:
        step = await observed.named("paused Redis", "redis", "Redis has not responded", held_s=0.0)
    finally:
        os.kill(observed.redis.pid, signal.SIGCONT)
    # Not answering, or answering slowly: a trainer that asks nothing in a part of the pause does not know all of it.
    await observed.recorded("paused Redis", step, "redis", "Redis ")

    observed.run.break_(scorer=16.0)
    await observed.busy("reward")
    await observed.service.kill()
    await observed.run.kill()
    observed.redis.kill()
    observed.redis.start()
    await observed.service.start()
    await observed.named("killed run", "silent", "no process of the run has sent a heartbeat", held_s=0.0)
    await observed.run.start()
    await observed.named("slow scorer, resumed", "scorer", "calls of exact in flight")
