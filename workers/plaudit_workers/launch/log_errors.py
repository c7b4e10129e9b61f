"""Find the newest error in the log of a process."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_TAIL_BYTES = 256 << 10
_LEVELS = ("error", "critical")


def last_error(log: Path) -> str:
    """Return the newest error in a log of JSON lines: the last line of its traceback, or its message and error field.

    Empty when the last 256 KiB hold no error, or when there is no log. Lines of libraries, which are no JSON, do not
    count.
    """
    for line in reversed(_tail(log)):
        if error := _error(line):
            return error
    return ""


def _tail(log: Path) -> list[bytes]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def _error(line: bytes) -> str:
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return ""
    if fields.get("level") not in _LEVELS:
        return ""
    traceback = str(fields.get("traceback") or "").strip()
    if traceback:
        return traceback.splitlines()[-1]
    message, error = fields.get("message", ""), fields.get("error")
    return f"{message}: {error}" if error else str(message)
