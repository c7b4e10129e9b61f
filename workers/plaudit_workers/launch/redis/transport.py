"""Provide the Redis of a run: the one that ``spec.transport.url`` names, or one that lives as long as the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from plaudit_wire.logs import get_logger
from plaudit_wire.redis_access import ADMIN, acl_file
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.launch.redis.access import RedisAccess, new_passwords, own_access
from plaudit_workers.launch.redis.external import external_redis
from plaudit_workers.launch.redis.server import RedisServer, ServerAccess
from plaudit_workers.stream.connection import Transport

logger = get_logger(__name__)

_CHECK_EVERY_S = 0.25


@contextlib.asynccontextmanager
async def run_redis(job: RLJob, folder: Path, *, host: str) -> AsyncIterator[RedisAccess]:
    """Open the Redis of a run; a private one is restarted if it dies and ends with the body."""
    transport = job.spec.transport
    if transport.url:
        access = RedisAccess(external_redis(job, folder), folder)
        await (await Transport.open(access.admin, folder.name)).close()
        access.write_passwords()
        yield access
        return
    passwords = new_passwords(trains=job.spec.trains)
    server = RedisServer(
        folder / "redis",
        host=host,
        max_memory_bytes=transport.managed.max_memory_bytes,
        persistence=transport.managed.persistence,
        access=ServerAccess(passwords[ADMIN], acl_file(folder.name, passwords)),
    )
    access = own_access(server.url, passwords, folder)
    access.write_passwords()
    try:
        await asyncio.to_thread(server.start)
        restarting = asyncio.create_task(_restart_when_dead(server))
        try:
            yield access
        finally:
            restarting.cancel()
    finally:
        await asyncio.to_thread(server.stop)


async def _restart_when_dead(server: RedisServer) -> None:
    """Restart Redis when it dies; it loads its append-only file, and the ledger finds what that lacks."""
    while True:
        if not server.running():
            logger.warning("redis died, restarting it")
            await asyncio.to_thread(server.start)
        await asyncio.sleep(_CHECK_EVERY_S)
