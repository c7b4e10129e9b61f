"""Measure conversations with slow tools: wall clock against its lower bound, and delays of the engine's event loop.

- *conversations*: 256 samples of 4 turns at once; each of the first 3 turns calls a tool that blocks for 0.5-5 s. The
  bound is the longest sum of one sample's tools and turns: with room for all samples, no schedule is shorter.
- *loop*: 50 samples whose tools block at the same time. A task on the event loop of the rollout, which also runs the
  engine, sleeps 5 ms again and again; its lateness is the delay that any engine step would have. The same is measured
  before, with nothing to do: the machine's own lateness.

A real rollout worker on a private Redis, with real tool processes; the engine plays a script. The tools return how long
they slept.

With ``--verl PYTHON`` the same conversations are held in verl's tool agent loop in that interpreter, in the same run:
once with a tool that blocks, which verl runs in a thread of the worker (Python's default: as many as the machine has
CPUs, and 4 more), once with an async one. verl's default is 8 workers, whose start takes minutes on two cores:
``--verl-workers`` is 2, and the table has the number. Only the conversations are timed, not the start.

Usage: ``python benchmarks/agent_loop.py [--json FILE] [--quick] [--verl PYTHON] [--verl-workers N]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import Announcement, PolicyVersion, Prompt, Sampling
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker, build_engine, open_agent
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.weights.published import weights_digest

EXAMPLE = Path(__file__).parents[1] / "examples" / "10-agent"
SAMPLES_PER_PROMPT = 8
NUM_CALLS = 3
TURN_S = 0.05
PROBE_EVERY_S = 0.005
IDLE_S = 3.0
WALL_GOAL = 1.10
DELAY_GOAL_MS = 5.0

TOOLS = '''
import os, random, time


def wait(low: float, high: float) -> float:
    """Block for a random time.

    Args:
        low: fewest seconds
        high: most seconds
    """
    seconds = random.Random(os.urandom(8)).uniform(low, high)
    time.sleep(seconds)
    return seconds
'''
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: agent-loop}}
spec:
  model: {{source: {folder}/model, dtype: float32}}
  data: {{train: {{path: none.parquet, maxPromptLength: 64}}}}
  algorithm: {{steps: 1, promptsPerStep: 1, samplesPerPrompt: {samples}}}
  rollout:
    engine:
      kind: scripted
      maxModelLength: 8192
      maxConcurrentSamples: 256
      arguments:
        latencySeconds: {{kind: constant, value: {turn_s}}}
        turns: {turns}
    sampling: {{maxTokens: 4096}}
    agent:
      kind: tools
      tools: [{{path: {folder}/tools.py, function: wait}}]
      maxConcurrentSamples: 256
  reward: {{scorers: [{{name: a, kind: environment}}]}}
  trainer: {{}}
"""


@dataclass(frozen=True)
class Load:
    """One round."""

    name: str
    num_samples: int
    low_s: float
    high_s: float


