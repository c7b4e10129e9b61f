"""Show on standard error what reward functions print, and warnings, while a command scores in this process."""

from __future__ import annotations

import logging
import sys


def show_logs() -> None:
    """Send log records to standard error as plain lines: ``mine: text`` for what the scorer ``mine`` printed."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the scorer's line as it is; any other record as level, message and fields."""
        fields = dict(getattr(record, "fields", {}))
        if set(fields) == {"scorer", "line"}:
            return f"{fields['scorer']}: {fields['line']}"
        values = " ".join(f"{name}={value}" for name, value in fields.items())
        return f"{record.levelname.lower()}: {record.getMessage()} {values}".rstrip()
