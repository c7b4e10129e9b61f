"""Measure how much reward latency four strategies hide: verl's pull request 2854, scaled down, with real processes.

Real are Redis, the streams, the rollout process, the reward process and the trainer's conductor; the engine is scripted
and an update only takes its time. What 2854 did (Qwen2-7B on GSM8K, 8 GPUs, 1-40 s of delay a sample, 256 rewards at a
time): 17 h 53 min with a barrier after every stage, 15 h 41 min with a mini-batch pipeline (-12.0 %), 13 h 23 min with
one-step off-policy (-24.7 %), 12 h 22 min with both (-30.4 %).

Assumptions, for the pull request gives hours, not the times of a step: 105 steps (15 epochs of verl's GSM8K example) of
1,024 prompts x 5 samples in 4 mini-batches. A step of the baseline then took 613 s, of which rewards were 5,120 samples
x 20.5 s / 256 = 410 s. The other 203 s are split evenly: 100 s of generation, 100 s of updates. All times are divided
by 20 here; the numbers of prompts, samples and simultaneous rewards are 2854's.

| strategy | maxStaleness | miniBatchesPerStep | generation |
| --- | --- | --- | --- |
| barrier (baseline) | 0 | 1 | all samples of a step end together: rewards begin when the batch is generated |
| mini-batches | 0 | 4 | in waves of an eighth; a sample is scored as soon as it is generated |
| off-policy | 1 | 1 | as above |
| both | 1 | 4 | as above |

Each is run with 256 rewards at a time and without a limit, and compared with the baseline of its own kind and with a
**lower bound** that no schedule on one engine and one trainer can beat. With S steps, G and U seconds of generation and
update a step, W = 8 waves, M = 4 mini-batches, R the sum of all delays (they are the scores, so they are known), c
rewards at a time and d the smallest delay of a group (the largest of its samples')::

    bound = max( S G + d + U/M,        the last sample is generated, scored and trained on
                 G/W + d + S U,        the first samples are generated and scored, then all updates
                 G/W + R/c + U/M )     all rewards, after the first wave and before the last mini-batch

Usage: ``python benchmarks/delay_profile.py [--json FILE] [--quick] [--strategy NAME ...] [--cap 256 | --cap none]``.
The whole takes twenty minutes and about one core. ``--shrink 4`` divides prompts and simultaneous rewards by 4 and
leaves the times as they are: the same proportions for a quarter of the work of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import yaml

from plaudit_job.load import load_job
from plaudit_metrics.sources.steps import read_steps
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.conductor import conduct
from plaudit_workers.training.scripted import ScriptedBackend
from plaudit_workers.training.sinks import Sinks
from plaudit_workers.training.state import PromptRow, RunContext, RunPlan, ServerClock
from plaudit_workers.training.worker import stream_limits

GOALS = {"none": 1.10, "256": 1.05}
"""The most that ``both`` may take, as a multiple of the lower bound."""
SAMPLES_PER_PROMPT = 5
WAVES = 8
MINI_BATCHES = 4
READY_WITHIN_S = 60.0

SCORER = """
import asyncio, random

