"""Run one server of a served model: start the engine as a child, watch it, let it take turns on its GPU.

Under ``plaudit run`` the server's address is in ``<run folder>/model-servers/<scorer>/<number>.url`` while it is
healthy, a folder that reward workers read. On Kubernetes only servers that sleep during updates run here; a Service has
their addresses. If the child dies or stops responding, this process ends and is restarted.

Identify the model's server that a process runs, and publish the server's address.

Ask a model server whether it is healthy, and make it sleep and wake up. Called by the process that started it.

Take turns with the trainer on a model server's GPU (``sleepDuringUpdates``): follow the announcement, sleep, report.

Before a server sleeps, its heartbeat asks reward workers to hold their calls, and all live ones have reported that none
is under way (``scoring.model_turns``). So no sample is with a server that sleeps.

``python -m plaudit_workers.launch.served_models``: one server of a model that sleeps during updates, in a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from plaudit_job.environments import HOST_VARIABLE, PORT_VARIABLE, SERVER_VARIABLE, server_command, server_environment
from plaudit_job.load import load_job
from plaudit_job.spec.rewards import ServedModelSpec
from plaudit_reward.endpoint.vllm_sleep import SLEEP_TOKEN_VARIABLE
from plaudit_reward.http import HttpClient, NoResponseError, error_message
from plaudit_sandbox.lifetime import end_program_with_us
from plaudit_wire.errors import CallTimeoutError, RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import WorkerRecord
from plaudit_workers import process
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import (
    EXIT_DONE,
    GPU_SHARE,
    RESTARTED,
    ProcessSettings,
    Supervised,
    alone_on_gpu,
    unless_stopped,
)
from plaudit_workers.rollout.vllm_arguments import is_cpu_build
from plaudit_workers.stream.transport import Transport

FOLDER = "model-servers"

"""In the run's folder: one folder a scorer, one file a server."""

_EVERYWHERE = "0.0.0.0"  # noqa: S104


@dataclass(frozen=True)
class ServerIdentity:
    """Identify a server."""

    scorer: str
    number: int | None
    """None where a Service gives callers the address."""
    host: str
    port: int
    """0: one that is free when the server starts."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServerIdentity:
        """Read ``PLAUDIT_MODEL_SERVER`` (``scorer/number``, or ``scorer``) and its host and port.

        ``PLAUDIT_MODEL_SERVER_HOST`` is this node if empty, ``PLAUDIT_MODEL_SERVER_PORT`` a free port.
        """
        scorer, _, number = environment[SERVER_VARIABLE].partition("/")
        host = environment.get(HOST_VARIABLE) or own_address()
        return cls(scorer, int(number) if number else None, host, int(environment.get(PORT_VARIABLE) or 0))

    def with_port(self) -> ServerIdentity:
        """Return the same with a port to listen on."""
        return self if self.port else replace(self, port=free_port(self.host))

    @property
    def url(self) -> str:
        """Return the address for requests from this machine."""
        return f"http://{'127.0.0.1' if self.host == _EVERYWHERE else self.host}:{self.port}"

    def publish(self, run_folder: Path) -> None:
        """Write the file that gives callers the address."""
        if self.number is None:
            return
        file = self.file(run_folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(f"{self.url}\n")
        new.rename(file)

    def withdraw(self, run_folder: Path) -> None:
        """Remove that file."""
        if self.number is not None:
            self.file(run_folder).unlink(missing_ok=True)

    def file(self, run_folder: Path) -> Path:
        """Return the file that holds its address."""
        return run_folder / FOLDER / self.scorer / f"{self.number}.url"


def own_address() -> str:
    """Return the address under which other nodes of a Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


_RESPONSE_WITHIN_S = 5.0

_MOVED_WITHIN_S = 600.0

"""Running requests end first, and 100 GB travel to host memory."""


class ServerDiedError(Exception):
    """The engine's process ended or does not respond; a restart may help."""


