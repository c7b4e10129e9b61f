"""Measure the transport's cost: samples per second, CPU seconds per 1,000 samples, milliseconds added per hop.

Three real processes and a private Redis (password, AOF everysec): a trainer admits groups of 8 and closes them, a
rollout publishes finished samples of 512 response tokens, a reward worker commits a score that cost nothing; leases,
events and stamps are on. The same flow then runs over ``ray.util.queue.Queue`` actors, one message a sample, 64 calls
in flight: what sample queues in the field are made of. Those keep nothing when a process dies and know no groups,
leases or stamps.

- *samples/s*: from the first admission to the last close, everything warm, ``WINDOW`` groups open at a time.
- *CPU-s per 1,000*: user + system time of every process below this one (Redis, or Ray's daemons and actors, included),
  read from /proc at the begin and the end of that stretch.
- *added per hop*: samples are published at 500/s and scored for 0.512 s each, so that 256 are in flight. A hop is from
  the call that sends (admit, publish, commit of the group's last sample) to the moment the receiver has the parsed
  record in its hands; the machine's monotonic clock is the same for all its processes.

Usage: ``python benchmarks/transport.py [--json FILE] [--quick] [--no-ray]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transport_streams import GROUP_SIZE, RATE_PER_S, ROLES, Hops

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.transport import Transport

Flow = tuple[float, float, Hops]
"""Seconds, CPU seconds, and of each hop the seconds it took."""


def role_process(
    role: str, url: str, password: str, run: str, groups: int, paced: bool, barrier: Any, results: Any
) -> None:
    """One process: connects, waits for the others, works, reports its hops and when it ended."""

    async def work() -> tuple[Hops, float]:
        transport = await Transport.open(RedisAddress(url, password), run)
        await asyncio.to_thread(barrier.wait)
        hops = await ROLES[role](transport, groups, paced)
        ended = time.monotonic()
        await transport.close()
        return hops, ended

    results.put(asyncio.run(work()))
    barrier.wait()  # processes stay until the CPU time of all was read


def below(root: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    yield root
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from below(int(child))


def cpu_seconds(root: int) -> float:
    """User + system seconds of a process and all that descend from it."""
    ticks = 0
    for pid in below(root):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_flow(server: RedisServer, groups: int, *, paced: bool) -> Flow:
    """One flow through three processes."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(ROLES) + 1), context.Queue()
    run = f"benchmark-{time.monotonic_ns()}"
    arguments = (server.url, server.password, run, groups, paced, barrier, results)
    processes = [context.Process(target=role_process, args=(role, *arguments)) for role in ROLES]
    for process in processes:
        process.start()
    barrier.wait()
    start, cpu_start = time.monotonic(), cpu_seconds(os.getpid())
    reports = [results.get() for _ in processes]
    cpu_s = cpu_seconds(os.getpid()) - cpu_start
    barrier.wait()
    for process in processes:
        process.join()
    hops: Hops = {name: times for part, _ in reports for name, times in part.items()}
    return max(ended for _, ended in reports) - start, cpu_s, hops


def run_ray(groups: int, paced_groups: int) -> tuple[Flow, Flow]:
    """The same two flows over Ray's queues, in a Ray of their own."""
    from transport_ray import RayFlow

    with RayFlow() as flow:
        runs = []
        for count, paced in ((groups, False), (paced_groups, True)):
            cpu_start = cpu_seconds(os.getpid())
            seconds, hops = flow.run(count, paced=paced)
            runs.append((seconds, cpu_seconds(os.getpid()) - cpu_start, hops))
    return runs[0], runs[1]


def figures(name: str, groups: int, full: Flow, paced: Flow) -> dict[str, Any]:
    """The reported figures of one transport."""
    samples = groups * GROUP_SIZE
    return {
        "transport": name,
        "samples": samples,
        "samples_per_s": samples / full[0],
        "cpu_s_per_1000": full[1] / samples * 1000,
        "hop_ms": {hop: _percentiles(times) for hop, times in sorted(paced[2].items())},
    }


def _percentiles(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(times) * 1e3, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "n": len(times)}


def print_table(rows: list[dict[str, Any]]) -> None:
    """The figures, for people."""
    print(f"{'transport':<12}{'samples/s':>10}{'CPU-s/1000':>12}   added per hop, ms (p50 / p99)")
    for row in rows:
        hops = "   ".join(f"{hop} {told['p50']:.2f} / {told['p99']:.2f}" for hop, told in row["hop_ms"].items())
        print(f"{row['transport']:<12}{row['samples_per_s']:>10.0f}{row['cpu_s_per_1000']:>12.3f}   {hops}")


def main() -> None:
    """Runs both transports and tells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a shortened run")
    parser.add_argument("--no-ray", action="store_true", help="leave out the Ray queue")
    options = parser.parse_args()
    groups, seconds = (128, 2) if options.quick else (8192, 20)
    paced_groups = RATE_PER_S * seconds // GROUP_SIZE
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        flows = run_flow(server, groups, paced=False), run_flow(server, paced_groups, paced=True)
    rows = [figures("streams", groups, *flows)]
    if not options.no_ray and importlib.util.find_spec("ray"):
        ray_groups = max(groups // 16, 32)
        rows.append(figures("ray queue", ray_groups, *run_ray(ray_groups, max(paced_groups // 5, 32))))
    print_table(rows)
    ratio = rows[0]["samples_per_s"] / rows[-1]["samples_per_s"] if len(rows) > 1 else None
    if ratio:
        print(f"streams carry {ratio:.1f} x as many samples a second as the Ray queue")
        if rows[-1]["samples_per_s"] < RATE_PER_S:
            print(f"the Ray queue does not carry {RATE_PER_S}/s here: its hops tell how long its queues have become")
    if options.json:
        machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows, "times_ray_queue": ratio}, indent=1))


if __name__ == "__main__":
    main()
