"""Be a process of a run that ``plaudit run`` started: write its log and its stamps, serve its role, say how it ended.

``python -m plaudit_workers.launch.role_process MODULE:FUNCTION`` is one on this machine. On Ray an actor does the same.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
import uuid
from pathlib import Path

import msgspec

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import configure_logs
from plaudit_workers.process import EXIT_DONE, ProcessSettings, Serve, serve_until_signal
from plaudit_workers.timeline import STARTED, stamp, started_s

_ENDS_WITHIN_S = 10.0


def worker_name(name: str) -> str:
    """Return a new name for each start: others claim the work of a dead process, and none takes it for this one's."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def begin() -> ProcessSettings:
    """Open the log of this process; return its settings."""
    stamp(STARTED, time_s=started_s())
    settings = ProcessSettings.from_environment()
    if settings.log_file is not None:
        _use_log(settings.log_file)
    configure_logs(settings.log_file, worker=settings.worker)
    return settings


def imported(serve: str) -> Serve:
    """Import the function that serves a role, named ``module:function``."""
    module, _, function = serve.partition(":")
    found: Serve = getattr(importlib.import_module(module), function)
    stamp("imported")
    return found


async def serve_metrics(_: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve metrics under ``plaudit run``. The service is below workers in the import order, with its own settings."""
    from plaudit_metrics.service.serve import CannotServeError, serve
    from plaudit_metrics.service.settings import ServiceSettings

    try:
        await serve(ServiceSettings.from_environment(), stop)
    except CannotServeError as error:
        raise RefusedError(str(error)) from error
    return EXIT_DONE


def _use_log(log_file: Path) -> None:
    """Send the output of libraries to the log; write this process's id and name beside it, for whoever inspects it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    log_file.with_suffix(".pid").write_text(f"{os.getpid()}\n")
    log_file.with_suffix(".worker").write_text(os.environ["PLAUDIT_WORKER"] + "\n")


def ending_file(log_file: Path) -> Path:
    """Return where a process on this machine writes how its role ended, beside its log."""
    return log_file.with_suffix(".ending")


def main() -> None:
    """Serve the role, with its secrets from standard input: any program of this user can read what it started with."""
    os.environ.update(msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, str]))
    settings = begin()
    ending = asyncio.run(serve_until_signal(imported(sys.argv[1]), settings))
    assert settings.log_file is not None
    ending_file(settings.log_file).write_bytes(msgspec.json.encode(ending))
    late = threading.Timer(_ENDS_WITHIN_S, os._exit, [ending.code])  # a library's thread may hold the process
    late.daemon = True
    late.start()
    sys.exit(ending.code)


if __name__ == "__main__":
    main()
