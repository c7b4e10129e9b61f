"""Limit how long an external Redis keeps the keys of a run whose trainer finished its last step.

A job's own Redis ends with its run. In an external one, keys would stay for ever: streams, counters and the ledger's
copy. They get a time to live at the end of the run, and lose it when the run is started again.
"""

from __future__ import annotations

from redis.exceptions import NoPermissionError

from plaudit_wire.logs import get_logger
from plaudit_workers.stream.connection import Transport

logger = get_logger(__name__)

_SCANNED_AT_ONCE = 1000


async def expire_run(transport: Transport, seconds: int) -> None:
    """Let all keys of a run expire. A user of Redis that may not do so is reported; the run has succeeded."""
    try:
        await transport.retry_through_outage(lambda: _expire(transport, seconds))
    except NoPermissionError as error:
        logger.warning("Redis keeps the keys of this run; delete them with plaudit runs delete", error=str(error))


async def _expire(transport: Transport, seconds: int) -> None:
    for key in await _keys(transport):
        await transport.commands.expire(key, seconds)


async def keep_run(transport: Transport) -> None:
    """Take the time to live from all keys of a run that is started again after its end."""
    if await transport.commands.ttl(transport.names.state) > 0:
        for key in await _keys(transport):
            await transport.commands.persist(key)


async def _keys(transport: Transport) -> list[bytes]:
    return [key async for key in transport.commands.scan_iter(f"{transport.names.prefix}*", count=_SCANNED_AT_ONCE)]
