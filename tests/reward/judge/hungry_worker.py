"""A worker that always wants more than its budget gives. Started by ``test_budget``.

Prints ``ready``, waits for a line, prints ``first`` when the first request passed and at the end how many did.

Arguments as JSON: url, password, key, worker, requests, tokens, concurrency, window_s, lease_s, seconds, takes_s,
clock_off_s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from typing import Any


def shift_clocks(seconds: float) -> None:
    """This process's clocks are wrong by so much."""
    wall, monotonic = time.time, time.monotonic
    time.time = lambda: wall() + seconds
    time.monotonic = lambda: monotonic() + seconds


async def main(given: dict[str, Any]) -> None:
    from plaudit_reward.endpoint.budget import Limiter, RateLimits, RedisBudget
    from plaudit_wire.redis import redis_client

    limits = RateLimits(given["requests"], given["tokens"], given["concurrency"], given["window_s"])
    client = redis_client(given["url"], password=given["password"])
    limiter = Limiter(
        RedisBudget(client, given["key"], given["worker"], limits, lease_s=given["lease_s"]), given["worker"]
    )
    limiter.start()
    print("ready", flush=True)
    sys.stdin.readline()
    passed = 0

    async def want() -> None:
        nonlocal passed
        while True:
            passage = await limiter.enter(10)
            passed += 1
            if passed == 1:
                print("first", flush=True)
            await asyncio.sleep(random.uniform(0.5, 1.5) * given["takes_s"])
            passage.tokens = random.randint(1, 10)
            limiter.leave(passage)

    tasks = [asyncio.create_task(want()) for _ in range(24)]
    await asyncio.sleep(given["seconds"])
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    await limiter.stop()
    print(passed, flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    shift_clocks(arguments["clock_off_s"])
    asyncio.run(main(arguments))
