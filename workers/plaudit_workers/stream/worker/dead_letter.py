"""Move an entry that kills its workers, or that cannot be read, to the dead letters."""

from __future__ import annotations

import logging
from typing import Any

from plaudit_wire.logs import get_logger
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group_hash import read_group, without_group_scorers
from plaudit_workers.stream.transitions import worker as transitions
from plaudit_workers.stream.worker.lease import Delivery

logger = get_logger(__name__)


async def dead_letter(transport: Transport, delivery: Delivery[Any], reason: str) -> bool:
    """Move the entry to the dead letters and make its samples terminal; return False when another consumer holds it.

    A sample ends as ``poison``; of a prompt every index that was not published; a group's scores become
    ``infra_error``.
    """
    group = await read_group(transport, delivery.group) if delivery.stream == "groups" else None
    scorings = without_group_scorers(group, "infra_error", reason) if group else []
    moved = await transport.scripts.run(transitions.dead_letter(delivery, reason, scorings))
    logger.log(
        logging.ERROR if moved else logging.INFO,
        "entry moved to the dead letters" if moved else "another worker holds the entry",
        stream=delivery.stream,
        group=delivery.group,
        index=delivery.index,
        reason=reason,
    )
    return moved
