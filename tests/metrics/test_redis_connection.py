"""A task that talks to Redis ends when it is cancelled, in whatever moment that happens."""

import asyncio

from redis.asyncio import Redis

from plaudit_wire.redis import redis_client
from plaudit_workers.launch.redis import RedisServer


async def swallowed_cancellations(client: Redis, tasks: int) -> int:
    """Cancels tasks in different moments of their commands; counts those that go on."""
    swallowed = 0

    async def ping_for_ever() -> None:
        while True:
            await client.ping()

    await client.ping()
    for number in range(tasks):
        task = asyncio.create_task(ping_for_ever())
        for _ in range(3 + number % 17):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=1)
        if not done:
            swallowed += 1
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
    return swallowed


async def test_no_cancellation_is_swallowed_by_a_command(redis_server: RedisServer) -> None:
    client = redis_client(redis_server.url, password=redis_server.password, socket_timeout=5)
    assert await swallowed_cancellations(client, 200) == 0
    await client.aclose()
