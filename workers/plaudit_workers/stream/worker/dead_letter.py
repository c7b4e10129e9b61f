"""Ends the work on an entry that kills its workers, or that cannot be read."""

from __future__ import annotations

from typing import Any

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.records import ScoringRecord
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group_hash import read_group, without_group_scorers
from plaudit_workers.stream.transitions.scripts import Argument, new_call
from plaudit_workers.stream.worker.lease import Delivery

logger = get_logger(__name__)


async def bury(transport: Transport, delivery: Delivery[Any], reason: str) -> bool:
    """Copies the entry to the dead letters and makes what it stood for terminal.

    A sample ends as ``poison``; of a prompt every index that was not published; a group's scores become
    ``infra_error``.

    Returns:
        Whether it was buried; False when another consumer holds it by now.
    """
    poison = msgspec.msgpack.encode(ScoringRecord(outcome="poison", reason=reason, worker=delivery.consumer))
    arguments: list[Argument] = [delivery.group, new_call(), delivery.stream, delivery.entry_id, delivery.consumer]
    arguments += [reason, poison]
    if delivery.stream == "groups":
        group = await read_group(transport, delivery.group)
        for scoring in without_group_scorers(group, "infra_error", reason) if group else []:
            arguments += [scoring.outcome, msgspec.msgpack.encode(scoring)]
    answer = await transport.scripts.call("bury", *arguments)
    logger.error(
        "buried",
        stream=delivery.stream,
        group=delivery.group,
        index=delivery.index,
        why=reason,
    )
    return bool(answer == b"buried")
