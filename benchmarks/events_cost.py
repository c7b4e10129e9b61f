"""Measure what metrics cost the pipeline: its throughput with event records against the same pipeline without them.

Three real processes and a private Redis, as in ``transport.py`` (a trainer, a rollout, a reward worker whose score
costs nothing: nothing hides what an event costs). Rounds without events, with events, and with events and a metrics
service that reads them take turns in one run, in changing order, in the same warm processes. "Without" runs the same
scripts without the line that reports a group's samples. The result is the median, over many short rounds, of the ratio
to the round without events: a single round can be off by a tenth on a busy machine.

    python benchmarks/events_cost.py [--rounds 61] [--groups 160] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transport_streams import GROUP_SIZE, ROLES

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer, free_port
from plaudit_workers.stream.libraries import Scripts
from plaudit_workers.stream.transport import Transport

VARIANTS = ("without", "events", "events and service")
BOUND = 0.97
_REPORTS_SAMPLES = "\n  report(g)\n"

Round = tuple[str, str]
"""Run and variant."""


def scripts(variant: str) -> Scripts:
    """The transitions, with or without a sample's event."""
    if variant != "without":
        return Scripts()
    text = Scripts().files["shared/group"]
    if text.count(_REPORTS_SAMPLES) != 1:
        raise RuntimeError(f"shared/group.lua does not hold {_REPORTS_SAMPLES!r} once; adapt this benchmark")
    return Scripts({"shared/group": text.replace(_REPORTS_SAMPLES, "\n")})


def role_process(role: str, url: str, password: str, rounds: list[Round], groups: int, barrier: Any, ends: Any) -> None:
    """One process: takes part in every round, and reports when it was done."""

    async def work(run: str, variant: str) -> float:
        transport = await Transport.open(RedisAddress(url, password), run, scripts=scripts(variant))
        await asyncio.to_thread(barrier.wait)
        await ROLES[role](transport, groups, False)
        ended = time.monotonic()
        await transport.close()
        return ended

    for run, variant in rounds:
        ends.put(asyncio.run(work(run, variant)))
        barrier.wait()


def measure(server: RedisServer, rounds: list[Round], groups: int) -> list[float]:
    """Samples a second of each round."""
    context = multiprocessing.get_context("spawn")
    barrier, ends = context.Barrier(len(ROLES) + 1), context.Queue()
    arguments = (server.url, server.password, rounds, groups, barrier, ends)
    processes = [context.Process(target=role_process, args=(role, *arguments)) for role in ROLES]
    for process in processes:
        process.start()
    rates = []
    for run, variant in rounds:
        with metrics_service(server, run) if variant == VARIANTS[2] else contextlib.nullcontext():
            barrier.wait()
            start = time.monotonic()
            ended = max(ends.get() for _ in processes)
            barrier.wait()
        rates.append(groups * GROUP_SIZE / (ended - start))
    for process in processes:
        process.join()
    return rates


@contextlib.contextmanager
def metrics_service(server: RedisServer, run: str) -> Iterator[None]:
    """A metrics service that reads the run's events."""
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "PLAUDIT_RUN": run,
        "PLAUDIT_REDIS_URL": server.url,
        "PLAUDIT_REDIS_PASSWORD": server.password,
        "PLAUDIT_METRICS_PORT": str(port),
        "PLAUDIT_LOG_FILE": os.devnull,
    }
    process = subprocess.Popen([sys.executable, "-m", "plaudit_metrics"], env=environment)
    try:
        while not _ready(port):
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except OSError:
        return False


def plan(rounds: int) -> list[Round]:
    """One warm-up, then every variant in each round, beginning with another one each time."""
    planned: list[Round] = [("warm-up", VARIANTS[1])]
    for number in range(rounds):
        turned = VARIANTS[number % 3 :] + VARIANTS[: number % 3]
        planned += [(f"round-{number}-{VARIANTS.index(variant)}", variant) for variant in turned]
    return planned


def main() -> int:
    """Prints the ratios; exit code 1 when events cost more than they may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--groups", type=int, default=160)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs")
    arguments = parser.parse_args()
    rounds, groups = (1, 64) if arguments.quick else (arguments.rounds, arguments.groups)
    planned = plan(rounds)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        rates = measure(server, planned, groups)
    by_variant = {
        variant: {
            run.rpartition("-")[0]: rate
            for (run, each), rate in zip(planned[1:], rates[1:], strict=True)
            if each == variant
        }
        for variant in VARIANTS
    }
    base = by_variant["without"]
    figures = {
        variant: {
            "samples_per_s": round(statistics.median(of_rounds.values())),
            "ratio": round(statistics.median(rate / base[name] for name, rate in of_rounds.items()), 3),
        }
        for variant, of_rounds in by_variant.items()
    }
    for variant, figure in figures.items():
        print(f"{variant:20} {figure['samples_per_s']:>8} samples/s   {figure['ratio']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0 if arguments.quick or figures["events"]["ratio"] >= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
