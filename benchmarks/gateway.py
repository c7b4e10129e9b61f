"""Measure a reward service over HTTP, end to end: client → gateway → Redis → worker with isolation → and back.

Four parties in processes of their own: a private Redis (password, AOF everysec), a reward worker whose scorer is a
function that does nothing in a child process, a gateway, and this process with the client. A response has 400 words.

- *samples/s*: ``SAMPLES`` samples, 2,000 callers at once, each awaiting the score of one sample at a time; median of
  ``REPEATS`` rounds, everything warm.
- *CPU-s per 1,000*: user + system time of the service (Redis, worker with its children, gateway), and of the client.
- *added*: one caller every 5 ms (200/s); milliseconds from the call to its result.

With ``--verl PYTHON`` a function that does nothing goes through verl's own reward loop in that interpreter in the same
run (``reward_loop_verl.py``), so the ratio has the same machine and load on both sides.

Usage: ``python benchmarks/gateway.py [--json FILE] [--quick] [--verl PYTHON]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from reward_loop import run_verl
from transport import cpu_seconds

from plaudit_client import RewardClient
from plaudit_workers.launch.redis import RedisServer, free_port

SAMPLES, CALLERS, REPEATS = 20_000, 2_000, 3
RATE_PER_S, PACED_S = 200, 15.0
WORDS = 400
TOKEN = "token-of-the-benchmark"
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
Result = dict[str, float]


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        url: of its gateway.
        pids: of Redis, worker and gateway, by name.
    """

    url: str
    pids: dict[str, int]


@contextlib.contextmanager
def running_service(folder: Path) -> Iterator[Service]:
    """Start the processes of a service; end them."""
    (folder / "reward.py").write_text(FUNCTION)
    scorer = {"name": "nothing", "kind": "python", "python": {"path": "reward.py"}, "isolation": "process"}
    workers = {"processes": 1, "maxConcurrentSamples": 2048}
    job = {"metadata": {"name": "bench"}, "spec": {"reward": {"scorers": [scorer], "workers": workers}}}
    (folder / "job.yaml").write_text(yaml.safe_dump({"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", **job}))
    (folder / "tokens").mkdir()
    (folder / "tokens" / "client").write_text(TOKEN)
    port = free_port()
    with RedisServer(folder / "redis") as redis, contextlib.ExitStack() as stack:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PLAUDIT_JOB": str(folder / "job.yaml"),
            "PLAUDIT_RUN": "bench",
            "PLAUDIT_RUN_FOLDER": str(folder),
            "PLAUDIT_REDIS_URL": redis.url,
            "PLAUDIT_REDIS_PASSWORD": redis.password,
            "PLAUDIT_GATEWAY_PORT": str(port),
            "PLAUDIT_GATEWAY_TOKENS": str(folder / "tokens"),
        }
        pids = {"redis": redis.pid or 0}
        for role in ("scoring", "gateway"):
            command = [sys.executable, "-m", f"plaudit_workers.{role}"]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
            pids[role] = process.pid
        yield Service(f"http://127.0.0.1:{port}", pids)


def sample(number: int, words: list[str]) -> dict[str, Any]:
    """A sample of 400 words, as a trainer has it."""
    draw = random.Random(number)
    return {
        "data_source": "openai/gsm8k",
        "prompt": "How many clips did she sell?",
        "response": " ".join(draw.choices(words, k=WORDS)),
        "ground_truth": str(number),
        "extra_info": {"index": number, "split": "train"},
    }


async def burst(client: RewardClient, samples: list[dict[str, Any]]) -> None:
    """Score all samples with 2,000 callers, each of which awaits one at a time."""
    left = iter(samples)

    async def caller() -> None:
        for each in left:
            assert (await client.score(each)).score == 1.0

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def paced(client: RewardClient, samples: list[dict[str, Any]], seconds: float) -> list[float]:
    """Score one sample every 5 ms; return the milliseconds of each."""
    took: list[float] = []

    async def one(each: dict[str, Any]) -> None:
        began = time.perf_counter()
        await client.score(each)
        took.append(1000 * (time.perf_counter() - began))

    began, tasks = time.perf_counter(), []
    for number in range(int(RATE_PER_S * seconds)):
        await asyncio.sleep(max(began + number / RATE_PER_S - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(one(samples[number % len(samples)])))
    await asyncio.gather(*tasks)
    return sorted(took)


async def measure(service: Service, quick: bool) -> Result:
    """All figures of one service."""
    count, repeats = (SAMPLES // 10, 1) if quick else (SAMPLES, REPEATS)
    words = [f"word{number}" for number in range(2_000)]
    samples = [sample(number, words) for number in range(count)]
    rounds = []
    async with RewardClient(service.url, TOKEN) as client:
        await burst(client, samples[:CALLERS])
        for _ in range(repeats):
            before, began_s = cpu_s(service), time.perf_counter()
            await burst(client, samples)
            seconds = time.perf_counter() - began_s
            spent = {name: 1000 * (after - before[name]) / count for name, after in cpu_s(service).items()}
            rounds.append({"samples_per_s": count / seconds, **{f"cpu_{name}": each for name, each in spent.items()}})
        took = await paced(client, samples, PACED_S / 5 if quick else PACED_S)
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    found["cpu_service"] = sum(found[f"cpu_{name}"] for name in service.pids)
    return found | {"p50_ms": took[len(took) // 2], "p99_ms": took[int(len(took) * 0.99)]}


def cpu_s(service: Service) -> dict[str, float]:
    """CPU seconds of each process of the service, with its children, and of this one."""
    return {name: cpu_seconds(pid) for name, pid in service.pids.items()} | {"client": time.process_time()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--verl", metavar="PYTHON", help="an interpreter of an environment that has verl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as service:
        found: dict[str, Any] = asyncio.run(measure(service, arguments.quick))
    print(f"{found['samples_per_s']:.0f} samples/s with {CALLERS:,} callers at once")
    parts = ", ".join(f"{name} {found[f'cpu_{name}']:.3f}" for name in ("redis", "scoring", "gateway", "client"))
    print(
        f"{found['cpu_service']:.3f} CPU-s per 1,000 in the service, {found['cpu_client']:.3f} in the client ({parts})"
    )
    print(f"at {RATE_PER_S}/s: p50 {found['p50_ms']:.1f} ms, p99 {found['p99_ms']:.1f} ms")
    if arguments.verl:
        found["verl"] = noop_of_verl(arguments.verl)
        print(f"verl's reward loop: {found['verl']['samples_per_s']:.0f}/s, {found['verl']['cpu']:.3f} CPU-s per 1,000")
    if arguments.json:
        about = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": sys.version.split()[0]}
        arguments.json.write_text(json.dumps({**about, **found}, indent=1))


def noop_of_verl(python: str) -> Result:
    """The function that does nothing, through verl's reward loop."""
    results = {each["case"]: each for each in run_verl(python, quick=True)["results"]}
    name = next(name for name in results if "no-op" in name)
    count = 500
    return {"samples_per_s": count / results[name]["seconds"], "cpu": 1000 * results[name]["cpu_s"] / count}


if __name__ == "__main__":
    main()
