"""Read the settings of a process of a job, and define how it ends.

Each role is ``python -m plaudit_workers.<role>`` (or an actor that calls the same function): it reads a handful of
environment variables, runs ``async def serve(settings, stop)`` and exits with the code that ``serve`` returns.

Exit codes: 0 done · 1 crashed, may be restarted · 2 the job or its environment is wrong (one message) · 3 the job
failed for good.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from plaudit_wire.errors import JobFailedError, RefusedError, StoppedError
from plaudit_wire.logs import configure_logs, get_logger
from plaudit_wire.redis_address import PasswordFileError, RedisAddress

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_REFUSED = 2
EXIT_FAILED = 3

RESTARTED = "PLAUDIT_RESTARTED"
"""Variable of a process that takes the place of one that died: what fails at its start now was possible before."""


@dataclass(frozen=True)
class ProcessSettings:
    """Hold the settings of a process of a job, read once from its environment."""

    job_path: Path
    """``PLAUDIT_JOB``: the resolved job file."""
    run: str
    """``PLAUDIT_RUN``: id of the run, part of every key in Redis."""
    run_folder: Path
    """``PLAUDIT_RUN_FOLDER``: holds checkpoints, weights, samples and logs."""
    redis: RedisAddress
    """``PLAUDIT_REDIS_URL``, ``PLAUDIT_REDIS_USERNAME``, ``PLAUDIT_REDIS_PASSWORD`` or ``PLAUDIT_REDIS_PASSWORD_FILE``,
    ``PLAUDIT_REDIS_TLS_…``: see ``RedisAddress``."""
    worker: str
    """``PLAUDIT_WORKER``: name of this process, new at each start: default host name, process id (1 in every
    container) and six random digits."""
    health_port: int
    """``PLAUDIT_HEALTH_PORT``: serves ``/healthz`` and ``/readyz``; 0 = none. The metrics service's own port."""
    log_file: Path | None
    """``PLAUDIT_LOG_FILE``: JSON lines go there; None = standard error."""
    model_servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """``PLAUDIT_MODEL_SERVERS``: JSON, by scorer whose model the job serves where its servers are: a list of URLs, of
    names that stand for many addresses, or of ``file://`` folders that list them."""
    scoring_version: str = ""
    """``PLAUDIT_SCORING_VERSION``: version of the job's scoring; empty: a digest of the scorers and their files."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ProcessSettings:
        """Read the settings."""
        missing = [
            n for n in ("PLAUDIT_JOB", "PLAUDIT_RUN", "PLAUDIT_RUN_FOLDER", "PLAUDIT_REDIS_URL") if n not in environment
        ]
        if missing:
            raise RefusedError(
                f"environment variables missing: {', '.join(missing)}. 'plaudit run job.yaml' sets them; to start "
                "this process by hand, set them yourself."
            )
        port = environment.get("PLAUDIT_HEALTH_PORT", "0")
        if not port.isdigit():
            raise RefusedError(f"PLAUDIT_HEALTH_PORT is {port!r}; give a port number, or 0 for none")
        log_file = environment.get("PLAUDIT_LOG_FILE", "")
        return cls(
            job_path=Path(environment["PLAUDIT_JOB"]),
            run=environment["PLAUDIT_RUN"],
            run_folder=Path(environment["PLAUDIT_RUN_FOLDER"]),
            redis=redis_from(environment),
            worker=environment.get("PLAUDIT_WORKER") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
            health_port=int(port),
            log_file=Path(log_file) if log_file else None,
            model_servers=model_servers(environment),
            scoring_version=environment.get("PLAUDIT_SCORING_VERSION", ""),
        )


def model_servers(environment: Mapping[str, str] = os.environ) -> dict[str, list[str]]:
    """Read ``PLAUDIT_MODEL_SERVERS``; see ``ProcessSettings.model_servers``. Raise ``RefusedError``."""
    written = environment.get("PLAUDIT_MODEL_SERVERS", "")
    try:
        return msgspec.json.decode(written, type=dict[str, list[str]]) if written else {}
    except msgspec.DecodeError as error:
        raise RefusedError(
            f'PLAUDIT_MODEL_SERVERS is {written!r}: {error}; give JSON such as {{"helpful": ["http://host:8000"]}}'
        ) from error


def redis_from(environment: Mapping[str, str], url: str = "") -> RedisAddress:
    """Read the address of Redis from the environment. Raise ``RefusedError``."""
    try:
        return RedisAddress.from_environment(environment, url)
    except PasswordFileError as error:
        raise RefusedError(str(error)) from error


Serve = Callable[[ProcessSettings, asyncio.Event], Awaitable[int]]


@dataclass(frozen=True)
class ProcessEnding:
    """Hold the end of a process: its exit code and, unless that is 0, the reason as a sentence."""

    code: int
    message: str = ""


async def serve_guarded(serve: Serve, settings: ProcessSettings, stop: asyncio.Event) -> ProcessEnding:
    """Run ``serve``; turn an exception that escapes it into an exit code and one logged message."""
    logger = get_logger("plaudit")
    try:
        return ProcessEnding(await serve(settings, stop))
    except RefusedError as error:
        logger.error("refused", error=str(error))
        return ProcessEnding(EXIT_REFUSED, str(error))
    except StoppedError as error:
        logger.info("stopped", reason=str(error))
        return ProcessEnding(exit_when_stopped())
    except JobFailedError as error:
        logger.error("job failed", error=str(error))
        return ProcessEnding(EXIT_FAILED, str(error))
    except Exception as error:
        logger.exception("crashed")
        return ProcessEnding(EXIT_CRASHED, f"{type(error).__name__}: {error}")


def exit_when_stopped() -> int:
    """Return the exit code of a process that was stopped before its work was done.

    ``PLAUDIT_EXIT_WHEN_STOPPED`` sets it where only the exit code is visible, and a stop must not look like the end.
    """
    return int(os.environ.get("PLAUDIT_EXIT_WHEN_STOPPED", EXIT_DONE))


def main(serve: Serve) -> int:
    """Run a role: the entry point of each ``__main__``. Reads settings, configures logs, handles SIGTERM and SIGINT."""
    try:
        settings = ProcessSettings.from_environment()
    except RefusedError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    configure_logs(settings.log_file, worker=settings.worker)
    get_logger("plaudit").info("started", run=settings.run)
    return asyncio.run(_with_signals(serve, settings)).code


async def _with_signals(serve: Serve, settings: ProcessSettings) -> ProcessEnding:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await serve_guarded(serve, settings, stop)
