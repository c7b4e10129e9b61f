"""Read Redis's reply to a blocking read of one stream."""

from __future__ import annotations

from typing import Any


def read_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return id and fields of each entry.

    The reply is empty when none arrived in time. It names the stream without entries, or nothing at all, when the entry
    that ended the wait was deleted by the same transaction, as when Redis's keys are replaced by an older state.
    """
    entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1] if reply and reply[0] else []
    return entries
