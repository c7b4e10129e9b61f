"""Measure what leases cost Redis: the share of a core that renewals and searches for lapsed leases take.

Consumers with the protocol's own options (20 s leases, renewed every 5 s, a look every second) hold a few entries each
and wait for more. Redis itself measures its scripts (``INFO commandstats``); reading streams is not counted.

Usage: ``python benchmarks/lease_cost.py [--consumers 1000] [--held 1] [--seconds 15]``
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.consumer import Consumer
from plaudit_workers.stream.transport import Transport


async def hold(consumer: Consumer[Any], count: int) -> None:
    """Take ``count`` entries, and keep asking for more until cancelled."""
    held = 0
    while True:
        held += len(await consumer.take(max(count - held, 1)))


async def measure(transport: Transport, num_consumers: int, held: int, seconds: float) -> None:
    """Print the cost of ``num_consumers`` consumers with ``held`` entries each."""
    for i in range(num_consumers * held):
        await transport.commands.xadd(transport.names.groups, {"group": f"t-{i}-1.0"})
        await transport.commands.hset(transport.names.group(f"t-{i}-1.0"), "phase", "group_scoring")
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        loops = []
        for i in range(num_consumers):
            consumer = await stack.enter_async_context(Consumer[Any](transport, "groups", f"reward-{i}"))
            loops.append(tasks.create_task(hold(consumer, held)))
            await asyncio.sleep(5 / num_consumers)
        await asyncio.sleep(5)
        await transport.commands.config_resetstat()
        started = time.monotonic()
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - started
        scripts = (await transport.commands.info("commandstats"))["cmdstat_fcall"]
        print(
            f"{num_consumers} consumers with {held} entries each: {scripts['calls'] / elapsed:.0f} scripts/s, "
            f"{scripts['usec'] / scripts['calls']:.0f} us each, {scripts['usec'] / elapsed / 1e4:.1f} % of a core"
        )
        for loop in loops:
            loop.cancel()


async def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consumers", type=int, default=1000)
    parser.add_argument("--held", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        transport = await Transport.open(RedisAddress(server.url, server.password), "leases")
        await measure(transport, arguments.consumers, arguments.held, arguments.seconds)
        await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
