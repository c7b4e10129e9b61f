"""What a process does while Redis is away: it keeps what it has made and asks again. Called where it talks to it.

Every command it sends is idempotent, so sending it again after an outage is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from plaudit_wire.logs import get_logger
from plaudit_workers.stream.transitions.scripts import OUTAGE

logger = get_logger(__name__)

T = TypeVar("T")

_PAUSE_S = 0.5


async def outlasting(call: Callable[[], Awaitable[T]]) -> T:
    """Awaits ``call()`` until it is answered, with half a second between attempts; logs the first failure and the end.

    Any other error than a lost or refused connection is raised: asking again would not help.
    """
    attempts = 0
    while True:
        try:
            answer = await call()
        except OUTAGE as error:
            if attempts == 0:
                logger.warning("transport away", error=str(error))
            attempts += 1
            await asyncio.sleep(_PAUSE_S)
            continue
        if attempts:
            logger.info("transport back", attempts=attempts)
        return answer
