"""Measure how long the metrics service's event loop stands still around the close of a large step.

The real service, with a private Redis, an event stream as reward workers write it, and traces switched on, in this
process's event loop. A task that sleeps a millisecond at a time measures the largest delay of the loop in each phase:

- ``reading``: the service reads the records of all samples and groups;
- ``closing``: the record of the step arrives, until ``/api/v1/steps`` shows it and its spans are built (the collector
  of traces does not exist, which costs no more than one);
- ``timeline``: a client requests the timeline of the step's 5,000 slowest samples.

``wall ms`` is what a scrape would wait. ``cpu ms`` is the CPU time of the loop's thread in its longest turn: it does
not grow with the load of the machine, but leaves out time in which another thread held the interpreter.

    python benchmarks/step_close.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from step_statistics import make_step

from plaudit_metrics.service.serve import serve
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_wire.names import Names
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer, free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from event_entries import encode_event

RUN = "step-close"
_WITHIN_S = 120.0


@dataclass
class Delays:
    """The longest turns of an event loop, by the phase in which they ended."""

    phase: str = "reading"
    wall_ms: dict[str, float] = field(default_factory=dict)
    cpu_ms: dict[str, float] = field(default_factory=dict)

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            late_ms = 1e3 * (time.perf_counter() - wall) - 1
            self.wall_ms[self.phase] = max(self.wall_ms.get(self.phase, 0.0), late_ms)
            self.cpu_ms[self.phase] = max(self.cpu_ms.get(self.phase, 0.0), 1e3 * (time.thread_time() - cpu))


def entries(samples: list[SampleRecord], groups: list[GroupRecord]) -> Iterator[dict[str, bytes]]:
    """Yield the entries of the event stream: one for the samples of a group, one for the group."""
    size = len(samples) // len(groups)
    for place, group in enumerate(groups):
        together: dict[str, bytes] = {}
        for sample in samples[place * size : (place + 1) * size]:
            together |= encode_event(sample)
        yield together
        yield encode_event(group)


async def measure(server: RedisServer, num_samples: int) -> dict[str, Any]:
    """Return the largest delays of each phase."""
    samples, groups = make_step(num_samples)
    client = Redis.from_url(server.url, password=server.password)
    stream = Names(RUN).events
    with client.pipeline(transaction=False) as pipeline:
        for number, entry in enumerate(entries(samples, groups), 1):
            pipeline.xadd(stream, {**entry})
            if number % 500 == 0:
                pipeline.execute()
        pipeline.execute()
    del samples
    port, stop, delays = free_port(), asyncio.Event(), Delays()
    address = f"http://127.0.0.1:{port}"
    settings = ServiceSettings(
        RUN,
        RedisAddress(server.url, server.password),
        port=port,
        traces_endpoint=f"http://127.0.0.1:{free_port()}",
        traces_share=0.001,
    )
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(delays.watch())
        serving = tasks.create_task(serve(settings, stop))
        await until(f"{address}/metrics", f'plaudit_groups_total.outcome="trained". {len(groups)}.0')
        delays.phase = "closing"
        figures = {f"figure/{number}": float(number) for number in range(130)} | {"step_s": 100.0}
        step = StepRecord(1, 1, 1000.0, 1100.0, num_samples, len(groups), figures)
        await asyncio.to_thread(client.xadd, stream, {**encode_event(step)})
        await until(f"{address}/api/v1/steps", '"step":1,')
        await until(f"{address}/metrics", 'plaudit_traces_total.result="failed". [1-9]')
        delays.phase = "timeline"
        await until(f"{address}/api/v1/steps/1/trace?slowest=5000", "traceEvents")
        stop.set()
        await serving
        watching.cancel()
    return {"samples": num_samples, "wall_ms": delays.wall_ms, "cpu_ms": delays.cpu_ms}


async def until(url: str, expected: str) -> None:
    """Request ``url`` until the response matches ``expected``, as a client outside of the service's loop does."""

    def matches() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return re.search(expected, response.read().decode()) is not None
        except OSError:  # it does not listen yet
            return False

    def ask() -> None:
        deadline = time.monotonic() + _WITHIN_S
        while not matches():
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} did not show {expected!r} within {_WITHIN_S:.0f} s")
            time.sleep(0.05)

    await asyncio.to_thread(ask)


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a step of 8,192 samples")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        result = asyncio.run(measure(server, 8_192 if options.quick else 100_000))
    print(f"{'phase':<10}{'wall ms':>10}{'cpu ms':>10}   ({result['samples']:,} samples)")
    for phase, wall_ms in result["wall_ms"].items():
        print(f"{phase:<10}{wall_ms:>10.1f}{result['cpu_ms'][phase]:>10.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"benchmark": "step_close", "results": result}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
