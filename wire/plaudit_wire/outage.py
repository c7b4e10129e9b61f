"""Decide what an outage of Redis is, log it sparingly, and wait for its end.

Every client of Redis in this project uses the connections of ``redis_connection``. They raise ``PassingRefusalError``
for refusals that pass, so that ``except OUTAGE`` covers all three kinds of outage: Redis is unreachable, Redis does
not answer in time, Redis answers but refuses commands for now. All commands are idempotent: sending one again is safe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from redis.exceptions import (
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from plaudit_wire.codec import RecordError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

OUTAGE: Final = (RedisConnectionError, RedisTimeoutError, OSError)
"""The exceptions that mean that Redis is not available now. A wrong password is a connection error too."""

_PASSING_CLASSES = (ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
"""CLUSTERDOWN and MASTERDOWN, OOM, READONLY, TRYAGAIN. LOADING is a connection error already."""
_PASSING_CODES = ("BUSY ", "MISCONF ", "NOREPLICAS ", "UNBLOCKED force")
_RETRY_AFTER_S = 0.5
_LOG_EVERY_S = 30.0


class PassingRefusalError(RedisConnectionError):
    """Redis refused a command for a reason that passes: read-only, out of memory, a failed save, a busy script."""


def is_passing(error: ResponseError) -> bool:
    """Return True when the same command may succeed later without a change of the command or of the user's rights."""
    return isinstance(error, _PASSING_CLASSES) or str(error).startswith(_PASSING_CODES)


class Outages:
    """Log the outages of one Redis: the first error, a reminder every 30 s, and the end. ``address``: no password."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began: float | None = None
        self._log_next = 0.0
        self._ended = self._lasted_s = 0.0

    def report(self, error: BaseException) -> None:
        """Record that a command failed with one of ``OUTAGE``."""
        now = time.monotonic()
        if self._began is None:
            self._began, self._log_next = now, now
        if now < self._log_next:
            return
        self._log_next = now + _LOG_EVERY_S
        fields = {"address": self._address, "error": str(error), "seconds": round(now - self._began, 1)}
        if isinstance(error, RecordError):
            logger.warning("cannot read the shared volume; retrying. Is it mounted?", **fields)
        elif isinstance(error, PassingRefusalError):
            logger.warning("Redis refuses commands for now; retrying", **fields)
        else:
            logger.warning("cannot reach Redis; retrying. Is the service running?", **fields)

    def end(self) -> None:
        """Record that Redis has executed a command."""
        if self._began is None:
            return
        self._ended = time.monotonic()
        self._lasted_s = self._ended - self._began
        logger.info("Redis is available again", address=self._address, seconds=round(self._lasted_s, 1))
        self._began = None

    def ended_within(self, seconds: float, *, longer_than_s: float) -> bool:
        """Return True if an outage longer than ``longer_than_s`` lasts, or has ended in the last ``seconds``."""
        now = time.monotonic()
        if self._began is not None:
            return now - self._began > longer_than_s
        return self._lasted_s > longer_than_s and now - self._ended < seconds

    async def retry_through_outage(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await ``call()`` until Redis answers it, with half a second between attempts and no limit.

        Other errors than those of ``OUTAGE`` are raised: a retry would not help.
        """
        while True:
            try:
                answer = await call()
            except OUTAGE as error:
                self.report(error)
                await asyncio.sleep(_RETRY_AFTER_S)
                continue
            self.end()
            return answer