class LoopProbe:
    """Measures the lateness of an event loop until ``stop`` is called."""

    def __init__(self) -> None:
        self._delays_s: list[float] = []
        self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(PROBE_EVERY_S)
            self._delays_s.append(time.perf_counter() - began - PROBE_EVERY_S)

    def stop(self) -> dict[str, float]:
        """Return milliseconds: p50, p99 and the largest."""
        self._task.cancel()
        p50, p99 = np.percentile(self._delays_s, [50, 99])
        return {"p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99), "max_ms": 1e3 * max(self._delays_s)}


def make_job(folder: Path, load: Load) -> RLJob:
    """Write and load the job of a round; the model is written by the first."""
    if not (folder / "model").is_dir():
        runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"](folder)
    (folder / "tools.py").write_text(TOOLS)
    call = {"name": "wait", "arguments": {"low": load.low_s, "high": load.high_s}}
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>"] * NUM_CALLS + ["Done."]
    fields = {"folder": folder, "samples": SAMPLES_PER_PROMPT, "turn_s": TURN_S, "turns": json.dumps(turns)}
    (folder / "job.yaml").write_text(JOB.format(**fields))
    return load_job(folder / "job.yaml")


@contextlib.asynccontextmanager
async def worker(
    job: RLJob, address: RedisAddress, run: str, folder: Path
) -> AsyncIterator[tuple[Transport, TrainerStreams]]:
    """Run a rollout worker; gives the trainer's side of its streams once it is ready."""
    ours, theirs = await Transport.open(address, run), await Transport.open(address, run)
    streams, stop = TrainerStreams(ours, StreamLimits(max_open_groups=10_000)), asyncio.Event()
    version = PolicyVersion(await streams.take_over(), 0)
    await streams.announce(Announcement(version, str(folder / "model"), weights_digest(folder / "model")))
    options = RolloutOptions(
        max_concurrent_samples=job.spec.rollout.engine.max_concurrent_samples,
        max_samples_in_agents=job.spec.rollout.agent.max_concurrent_samples,
        samples_per_prompt=SAMPLES_PER_PROMPT,
    )
    async with open_agent(job) as agent:
        rollout = RolloutWorker("rollout-0", theirs, build_engine(job), agent, options)
        running = asyncio.create_task(rollout.run(stop))
        try:
            await until(lambda: _true(rollout.ready))
            yield ours, streams
        finally:
            stop.set()
            await running
            await theirs.close()
            await ours.close()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until ``check`` returns True."""
    while True:
        if await check():
            return
        await asyncio.sleep(0.02)


async def _true(value: bool) -> bool:
    return value


async def measure(load: Load, address: RedisAddress, folder: Path) -> dict[str, Any]:
    """Run one round."""
    job = make_job(folder, load)
    async with worker(job, address, load.name, folder) as (transport, streams):
        idle = LoopProbe()
        await asyncio.sleep(IDLE_S)
        idle_delays = idle.stop()
        probe, started = LoopProbe(), time.perf_counter()
        groups = [await admit(streams, load, number) for number in range(-(-load.num_samples // SAMPLES_PER_PROMPT))]
        total = SAMPLES_PER_PROMPT * len(groups)
        await until(lambda: _all_published(transport, total))
        wall_s, delays = time.perf_counter() - started, probe.stop()
        sums = [seconds for group in groups for seconds in await tool_seconds(streams, group)]
    bound_s = max(sums) + (NUM_CALLS + 1) * TURN_S
    ratio = wall_s / bound_s
    return {
        "name": load.name,
        "samples": total,
        "wall_s": wall_s,
        "bound_s": bound_s,
        "ratio": ratio,
        "loop": delays,
        "idle": idle_delays,
    }


async def _all_published(transport: Transport, total: int) -> bool:
    return int(await transport.commands.xlen(transport.names.samples)) >= total


async def admit(streams: TrainerStreams, load: Load, number: int) -> str:
    """Admit one prompt; returns its group."""
    prompt = Prompt(
        group=f"t-{number}-1.0",
        position=number,
        split="train",
        step=1,
        n=SAMPLES_PER_PROMPT,
        min_version=PolicyVersion(streams.incarnation, 0),
        seed=1000 * number,
        sampling=Sampling(max_tokens=4096),
        data_source=load.name,
        prompt="wait",
        prompt_ids=np.arange(8, dtype="<i4").tobytes(),
        messages=[{"role": "user", "content": "wait"}],
    )
    await streams.admit(prompt)
    return prompt.group


async def tool_seconds(streams: TrainerStreams, name: str) -> list[float]:
    """Return for each sample of a group the seconds that its tools slept."""
    group = await streams.read(name)
    assert group is not None
    sums = []
    for sample in group.samples:
        assert sample.body is not None
        results = [message["content"] for message in sample.body.sample.completion if message["role"] == "tool"]
        assert len(results) == NUM_CALLS, sample.body.sample.completion
        sums.append(sum(map(float, results)))
    return sums


async def main_async(loads: list[Load]) -> list[dict[str, Any]]:
    """Run all rounds, one after the other."""
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as server:
        folder = Path(name)
        return [await measure(load, RedisAddress(server.url, server.password), folder) for load in loads]


def run_verl(python: str, workers: int, load: Load) -> dict[str, Any]:
    """Hold the conversations of a round in verl's tool agent loop, in an interpreter that has verl."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "verl.json"
        runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"](folder)
        command = [python, "-c", "import agent_loop_verl; agent_loop_verl.main()", "--out", str(out)]
        command += ["--model", str(folder / "model"), "--workers", str(workers), "--calls", str(NUM_CALLS)]
        command += ["--samples", str(load.num_samples), "--turn", str(TURN_S)]
        command += ["--low", str(load.low_s), "--high", str(load.high_s)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent), "OMP_NUM_THREADS": "1"}
        environment["VERL_LOGGING_LEVEL"] = "ERROR"  # a warning for each conversation would cost time
        environment["RAY_agent_register_timeout_ms"] = "300000"  # a raylet ends when its agents start slowly
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def print_verl(found: dict[str, Any]) -> None:
    """Print a line for each kind of tools."""
    for row in found["rows"]:
        name = f"verl {found['version']}, {row['kind']} tools, {found['workers']} workers (started in "
        print(
            f"{row['samples']:23}{row['wall_s']:9.2f}{row['bound_s']:9.2f}{row['ratio']:7.3f}  "
            f"{name}{found['start_s']:.0f} s)"
        )


def main() -> int:
    """Print a table; the exit code is 1 if a goal is missed (never with --quick)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="24 samples with tools of 0.05-0.3 s, for the tests")
    parser.add_argument("--verl", metavar="PYTHON", help="an interpreter of an environment that has verl")
    parser.add_argument("--verl-workers", type=int, default=2, help="its agent loop workers (default: 2; verl's: 8)")
    arguments = parser.parse_args()
    loads = [Load("conversations", 256, 0.5, 5.0), Load("loop", 50, 2.0, 2.0)]
    if arguments.quick:
        loads = [Load("conversations", 24, 0.05, 0.3)]
    rows = asyncio.run(main_async(loads))
    print(f"{'round':15}{'samples':>8}{'wall s':>9}{'bound s':>9}{'ratio':>7}{'loop p99 ms':>13}{'idle p99 ms':>13}")
    for row in rows:
        print(
            f"{row['name']:15}{row['samples']:8}{row['wall_s']:9.2f}{row['bound_s']:9.2f}{row['ratio']:7.3f}"
            f"{row['loop']['p99_ms']:13.2f}{row['idle']['p99_ms']:13.2f}"
        )
    figures: dict[str, Any] = {row["name"]: row for row in rows}
    if arguments.verl:
        figures["verl"] = run_verl(arguments.verl, arguments.verl_workers, loads[0])
        print_verl(figures["verl"])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    missed = [row for row in rows if row["name"] == "conversations" and row["ratio"] > WALL_GOAL]
    missed += [row for row in rows if row["name"] == "loop" and row["loop"]["p99_ms"] > DELAY_GOAL_MS]
    if arguments.quick or not missed:
        return 0
    print(f"missed: {', '.join(row['name'] for row in missed)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
