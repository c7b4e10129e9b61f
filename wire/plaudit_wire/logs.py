"""Log a constant message and fields as JSON lines; identify a sample's trace. Every module gets its logger here.

``__main__`` configures the logs once, and how often the process looks for garbage. Fields travel in the records of the
standard library's loggers, so that records of libraries go to the same place.

The ids of a trace follow from run, group and index alone, so no process has to pass them on. The metrics service sends
the spans. A service that works on a sample, such as a judge, receives the trace in a W3C ``traceparent`` header and
adds its own spans below ours.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import sys
import time
from pathlib import Path

_DRAWN_BITS = 64
_CALLER = 3
"""Frames from ``logging`` up to the call of a method of ``Logger``, whose place the record names."""
_COLLECT_EVERY = 50_000


class Logger:
    """Log a message and fields: ``logger.info("took over", step=3)``; a message is constant, and formats nothing."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, /, **fields: object) -> None:
        """Log at level DEBUG."""
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """Log at level INFO."""
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """Log at level WARNING."""
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        """Log at level ERROR."""
        self._log(logging.ERROR, message, fields)

    def exception(self, message: str, /, **fields: object) -> None:
        """Log at level ERROR, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, message, fields, traceback=True)

    def log(self, level: int, message: str, /, **fields: object) -> None:
        """Log at a level of ``logging``."""
        self._log(level, message, fields)

    def _log(self, level: int, message: str, fields: dict[str, object], *, traceback: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"fields": fields}, exc_info=traceback, stacklevel=_CALLER)


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    return Logger(name)


def configure_logs(log_file: Path | None, *, worker: str, level: int = logging.INFO) -> None:
    """Send every logger's records to ``log_file`` (appended) or standard error, one JSON object a line.

    Members of an object: time (UTC), level, logger, worker, message, the record's fields, traceback.
    """
    handler: logging.Handler
    if log_file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_file)
    handler.setFormatter(_JsonLines(worker))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def collect_seldom() -> None:
    """Look for cycles of garbage after each 50,000 new objects instead of 700, and not in what exists already.

    Samples in work, and a look at a job, are thousands of objects that are no garbage and in no cycle, and each search
    goes through them: searches took a quarter of a reward worker's CPU time, and a third of the operator's. What is in
    no cycle is freed at once as before.
    """
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)


class _JsonLines(logging.Formatter):
    """Write a record as a JSON object."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        members: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0]:
            members["traceback"] = self.formatException(record.exc_info)
        return json.dumps(members, default=_plain)


def _plain(value: object) -> object:
    import msgspec  # what logs no message of the wire does without

    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else str(value)


def sample_ids(run: str, group: str, index: int) -> tuple[int, int]:
    """Return a sample's trace id (128 bits) and root span id (64 bits); never 0, which is not a valid id."""
    digest = hashlib.sha256(f"{run}/{group}/{index}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1


def drawn(run: str, group: str, index: int, share: float) -> bool:
    """Return True if a sample is in the traced share (0 to 1) of all samples, independent of its outcome."""
    trace_id, _ = sample_ids(run, group, index)
    return trace_id & (1 << _DRAWN_BITS) - 1 < share * (1 << _DRAWN_BITS)


def traceparent(run: str, group: str, index: int, *, sampled: bool = True) -> str:
    """Return the sample's root span as a W3C ``traceparent`` header; ``sampled``: its spans are kept."""
    trace_id, span_id = sample_ids(run, group, index)
    return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
