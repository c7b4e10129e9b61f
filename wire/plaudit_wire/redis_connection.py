"""Connections to Redis whose waiting can be cancelled, for every asyncio client here.

redis-py sends each command through ``asyncio.wait_for``, which in Python 3.11 swallows a cancellation that arrives in
the moment in which the sending is done: the task that was to end goes on for ever. ``asyncio.timeout`` does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Connection, Redis, SSLConnection
from redis.exceptions import TimeoutError as RedisTimeoutError


class _Cancellable:
    """Sends under ``asyncio.timeout``; mixed in before redis-py's own connection classes."""

    socket_timeout: float | None

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """See ``redis.asyncio.Connection``. Raises redis-py's ``TimeoutError`` after ``socket_timeout``."""
        connection: Any = super()
        limit_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit_s):
                await connection.send_packed_command(command, check_health)
        except TimeoutError:
            await connection.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit_s


class CancellableConnection(_Cancellable, Connection):
    """For ``redis://``."""


class CancellableSSLConnection(_Cancellable, SSLConnection):
    """For ``rediss://``."""


def redis_client(url: str, **options: Any) -> Redis:
    """``Redis.from_url`` with connections that can be cancelled; ``options`` are its own."""
    secure = url.startswith("rediss://")
    return Redis.from_url(
        url, connection_class=CancellableSSLConnection if secure else CancellableConnection, **options
    )
