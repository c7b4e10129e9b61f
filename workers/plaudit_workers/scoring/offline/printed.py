"""Show on standard error what reward functions print, and warnings, while a command scores in this process."""

from __future__ import annotations

import logging
import sys


def show_logs() -> None:
    """Send log records to standard error as plain lines: ``mine: text`` for what the scorer ``mine`` printed."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainLines())
    handler.addFilter(_is_for_users)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the scorer's line as it is; any other record as level, message and fields."""
        fields = dict(getattr(record, "fields", {}))
        if _is_printed(record):
            return f"{fields['scorer']}: {fields['line']}"
        values = " ".join(f"{name}={value}" for name, value in fields.items())
        return f"{record.levelname.lower()}: {record.getMessage()} {values}".rstrip()


def _is_for_users(record: logging.LogRecord) -> bool:
    """Leave out Plaudit's own records below warnings: they are for the logs of a run."""
    return _is_printed(record) or record.levelno >= logging.WARNING or not record.name.startswith("plaudit_")


def _is_printed(record: logging.LogRecord) -> bool:
    return set(getattr(record, "fields", {})) == {"scorer", "line"}