async def delayed(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    seconds = scale * random.Random(f"{ground_truth} {solution_str}").uniform(1.0, 40.0)
    await asyncio.sleep(seconds)
    return seconds
"""


@dataclass(frozen=True)
class Profile:
    """Sizes and times of the simulation, seconds scaled."""

    steps: int
    prompts: int
    cap: int
    """Rewards at a time, in the capped half."""
    scale: float
    """Real seconds → seconds here."""

    @property
    def generation_s(self) -> float:
        """Generation of one step."""
        return 100.0 * self.scale

    @property
    def update_s(self) -> float:
        """Updates of one step."""
        return 100.0 * self.scale


@dataclass(frozen=True)
class Strategy:
    """One schedule."""

    name: str
    staleness: int
    mini_batches: int
    waves: int
    of_2854: str
    """What the pull request measured."""


STRATEGIES = [
    Strategy("barrier", 0, 1, 1, "17h53m"),
    Strategy("mini-batches", 0, MINI_BATCHES, WAVES, "-12.0%"),
    Strategy("off-policy", 1, 1, WAVES, "-24.7%"),
    Strategy("both", 1, MINI_BATCHES, WAVES, "-30.4%"),
]


@dataclass
class Result:
    """The durations of one run."""

    strategy: str
    cap: str
    wall_s: float
    bound_s: float
    bound_by: str
    plain_bound_s: float
    """max(S G, S U, R/c): the bound without what must come before and after."""
    waited_s: float
    """Of it, the trainer waited."""
    exposed_reward_s: float
    of_2854: str
    relative_to_baseline: float = float("nan")
    relative_to_bound: float = field(init=False)

    def __post_init__(self) -> None:
        self.relative_to_bound = self.wall_s / self.bound_s


class Rows:
    """Endless prompts, of which only the numbers matter."""

    def __len__(self) -> int:
        return 1 << 20

    def prompt_at(self, position: int) -> PromptRow:
        """See ``PromptSource``."""
        return PromptRow(position, "delay-profile", "?", np.array([1, 2, 3, 4], "<i4").tobytes(), str(position))

    def row_at(self, position: int) -> int:
        """See ``PromptSource``."""
        return position


def write_job(folder: Path, profile: Profile, strategy: Strategy, cap: int | None) -> Path:
    """The job that rollout, reward worker and conductor are given."""
    num_samples = profile.prompts * SAMPLES_PER_PROMPT
    (folder / "rewards.py").write_text(SCORER)
    engine = {
        "kind": "scripted",
        "maxConcurrentSamples": num_samples // strategy.waves,
        "arguments": {
            "latencySeconds": {"kind": "constant", "value": profile.generation_s / strategy.waves},
            "responseTokens": {"kind": "constant", "value": 16},
            "vocabularySize": 1000,
        },
    }
    python = {"path": str(folder / "rewards.py"), "function": "delayed", "arguments": {"scale": profile.scale}}
    document = {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "delay-profile"},
        "spec": {
            "model": {"source": str(folder)},
            "data": {"train": {"path": str(folder / "none.parquet")}},
            "algorithm": {
                "steps": profile.steps,
                "promptsPerStep": profile.prompts,
                "samplesPerPrompt": SAMPLES_PER_PROMPT,
                "maxStaleness": strategy.staleness,
                "miniBatchesPerStep": strategy.mini_batches,
            },
            "rollout": {"engine": engine, "sampling": {"maxTokens": 16}},
            "reward": {
                "scorers": [{"name": "delayed", "kind": "python", "python": python}],
                "workers": {"maxConcurrentSamples": cap or 2 * num_samples},
            },
            "trainer": {"checkpoint": {"everySteps": profile.steps}},
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def workers(folder: Path, server: RedisServer) -> Iterator[dict[str, str]]:
    """A rollout and a reward worker; yields the environment of the run's processes."""
    environment = {
        **os.environ,
        "PLAUDIT_JOB": str(folder / "job.yaml"),
        "PLAUDIT_RUN": "delay-profile",
        "PLAUDIT_RUN_FOLDER": str(folder),
        "PLAUDIT_REDIS_URL": server.url,
        "PLAUDIT_REDIS_PASSWORD": server.password,
    }
    processes = []
    for role in ("rollout", "scoring"):
        own = {**environment, "PLAUDIT_LOG_FILE": str(folder / "logs" / f"{role}.log"), "PLAUDIT_WORKER": role}
        processes.append(subprocess.Popen([sys.executable, "-m", f"plaudit_workers.{role}"], env=own))
    try:
        yield environment
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)


async def train(folder: Path, address: RedisAddress, update_s: float) -> None:
    """The trainer: conducts the run as soon as both workers are there."""
    job = load_job(folder / "job.yaml")
    plan = RunPlan.from_job(job)
    transport = await Transport.open(address, "delay-profile", spill=folder / "spill")
    sinks = Sinks(folder)
    deadline = time.monotonic() + READY_WITHIN_S
    while {worker.role for worker in await transport.workers()} != {"rollout", "reward"}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rollout and reward worker did not start within {READY_WITHIN_S:.0f} s")
        await asyncio.sleep(0.1)
    run = RunContext(
        plan=plan,
        folder=folder,
        transport=transport,
        streams=TrainerStreams(transport, stream_limits(job, plan)),
        data=Rows(),
        sinks=sinks,
        clock=ServerClock(transport.now),
    )
    prompts = plan.schedule.prompts_per_step
    policy = ScriptedBackend(folder, lambda groups: update_s * len(groups) / prompts)
    await conduct(run, policy, asyncio.Event())
    sinks.close()
    await transport.close()


def group_delays(folder: Path) -> dict[str, list[float]]:
    """Group → the delays of its samples, from the stored samples."""
    delays: defaultdict[str, list[float]] = defaultdict(list)
    for file in sorted((folder / "samples").glob("*.parquet")):
        table = pyarrow.parquet.read_table(file, columns=["group", "score"])
        for group, score in zip(table["group"].to_pylist(), table["score"].to_pylist(), strict=True):
            delays[group].append(score)
    return dict(delays)


