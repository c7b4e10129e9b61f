"""Connect every asyncio client of this project to Redis. The connections differ from redis-py's in three points.

- A send can be cancelled. redis-py sends through ``asyncio.wait_for``, which in Python 3.11 swallows a cancellation
  that arrives just when the send completes: the cancelled task runs on for ever.
- The connection timeout covers authentication too: a server that accepts connections but never answers AUTH is down.
- A refusal that passes is an outage (``PassingRefusalError``). READONLY also closes the connection: behind one address
  a new connection reaches the new master, the old one stays with the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Connection, Redis, SSLConnection
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from plaudit_wire.outage import PassingRefusalError, is_passing


class _Connection:
    """Add the three differences; mixed in before redis-py's own connection classes."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect and authenticate once. Raises redis-py's ``TimeoutError`` after ``socket_connect_timeout``."""
        connection: Any = super()
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                await connection.connect_check_health(check_health, retry_socket_connect)
        except TimeoutError:
            await connection.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout connecting to Redis or authenticating") from None

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Send a command. Raises redis-py's ``TimeoutError`` after ``socket_timeout``."""
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

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Read a response. Raises ``PassingRefusalError`` for a refusal that passes."""
        connection: Any = super()
        try:
            return await connection.read_response(*arguments, **options)
        except ResponseError as error:
            if not is_passing(error):
                raise
            if isinstance(error, ReadOnlyError):
                await connection.disconnect(nowait=True)
            raise PassingRefusalError(str(error)) from error


class PlainConnection(_Connection, Connection):
    """Connect to ``redis://``."""


class TlsConnection(_Connection, SSLConnection):
    """Connect to ``rediss://``."""


def redis_client(url: str, **options: Any) -> Redis:
    """Return ``Redis.from_url`` with these connections; ``options`` are those of redis-py."""
    connection_class = TlsConnection if url.startswith("rediss://") else PlainConnection
    return Redis.from_url(url, connection_class=connection_class, **options)
