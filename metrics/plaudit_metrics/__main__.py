"""``python -m plaudit_metrics``: the metrics service as a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time

from plaudit_metrics.service.serve import ServiceSettings, SettingsError, serve


class _JsonLines(logging.Formatter):
    """One JSON object a line, in the form of the other processes' logs."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "worker": "metrics",
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def main() -> int:
    """Reads the settings, configures logs, serves until SIGTERM or SIGINT."""
    try:
        settings = ServiceSettings.from_environment()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _configure_logs(settings)
    return asyncio.run(_with_signals(settings))


def _configure_logs(settings: ServiceSettings) -> None:
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if settings.log_file is not None:
        settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(settings.log_file)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


async def _with_signals(settings: ServiceSettings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await serve(settings, stop)


raise SystemExit(main())
