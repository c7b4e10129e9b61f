"""Measure samples with a machine each: what machines cost, and what verification off the critical path saves.

- *machine*: seconds and CPU seconds of a machine of the provider ``process``, one after another: making it with a file,
  a command, the tests, removing it. A ballast of memory stands for the model that a rollout holds. Machines with four
  commands and tests that end at once, many at a time: machines a second.
- *samples*: 256 samples; an agent has 4 turns of 1 s, each with a command, and the tests sleep 5-40 s. Agents have 64
  places. *freed*: tests run beside them, as reward workers run them. *inline*: a sample keeps its place until its tests
  have ended, as TRL's rollouts do. The bound: samples begin in their order as places become free (nobody knows how long
  tests take), and nothing but turns and tests takes time.

Machines, tools and scorer are the product's; generation is a sleep, and there are no streams.

Usage: ``python benchmarks/sandboxes.py [--json FILE] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from plaudit_job.tasks import Task, read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_reward.scorer import Attempt
from plaudit_reward.verifier import VerifierScorer
from plaudit_wire.records import Sample

GROUP = "t-0-1.0"
NUM_TURNS = 4
WALL_GOAL = 1.15
COLD_GOAL_S = 0.1
COMMAND_GOAL_S = 0.03


@dataclass(frozen=True)
class Load:
    """The samples of one measurement."""

    samples: int = 256
    places: int = 64
    turn_s: float = 1.0
    shortest_s: float = 5.0
    longest_s: float = 40.0
    machines: int = 50
    """Made one after another."""
    ballast_bytes: int = 1 << 30


QUICK = Load(samples=24, places=6, turn_s=0.2, shortest_s=0.5, longest_s=3.0, machines=8, ballast_bytes=1 << 27)


def write_task(folder: Path, verify_s: float) -> Task:
    """Write a task whose tests sleep."""
    files = {
        "instruction.md": "Write done to answer.",
        "task.toml": "",
        "environment/given": "a file of the task\n",
        "tests/test.sh": f"sleep {verify_s}\ntest -s answer && echo 1 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_task(folder)


def sample_of(task: Task, index: int, machine: str) -> Sample:
    """Return a sample whose agent has left a machine."""
    row = task.row()
    extra = row["extra_info"]
    return Sample(GROUP, index, row["data_source"], task.instruction, "done", extra_info=extra, machine=machine)


async def measure_machine(machines: RunMachines, task: Task, load: Load) -> dict[str, float]:
    """Return the median seconds of each part of a machine's life."""
    ballast = bytearray(load.ballast_bytes)
    ballast[::4096] = b"x" * len(ballast[::4096])
    seconds: dict[str, list[float]] = {"cold": [], "command": [], "verify": [], "remove": []}
    scorer = VerifierScorer("tests", machines, 1)
    await scorer.open()
    for index in range(load.machines):
        clock = time.monotonic
        times = [clock()]
        name, made = machines.make(GROUP, index, task)
        await made.machine.run(["sh", "-c", "echo done > answer"], timeout_s=60.0)
        times.append(clock())
        await made.machine.run(["cat", "answer"], timeout_s=60.0)
        times.append(clock())
        score = await scorer.score(sample_of(task, index, name), Attempt(60.0))
        times.append(clock())
        machines.provider.remove(machines.folder / name)
        times.append(clock())
        if score.value != 1.0:
            raise SystemExit(f"a machine earned {score.value} ({score.reason})")
        for part, (begin, end) in zip(seconds, itertools.pairwise(times), strict=True):
            seconds[part].append(end - begin)
    return {f"{part}_p50_s": statistics.median(values) for part, values in seconds.items()}


async def run_samples(machines: RunMachines, tasks: list[Task], load: Load, *, inline: bool) -> float:
    """Return the seconds until all samples are verified."""
    places = asyncio.Semaphore(load.places)
    scorer = VerifierScorer("tests", machines, load.samples)
    began_s = time.monotonic()

    async def agent(index: int) -> str:
        name, made = await asyncio.to_thread(machines.make, GROUP, index, tasks[index])
        for _ in range(NUM_TURNS):
            await asyncio.sleep(load.turn_s)
            await made.machine.run(["sh", "-c", "echo done > answer"], timeout_s=60.0)
        return name

    async def verified(index: int, name: str) -> None:
        score = await scorer.score(sample_of(tasks[index], index, name), Attempt(600.0))
        if score.value != 1.0:
            raise SystemExit(f"sample {index} earned {score.value} ({score.reason})")
        await asyncio.to_thread(machines.provider.remove, machines.folder / name)

    async def sample(index: int) -> None:
        async with places:
            name = await agent(index)
            if inline:
                await verified(index, name)
        if not inline:
            await verified(index, name)

    await asyncio.gather(*map(sample, range(load.samples)))
    return time.monotonic() - began_s


def bound_s(verify_s: list[float], load: Load, *, inline: bool) -> float:
    """Return the seconds that samples in this order need where nothing but turns and tests takes time."""
    agent_s, ended_s = NUM_TURNS * load.turn_s, 0.0
    places = [0.0] * load.places
    for each in verify_s:
        left_s = places[0] + agent_s
        ended_s = max(ended_s, left_s + each)
        heapq.heapreplace(places, left_s + each if inline else left_s)
    return ended_s


async def measure(folder: Path, load: Load) -> dict[str, float]:
    """Measure both, in a folder."""
    machines = RunMachines(folder / SANDBOXES, ProcessProvider(MachineChoice()))
    at_once = write_task(folder / "at-once", 0.0)
    figures = await measure_machine(machines, at_once, load)
    busy = replace(load, turn_s=0.0)
    figures["machines_per_s"] = load.samples / await run_samples(machines, [at_once] * load.samples, busy, inline=False)
    draw = random.Random(1)
    verify_s = [round(draw.uniform(load.shortest_s, load.longest_s), 2) for _ in range(load.samples)]
    tasks = [write_task(folder / f"task-{index}", each) for index, each in enumerate(verify_s)]
    for name, inline in (("freed", False), ("inline", True)):
        figures[f"{name}_bound_s"] = bound_s(verify_s, load, inline=inline)
        figures[f"{name}_s"] = await run_samples(machines, tasks, load, inline=inline)
        figures[f"{name}_by_bound"] = figures[f"{name}_s"] / figures[f"{name}_bound_s"]
    figures["inline_by_freed"] = figures["inline_s"] / figures["freed_s"]
    return figures


def main() -> int:
    """Run the benchmark; return 1 if a goal is missed, unless quick."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="few samples and short tests")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plaudit-sandboxes-") as folder:
        Path(folder).chmod(0o711)
        Path(folder, SANDBOXES).mkdir()
        figures = asyncio.run(measure(Path(folder), QUICK if given.quick else Load()))
    for name, value in figures.items():
        print(f"{name:18} {value:8.3f}")
    if given.json:
        given.json.write_text(json.dumps(figures))
    met = (
        figures["freed_by_bound"] <= WALL_GOAL
        and figures["cold_p50_s"] <= COLD_GOAL_S
        and figures["command_p50_s"] <= COMMAND_GOAL_S
    )
    return 0 if given.quick or met else 1


if __name__ == "__main__":
    sys.exit(main())