def lower_bound(profile: Profile, cap: int | None, delays: dict[str, list[float]]) -> tuple[float, str, float]:
    """The bound of the module's text: seconds, which part of it holds, and the plain bound."""
    generation_s, update_s = profile.generation_s, profile.update_s
    reward_s = sum(map(sum, delays.values())) / cap if cap else 0.0
    least_s = min(map(max, delays.values()))
    parts = {
        "generation": profile.steps * generation_s + least_s + update_s / MINI_BATCHES,
        "update": generation_s / WAVES + least_s + profile.steps * update_s,
        "reward": generation_s / WAVES + reward_s + update_s / MINI_BATCHES,
    }
    by = max(parts, key=lambda name: parts[name])
    plain_s = max(profile.steps * generation_s, profile.steps * update_s, reward_s)
    return parts[by], by, plain_s


def measure(profile: Profile, strategy: Strategy, cap: int | None) -> Result:
    """Runs one strategy."""
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as server:
        folder = Path(name) / "run"
        folder.mkdir()
        write_job(folder, profile, strategy, cap)
        with workers(folder, server) as environment:
            trainer = [sys.executable, __file__, "--trainer", str(folder), str(profile.update_s)]
            subprocess.run(trainer, env=environment, check=True)
        steps = read_steps(folder / "steps.jsonl")
        delays = group_delays(folder)
    num_groups = profile.steps * profile.prompts
    if len(delays) != num_groups or any(len(own) != SAMPLES_PER_PROMPT for own in delays.values()):
        raise RuntimeError(f"{strategy.name}: {len(delays)} whole groups were trained, not {num_groups}")
    bound_s, bound_by, plain_s = lower_bound(profile, cap, delays)
    return Result(
        strategy=strategy.name,
        cap=str(cap) if cap else "none",
        wall_s=steps[-1].closed - steps[0].opened,
        bound_s=bound_s,
        bound_by=bound_by,
        plain_bound_s=plain_s,
        waited_s=sum(step.statistics["trainer_wait_s"] for step in steps),
        exposed_reward_s=sum(step.statistics["exposed_reward_s"] for step in steps),
        of_2854=strategy.of_2854 if cap else "",
    )


def print_table(results: Sequence[Result]) -> None:
    """All runs, each compared with the baseline of its kind."""
    print(
        f"{'strategy':14}{'cap':>6}{'wall s':>9}{'baseline':>10}{'2854':>9}{'bound s':>9}{'÷ bound':>9}"
        f"{'by':>12}{'÷ plain':>9}{'waited s':>10}{'exposed reward s':>18}"
    )
    for result in results:
        change = f"{result.relative_to_baseline - 1:+.1%}" if result.relative_to_baseline != 1 else "1"
        print(
            f"{result.strategy:14}{result.cap:>6}{result.wall_s:9.1f}{change:>10}{result.of_2854:>9}"
            f"{result.bound_s:9.1f}{result.relative_to_bound:9.3f}{result.bound_by:>12}"
            f"{result.wall_s / result.plain_bound_s:9.3f}{result.waited_s:10.1f}{result.exposed_reward_s:18.1f}"
        )


def main() -> None:
    """Runs the strategies, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and steps, for a test")
    parser.add_argument("--strategy", nargs="*", choices=[strategy.name for strategy in STRATEGIES], help="only these")
    parser.add_argument(
        "--cap", choices=["256", "none"], help="only with, or without, 2854's limit of rewards at a time"
    )
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--shrink", type=int, default=1, help="divide prompts and simultaneous rewards by so much")
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        folder, update_s = arguments.trainer
        address = RedisAddress(os.environ["PLAUDIT_REDIS_URL"], os.environ["PLAUDIT_REDIS_PASSWORD"])
        asyncio.run(train(Path(folder), address, float(update_s)))
        return
    profile = Profile(2, 32, 8, 1 / 200) if arguments.quick else Profile(8, 1024, 256, 1 / 20)
    profile = replace(
        profile,
        steps=arguments.steps or profile.steps,
        prompts=profile.prompts // arguments.shrink,
        cap=profile.cap // arguments.shrink,
    )
    results: list[Result] = []
    for cap in [cap for cap in (profile.cap, None) if arguments.cap in (None, "256" if cap else "none")]:
        own = [
            measure(profile, strategy, cap)
            for strategy in STRATEGIES
            if not arguments.strategy or strategy.name in arguments.strategy
        ]
        for result in own:
            result.relative_to_baseline = result.wall_s / own[0].wall_s
        results += own
    print_table(results)
    if arguments.json:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        content = {"profile": asdict(profile), "goals": GOALS, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(machine | content, indent=1) + "\n")


if __name__ == "__main__":
    main()
