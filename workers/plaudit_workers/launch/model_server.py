"""Run one server of a served model under ``plaudit run``: start the engine as a child and publish its address.

While the server is healthy its address is in ``<run folder>/model-servers/<scorer>/<number>.url``, a folder that reward
workers read. If the child dies or stops responding, this process ends and is restarted with a new port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit_reward.errors import CallTimeoutError
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError
from plaudit_wire.logs import get_logger
from plaudit_workers.job.loading.load import JobError, load_job
from plaudit_workers.job.spec.rewards.scorers import ServedModelSpec
from plaudit_workers.launch.model_command import server_command, server_environment
from plaudit_workers.launch.redis.server import die_with_parent, free_port
from plaudit_workers.process import EXIT_DONE, ProcessSettings, RefusedError
from plaudit_workers.rollout.engines.vllm_platform import is_cpu_build

logger = get_logger(__name__)

FOLDER = "model-servers"
"""In the run's folder: one folder a scorer, one file a server."""

_CHECK_STARTING_EVERY_S = 0.25
_CHECK_HEALTHY_EVERY_S = 2.0
_RESPONSE_TIMEOUT_S = 5.0
_UNRESPONSIVE_AFTER_S = 30.0
"""A server that was healthy and has not responded for so long is restarted."""
_DRAIN_WITHIN_S = 20.0
_TAIL_LINES = 8


class ServerDiedError(Exception):
    """The engine's process ended or does not respond; a restart may help."""


@dataclass(frozen=True)
class ServerIdentity:
    """The identity of a server."""

    scorer: str
    number: int
    host: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServerIdentity:
        """Read ``PLAUDIT_MODEL_SERVER`` (``scorer/number``) and ``PLAUDIT_MODEL_SERVER_HOST`` (empty: this node)."""
        scorer, _, number = environment["PLAUDIT_MODEL_SERVER"].partition("/")
        return cls(scorer, int(number), environment.get("PLAUDIT_MODEL_SERVER_HOST") or own_address())

    def file(self, run_folder: Path) -> Path:
        """Return the file that holds its address."""
        return run_folder / FOLDER / self.scorer / f"{self.number}.url"


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve one replica of a scorer's model until ``stop`` is set.

    Raises:
        RefusedError: the engine ended before it was ready; the message quotes the end of its log.
        ServerDiedError: it ended or stopped responding later.
    """
    identity = ServerIdentity.from_environment()
    model = _model(settings, identity.scorer)
    port = free_port(identity.host)
    url = f"http://{identity.host}:{port}"
    child = await _start(model, identity, port, settings.log_file)
    logger.info("starting the model server", scorer=identity.scorer, pid=child.pid, url=url)
    file = identity.file(settings.run_folder)
    client = HttpClient(max_connections=1)
    try:
        if await _until_ready(child, client, url, stop, settings):
            logger.info("serving", url=url)
            _write(file, url)
            await _watch(child, client, url, stop)
    finally:
        await client.close()
        file.unlink(missing_ok=True)
        await _end(child)
    return EXIT_DONE


def _model(settings: ProcessSettings, scorer: str) -> ServedModelSpec:
    try:
        job = load_job(settings.job_path)
    except JobError as error:
        raise RefusedError(str(error)) from error
    return next(each.served for each in job.spec.reward.scorers if each.name == scorer and each.served is not None)


async def _start(
    model: ServedModelSpec, identity: ServerIdentity, port: int, log_file: Path | None
) -> asyncio.subprocess.Process:
    gpu = not is_cpu_build()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab")) if log_file else None
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *server_command(model, identity.scorer, identity.host, port, with_gpu=gpu),
            env={**os.environ, **server_environment(model, with_gpu=gpu)},
            stdout=log,
            stderr=log,
            start_new_session=True,  # a group of its own: an engine's own children are ended with it
            preexec_fn=die_with_parent,
        )


async def _until_ready(
    child: asyncio.subprocess.Process,
    client: HttpClient,
    url: str,
    stop: asyncio.Event,
    settings: ProcessSettings,
) -> bool:
    """Wait until the engine has loaded, however long that takes. Return False when ``stop`` is set first."""
    while not stop.is_set():
        if child.returncode is not None:
            if child.returncode < 0:
                raise ServerDiedError(f"killed by signal {-child.returncode} while it started")
            raise RefusedError(f"the model server did not start. Its log ends:\n{_tail(settings.log_file)}")
        if await _healthy(client, url):
            return True
        await _pause(stop, _CHECK_STARTING_EVERY_S)
    return False


async def _watch(child: asyncio.subprocess.Process, client: HttpClient, url: str, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    answered_s = loop.time()
    while not stop.is_set():
        if child.returncode is not None:
            raise ServerDiedError(f"the engine ended with {child.returncode}")
        if await _healthy(client, url):
            answered_s = loop.time()
        elif loop.time() - answered_s > _UNRESPONSIVE_AFTER_S:
            raise ServerDiedError(f"the engine has not responded for {_UNRESPONSIVE_AFTER_S:.0f} s")
        await _pause(stop, _CHECK_HEALTHY_EVERY_S, child)


async def _healthy(client: HttpClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", _RESPONSE_TIMEOUT_S)).status == 200
    except (NoResponseError, CallTimeoutError):
        return False


async def _pause(stop: asyncio.Event, seconds: float, child: asyncio.subprocess.Process | None = None) -> None:
    """Sleep, but not beyond a stop or the child's end."""
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
    if child is not None:
        waiting.append(asyncio.ensure_future(child.wait()))
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


async def _end(child: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, allow time to drain, then kill its process group."""
    if child.returncode is None:
        child.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_WITHIN_S):
                await child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def _write(file: Path, url: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(f"{url}\n")
    new.rename(file)


def _tail(log_file: Path | None) -> str:
    if log_file is None or not log_file.exists():
        return "(no log)"
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def own_address() -> str:
    """Return the address under which other nodes of a Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