class ServerClient:
    """Call one server; the token is for its routes ``/sleep`` and ``/wake_up``."""

    def __init__(self, url: str, sleep_token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {sleep_token}"}
        self._http = HttpClient(max_connections=2)

    async def healthy(self) -> bool:
        """Return True if the server responds that it is."""
        try:
            return (await self._http.get(f"{self._url}/health", _RESPONSE_WITHIN_S)).status == 200
        except (NoResponseError, CallTimeoutError):
            return False

    async def sleep(self) -> None:
        """Free the server's GPU: move its weights to host memory. Raise ``ServerDiedError`` if it does not do it."""
        await self._post("sleep")

    async def wake_up(self) -> None:
        """Take the GPU again. Return once requests are computed; raises as ``sleep`` does."""
        await self._post("wake_up")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _post(self, route: str) -> None:
        try:
            response = await self._http.post(f"{self._url}/{route}", b"", _MOVED_WITHIN_S, headers=self._headers)
        except (NoResponseError, CallTimeoutError) as error:
            raise ServerDiedError(f"/{route}: {error}") from error
        if response.status != 200:
            raise ServerDiedError(
                f"/{route}: the engine responded {response.status} {error_message(response.body, '')}"
            )


logger = get_logger(__name__)

ROLE: Final = "model"

_LOOK_EVERY_S = 0.2

_BEAT_EVERY_S = 5.0


class ServerTurns:
    """Take one server's turns with the trainer. The caller closes the transport."""

    def __init__(self, worker: str, transport: Transport) -> None:
        self._worker = worker
        self._transport = transport
        self._held_for = ""
        self._asleep = ""
        self._serving = False

    async def beats(self) -> None:
        """Report that this server lives, until cancelled."""
        while True:
            await self._beat()
            await asyncio.sleep(_BEAT_EVERY_S)

    async def begin(self) -> None:
        """Return once the trainer lets the server take its GPU; to be called before it is started."""
        await self._beat()  # first: a trainer that has not seen this server cannot wait for it
        while sleep := await self._announced():
            await self._report(held_for=sleep, asleep=sleep)
            await asyncio.sleep(_LOOK_EVERY_S)
        await self._report(held_for="", asleep="")

    async def follow(self, server: ServerClient) -> None:
        """Let the ready server sleep during updates, until cancelled."""
        self._serving = True
        await self._beat()
        while True:
            await self._take_turn(server)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _take_turn(self, server: ServerClient) -> None:
        sleep = await self._announced()
        if sleep and not self._asleep:
            await self._report(held_for=sleep, asleep="")
            if await self._is_called(sleep):
                return
            await server.sleep()
            logger.info("asleep", update=sleep)
        elif self._asleep and not sleep:
            await server.wake_up()
            logger.info("awake")
        await self._report(held_for=sleep, asleep=sleep)  # also if this look is the first after two announcements

    async def _is_called(self, sleep: str) -> bool:
        """Return True while a live reward worker may have calls under way."""
        workers = await self._transport.retry_through_outage(self._transport.workers)
        return any(each.role == "reward" and each.asleep != sleep for each in workers)

    async def _announced(self) -> str:
        announcement = await self._transport.retry_through_outage(self._transport.announced)
        return announcement.sleep if announcement is not None else ""

    async def _report(self, *, held_for: str, asleep: str) -> None:
        if (held_for, asleep) != (self._held_for, self._asleep):
            self._held_for, self._asleep = held_for, asleep
            await self._beat()

    async def _beat(self) -> None:
        record = WorkerRecord(
            self._worker, ROLE, ready=self._serving, asleep=self._asleep, calls_held_for=self._held_for
        )
        await self._transport.beat(record)


_CHECK_STARTING_EVERY_S = 0.25

_CHECK_HEALTHY_EVERY_S = 2.0

_UNRESPONSIVE_AFTER_S = 30.0

"""A server that was healthy and has not responded for so long is restarted."""

_DRAIN_WITHIN_S = 20.0

_TAIL_LINES = 8


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve one replica of a scorer's model until ``stop`` is set.

    Raises:
        RefusedError: the engine ended before it was ready; the message quotes the end of its log.
        ServerDiedError: it ended or stopped responding later, or at the start after that: the GPU's memory may not be
            free yet.
    """
    identity = ServerIdentity.from_environment()
    scorers = load_job(settings.job_path).spec.reward.scorers
    model = next(each.served for each in scorers if each.name == identity.scorer and each.served is not None)
    if not model.sleep_during_updates:
        await _serve(settings, identity, model, stop)
        return EXIT_DONE
    transport = await Transport.open(settings.redis, settings.run, stop=stop)
    try:
        turns = ServerTurns(settings.worker, transport)
        async with Supervised() as tasks:
            tasks.start(turns.beats())
            if await unless_stopped(stop, turns.begin()):
                await _serve(settings, identity, model, stop, turns)
    finally:
        await transport.close()
    return EXIT_DONE


async def _serve(
    settings: ProcessSettings,
    identity: ServerIdentity,
    model: ServedModelSpec,
    stop: asyncio.Event,
    turns: ServerTurns | None = None,
) -> None:
    identity = identity.with_port()
    sleep_token = secrets.token_urlsafe() if turns is not None else ""
    client = ServerClient(identity.url, sleep_token)
    async with contextlib.AsyncExitStack() as stack:
        async with alone_on_gpu(settings.run):
            child = await _start(model, identity, settings.log_file, sleep_token)
            stack.push_async_callback(_end, child)
            stack.callback(identity.withdraw, settings.run_folder)
            stack.push_async_callback(client.close)
            logger.info("starting the model server", scorer=identity.scorer, pid=child.pid, url=identity.url)
            if not await _until_ready(child, client, stop, settings, identity.scorer):
                return
        logger.info("serving", url=identity.url)
        identity.publish(settings.run_folder)
        async with Supervised() as tasks:
            if turns is not None:
                tasks.start(turns.follow(client))
            await _watch(child, client, stop)


async def _start(
    model: ServedModelSpec, identity: ServerIdentity, log_file: Path | None, sleep_token: str
) -> asyncio.subprocess.Process:
    gpu, share = not is_cpu_build(), float(os.environ.get(GPU_SHARE, "1"))
    # Code that comes with the model must not reach the run's Redis.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PLAUDIT_REDIS_")}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab")) if log_file else None
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *server_command(model, identity.scorer, identity.host, identity.port, with_gpu=gpu, gpu_share=share),
            env={**inherited, **server_environment(model, with_gpu=gpu), SLEEP_TOKEN_VARIABLE: sleep_token},
            stdout=log,
            stderr=log,
            start_new_session=True,  # a group of its own: an engine's own children are ended with it
            preexec_fn=end_program_with_us(),
        )


async def _until_ready(
    child: asyncio.subprocess.Process, client: ServerClient, stop: asyncio.Event, settings: ProcessSettings, scorer: str
) -> bool:
    """Wait until the engine has loaded, however long that takes. Return False when ``stop`` is set first."""
    while not stop.is_set():
        if child.returncode is not None:
            if child.returncode < 0:
                cause = signal.Signals(-child.returncode).name
                raise ServerDiedError(
                    f"the server of scorer {scorer} was killed by {cause} while it started (out of memory?)"
                )
            failure = ServerDiedError if os.environ.get(RESTARTED) else RefusedError
            raise failure(f"the model server did not start. Its log ends:\n{_tail(settings.log_file)}")
        if await client.healthy():
            return True
        await _pause(stop, _CHECK_STARTING_EVERY_S)
    return False


async def _watch(child: asyncio.subprocess.Process, client: ServerClient, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    answered_s = loop.time()
    while not stop.is_set():
        if child.returncode is not None:
            raise ServerDiedError(f"the engine ended with exit code {child.returncode}")
        if await client.healthy():
            answered_s = loop.time()
        elif loop.time() - answered_s > _UNRESPONSIVE_AFTER_S:
            raise ServerDiedError(f"the engine has not responded for {_UNRESPONSIVE_AFTER_S:.0f} s")
        await _pause(stop, _CHECK_HEALTHY_EVERY_S, child)


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


def _tail(log_file: Path | None) -> str:
    if log_file is None or not log_file.exists():
        return "(no log)"
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


if __name__ == "__main__":
    raise SystemExit(process.main(serve))
