"""Run a process of a job: read its settings, serve its health, supervise its tasks, and define how it ends.

Each role is ``python -m plaudit_workers.<role>`` (or an actor that calls the same function): it reads a handful of
environment variables, runs ``async def serve(settings, stop)`` and exits with the code that ``serve`` returns: 0 done,
1 crashed, may be restarted, 2 the job or its environment is wrong (one message), 3 the job failed for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from plaudit_wire.errors import JobFailedError, RefusedError, StoppedError
from plaudit_wire.logs import configure_logs, get_logger
from plaudit_wire.redis import PasswordFileError, RedisAddress
from plaudit_workers.files import is_ours

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_REFUSED = 2
EXIT_FAILED = 3
RESTARTED = "PLAUDIT_RESTARTED"
"""Variable of a process that takes the place of one that died: what fails at its start now was possible before."""
GPU_SHARE = "PLAUDIT_GPU_SHARE"
"""Variable with this process's share of its GPU's memory, where ``plaudit run`` lets processes share one."""
_REQUEST_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}
_LOOK_EVERY_S = 0.2
T = TypeVar("T")


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
        address = RedisAddress.from_environment(environment, url)
        if address.url:
            address.check()
    except (PasswordFileError, ValueError) as error:
        raise RefusedError(str(error)) from error
    return address


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
    return asyncio.run(serve_until_signal(serve, settings)).code


async def serve_until_signal(serve: Serve, settings: ProcessSettings) -> ProcessEnding:
    """Run ``serve`` as ``serve_guarded`` does; SIGTERM and SIGINT ask it to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await serve_guarded(serve, settings, stop)


class HealthServer:
    """Respond to ``/readyz`` with 200 or 503, to ``/healthz`` with 200, and to other paths with 404.

    Plain HTTP/1.1 over asyncio, because every connection here has a deadline: uvicorn lets a client that never finishes
    its request hold a connection for good, and anyone in the cluster can reach this port.

    Args:
        port: TCP port on all addresses, since the kubelet connects to the pod's; 0 = serve nothing.
        ready: returns True while the process can take work.
        pages: further pages of plain text, by path.
    """

    def __init__(
        self, port: int, ready: Callable[[], bool], pages: Mapping[str, Callable[[], bytes]] | None = None
    ) -> None:
        self._port = port
        self._pages = dict(pages or {})
        self._answers: dict[str, Callable[[], bool]] = {"/readyz": ready, "/healthz": lambda: True}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        if self._port:
            self._server = await asyncio.start_server(self._answer, "0.0.0.0", self._port)  # noqa: S104
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                words = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)
                path = words[1].split(b"?", 1)[0].decode("latin-1") if len(words) == 3 else ""
                page, check = self._pages.get(path), self._answers.get(path)
                status = 404 if check is None else 200 if check() else 503
                writer.write(_response(200, page()) if page else _response(status))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()


def _response(status: int, page: bytes | None = None) -> bytes:
    body = f"{_REASONS[status]}\n".encode() if page is None else page
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; version=0.0.4\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class Supervised(AbstractAsyncContextManager["Supervised"]):
    """Run tasks beside a body: when one fails, the others and the body are cancelled; when the body ends, all are.

    On exit it raises the exception of the first task that failed, not an exception group.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the body."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise _first_error(group) from None


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error


async def drained(works: Set[asyncio.Task[Any]], grace_s: float) -> tuple[int, int]:
    """Let works end by themselves for ``grace_s`` seconds, then cancel the rest; return the numbers of both."""
    if not works:
        return 0, 0
    done, left = await asyncio.wait(works, timeout=grace_s)
    for work in left:
        work.cancel()
    await asyncio.wait(works)
    return len(done), len(left)


async def in_daemon_thread(work: Callable[[], T], *, lasts: bool = False) -> T:
    """Return what ``work`` does in a thread of its own, for whose end neither the loop nor the program waits.

    Args:
        lasts: The thread stays until the program ends.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            report = partial(done.set_exception, error)
        else:
            report = partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
            loop.call_soon_threadsafe(lambda: done.done() or report())
        if lasts:
            threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    return await done


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Return when ``event`` is set after this call, or after ``timeout_s``."""
    event.clear()
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


async def unless_stopped(stop: asyncio.Event, work: Awaitable[object]) -> bool:
    """Await ``work``, or cancel it when ``stop`` is set first; return True when it ended by itself."""
    running = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    both: Set[asyncio.Future[Any]] = {running, stopped}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return False
        running.result()
        return True
    finally:
        for future in both:
            future.cancel()
        await asyncio.wait(both)


def shares_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if other processes of the run use this one's GPUs too."""
    return GPU_SHARE in environment


@asynccontextmanager
async def alone_on_gpu(run: str, environment: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Hold the GPUs of this process within the context, if it shares them; wait until no other process does.

    Under ``plaudit run`` engines on a shared GPU start one after the other: vLLM measures its memory as the change of
    what is free on the whole device, so one that starts beside another counts the other's memory as its own, and gets a
    smaller cache for the whole run.
    """
    devices = environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if shares_gpu(environment) else []
    with ExitStack() as stack:
        for device in sorted(devices):  # all processes in the same order
            path = Path(tempfile.gettempdir(), f"plaudit-{run}-gpu-{device}.lock")
            lock = stack.enter_context(path.open("wb"))  # noqa: ASYNC230
            while not is_ours(lock):  # noqa: ASYNC110 - another process holds it
                await asyncio.sleep(_LOOK_EVERY_S)
        yield
