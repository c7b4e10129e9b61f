"""Logs: a constant message and fields, JSON lines for machines. Configured once, where a process begins."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import msgspec


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, worker, message, fields, traceback."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record; ``extra={"fields": {...}}`` becomes members of the object."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_plain)


def _plain(value: object) -> object:
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else str(value)


def configure_logs(log_file: Path | None, *, worker: str, level: int = logging.INFO) -> None:
    """Sends every logger's records to ``log_file`` (appended) or standard error as JSON lines."""
    handler: logging.Handler
    if log_file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_file)
    handler.setFormatter(JsonLines(worker))
    logging.basicConfig(level=level, handlers=[handler], force=True)
