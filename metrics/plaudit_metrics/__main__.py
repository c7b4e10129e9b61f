"""``python -m plaudit_metrics``: run the metrics service as a process."""

from __future__ import annotations

import asyncio
import signal
import sys

from plaudit_metrics.service.serve import CannotServeError, serve
from plaudit_metrics.service.settings import ServiceSettings, ServiceSettingsError
from plaudit_wire.logs import configure_logs, get_logger


def main() -> int:
    """Read the settings, configure logs, serve until SIGTERM or SIGINT."""
    try:
        settings = ServiceSettings.from_environment()
    except ServiceSettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    configure_logs(settings.log_file, worker="metrics")
    return asyncio.run(_with_signals(settings))


async def _with_signals(settings: ServiceSettings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await serve(settings, stop)
    except CannotServeError as error:
        get_logger("plaudit").error("cannot start", error=str(error))
        return 2
    return 0


raise SystemExit(main())
