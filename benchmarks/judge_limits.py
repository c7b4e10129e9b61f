"""One budget of requests a minute over eight worker processes that want ten times as much.

Each process asks a judge over HTTP through its own limiter, as a reward worker does; the budget lies in one Redis. The
judge notes by its own clock when each request arrives. One process's clocks are an hour off. Shown: what was achieved
of the budget in the first minute and over whole windows, the most that any 60 s hold, how evenly the processes were
served (Jain's index: 1 is even), how long samples waited for the limiter, and what the limiter costs.

    python benchmarks/judge_limits.py [--budget 600] [--processes 8] [--windows 2] [--json FILE] [--quick]

``--quick``: a window of 3 s in place of 60, for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from plaudit_reward.endpoint.access import EndpointUsage
from plaudit_reward.endpoint.budget import TRAVEL_S, Limiter, RateLimits, RedisBudget
from plaudit_reward.endpoint.judge import JudgeClient, JudgeScorer, PromptTemplate, RegexParser, TokenEstimate
from plaudit_reward.scorer import Attempt
from plaudit_wire.records import Sample
from plaudit_wire.redis import redis_client
from plaudit_workers.launch.redis import RedisServer

OFFERED = 10
"""Times the budget that the processes want."""
ANSWER_S = 0.2
ANSWER = json.dumps(
    {
        "choices": [{"message": {"role": "assistant", "content": "score: 1"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 4},
    }
)


async def judge() -> None:
    """The endpoint: answers each request after a while; prints the times of arrival when its input ends."""
    arrived: list[float] = []
    at_a_time = most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_a_time, most
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                arrived.append(time.monotonic())
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                at_a_time += 1
                most = max(most, at_a_time)
                await asyncio.sleep(random.uniform(0.5, 1.5) * ANSWER_S)
                at_a_time -= 1
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(ANSWER)}\r\n\r\n{ANSWER}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"arrived": arrived, "most_at_a_time": most}), flush=True)


def shift_clocks(seconds: float) -> None:
    """This process's clocks are wrong by so much."""
    wall, monotonic = time.time, time.monotonic
    time.time = lambda: wall() + seconds
    time.monotonic = lambda: monotonic() + seconds


async def work(given: dict[str, Any]) -> None:
    """One reward worker: takes what it has room for of a tenth-filled stream, counts what was scored."""
    limits = RateLimits(given["budget"], None, None, given["window_s"] + TRAVEL_S)
    budget = RedisBudget(redis_client(given["url"], password=given["password"]), given["key"], given["worker"], limits)
    scorer = JudgeScorer(
        "judge",
        PromptTemplate(given["template"]),
        JudgeClient(given["judge"], "judge", EndpointUsage()),
        RegexParser(r"score: (\d)"),
        Limiter(budget, "judge"),
        TokenEstimate({}),
    )
    await scorer.open()
    print("ready", flush=True)
    sys.stdin.readline()
    before = resource.getrusage(resource.RUSAGE_SELF)
    end = asyncio.get_running_loop().time() + given["seconds"]
    waits: list[float] = []
    offered = 0

    async def score(number: int) -> None:
        attempt = Attempt(60.0)
        await scorer.score(Sample("g", number, "", "How much?", "This much."), attempt)
        waits.append(attempt.waited_s)

    began = asyncio.get_running_loop().time()
    tasks: set[asyncio.Task[None]] = set()
    while (now := asyncio.get_running_loop().time()) < end:
        due = int((now - began) * given["offered_per_s"]) - offered
        taken = min(due, scorer.room())
        offered += due
        for number in range(taken):
            tasks.add(asyncio.create_task(score(number)))
        await asyncio.sleep(0.1)  # rarely enough that this loop is not what is measured
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await scorer.close()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(json.dumps({"scored": len(waits), "offered": offered, "waits": waits, "cpu_s": cpu_s}))


def start(role: str, given: dict[str, Any] | None = None) -> subprocess.Popen[str]:
    """One of the processes of this benchmark."""
    command = [sys.executable, __file__, "--role", role, "--given", json.dumps(given or {})]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure(budget: int, processes: int, window_s: float, windows: int) -> dict[str, Any]:
    """One run."""
    seconds = windows * (window_s + TRAVEL_S)
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name)) as server:
        template = Path(name, "judge.j2")
        template.write_text("{{ prompt }} {{ response }}")
        endpoint = start("judge")
        given = {
            "url": server.url,
            "password": server.password,
            "key": "plaudit:{bench}:limits:judge",
            "judge": f"http://127.0.0.1:{line(endpoint)}/v1",
            "template": str(template),
            "budget": budget,
            "window_s": window_s,
            "seconds": seconds,
            "offered_per_s": OFFERED * budget / window_s / processes,
        }
        workers = [
            start("worker", given | {"worker": f"reward-{i}", "off_s": 3600 * (i == 0)}) for i in range(processes)
        ]
        for worker in workers:
            assert line(worker) == "ready"
        client = redis.Redis.from_url(server.url, password=server.password)
        before: Any = client.info("cpu")
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        told = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
        after: Any = client.info("cpu")
        client.close()
        seen = json.loads(endpoint.communicate()[0].splitlines()[-1])
    redis_cpu_s = sum(after[kind] - before[kind] for kind in ("used_cpu_user", "used_cpu_sys"))
    return figures(told, seen, budget, window_s, seconds) | {"redis_cpu_s": redis_cpu_s}


def figures(
    told: list[dict[str, Any]], seen: dict[str, Any], budget: int, window_s: float, seconds: float
) -> dict[str, Any]:
    """Return the results of the run."""
    arrived = sorted(seen["arrived"])
    scored = [worker["scored"] for worker in told]
    waits = sorted(wait for worker in told for wait in worker["waits"])
    first = bisect.bisect_left(arrived, arrived[0] + window_s)
    return {
        "budget": budget,
        "window_s": window_s,
        "seconds": seconds,
        "offered": sum(worker["offered"] for worker in told),
        "achieved_in_the_first_window": first / budget,
        "achieved_over_all": len(arrived) / seconds * window_s / budget,
        "most_in_any_window": max(bisect.bisect_left(arrived, begin + window_s) - i for i, begin in enumerate(arrived))
        / budget,
        "jain": sum(scored) ** 2 / len(scored) / sum(count**2 for count in scored),
        "least_over_most": min(scored) / max(scored),
        "limiter_s_p50": statistics.median(waits),
        "limiter_s_p99": waits[int(0.99 * (len(waits) - 1))],
        "worker_cpu_ms_per_request": 1000 * sum(worker["cpu_s"] for worker in told) / max(1, len(arrived)),
    }


def main() -> None:
    """Runs it and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--budget", type=int, default=600, help="requests in a window (default: 600)")
    parser.add_argument("--processes", type=int, default=8, help="reward workers (default: 8)")
    parser.add_argument("--windows", type=int, default=2, help="length of the run in windows (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a window of 3 s, 120 requests, 3 processes")
    parser.add_argument("--role", choices=["judge", "worker"], help=argparse.SUPPRESS)
    parser.add_argument("--given", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "judge":
        asyncio.run(judge())
        return
    if arguments.role == "worker":
        shift_clocks(arguments.given["off_s"])
        asyncio.run(work(arguments.given))
        return
    if arguments.quick:
        found = measure(120, 3, 3.0, 2)
    else:
        found = measure(arguments.budget, arguments.processes, 60.0, arguments.windows)
    for name, value in found.items():
        print(f"{name:30} {value:10.3f}" if isinstance(value, float) else f"{name:30} {value:10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
