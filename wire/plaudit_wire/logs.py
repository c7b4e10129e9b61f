"""Log a constant message and fields as JSON lines; identify a sample's trace. Every module gets its logger here.

``__main__`` configures the logs once. structlog writes through the standard library's loggers, so that records of
libraries go to the same place.

The ids of a trace follow from run, group and index alone, so no process has to pass them on. The metrics service sends
the spans. A service that works on a sample, such as a judge, receives the trace in a W3C ``traceparent`` header and
adds its own spans below ours.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog

_PASSED_ON = ("exc_info", "stack_info")
_DRAWN_BITS = 64


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module; its methods take a message and fields: ``logger.info("took over", step=3)``."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _to_standard_library],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


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
    handler.setFormatter(_json_lines(worker))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _to_standard_library(_: Any, __: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Pass the message and the fields to ``logging``, which keeps the fields in the record."""
    message = str(event.pop("event"))
    passed_on = {name: event.pop(name) for name in _PASSED_ON if name in event}
    return (message,), {"extra": {"fields": event}, **passed_on}


def _json_lines(worker: str) -> structlog.stdlib.ProcessorFormatter:
    def members(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        record: logging.LogRecord = event["_record"]
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "worker": worker,
            "message": event["event"],
            **getattr(record, "fields", {}),
            **({"exc_info": event["exc_info"]} if event.get("exc_info") else {}),  # record.exc_info is empty by now
        }

    return structlog.stdlib.ProcessorFormatter(
        processors=[
            members,
            structlog.processors.format_exc_info,
            _traceback,
            structlog.processors.JSONRenderer(default=_plain),
        ]
    )


def _traceback(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if "exception" in event:
        event["traceback"] = event.pop("exception")
    return event


def _plain(value: object) -> object:
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
