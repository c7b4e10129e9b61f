"""Run one server of a served model: start the engine as a child, watch it, let it take turns on its GPU.

Under ``plaudit run`` the server's address is in ``<run folder>/model-servers/<scorer>/<number>.url`` while it is
healthy, a folder that reward workers read. On Kubernetes only servers that sleep during updates run here, as
``python -m plaudit_workers.launch.served_models``; a Service has their addresses. If the child dies or stops
responding, this process ends and is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from plaudit_job.load import load_job
from plaudit_job.processes import HOST_VARIABLE, PORT_VARIABLE, SERVER_VARIABLE, server_command, server_environment
from plaudit_job.spec.rewards import ServedModelSpec
from plaudit_reward.endpoint.vllm_sleep import SLEEP_TOKEN_VARIABLE
from plaudit_reward.http import HttpClient, NoResponseError, error_message
from plaudit_wire.errors import CallTimeoutError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import WorkerRecord
from plaudit_workers import process
from plaudit_workers.launch.child_server import ServerDiedError, child_server
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import EXIT_DONE, GPU_SHARE, ProcessSettings, Supervised, alone_on_gpu, unless_stopped
from plaudit_workers.rollout.vllm_arguments import is_cpu_build
from plaudit_workers.stream.transport import Transport

FOLDER = "model-servers"
"""In the run's folder: one folder a scorer, one file a server."""
_EVERYWHERE = "0.0.0.0"  # noqa: S104
_RESPONSE_WITHIN_S = 5.0
_MOVED_WITHIN_S = 600.0
"""Running requests end first, and 100 GB travel to host memory."""
logger = get_logger(__name__)
ROLE: Final = "model"
_LOOK_EVERY_S = 0.2
_BEAT_EVERY_S = 5.0


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve one replica of a scorer's model until ``stop`` is set.

    Raise ``RefusedError`` if its first start fails; later, and at the start after that, ``ServerDiedError``: the GPU's
    memory may not be free yet.
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
    with_gpu, share = not is_cpu_build(), float(os.environ.get(GPU_SHARE, "1"))
    options = server_command(model, identity.scorer, identity.host, identity.port, with_gpu=with_gpu, gpu_share=share)
    # Code that comes with the model must not reach the run's Redis.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PLAUDIT_REDIS_")}
    environment |= {**server_environment(model, with_gpu=with_gpu), SLEEP_TOKEN_VARIABLE: sleep_token}
    async with contextlib.AsyncExitStack() as stack:
        async with alone_on_gpu(settings.run):
            child = await stack.enter_async_context(
                child_server("the engine", [sys.executable, *options], environment, stop, settings.log_file)
            )
            stack.callback(identity.withdraw, settings.run_folder)
            stack.push_async_callback(client.close)
            logger.info("starting the model server", scorer=identity.scorer, pid=child.pid, url=identity.url)
            state = await child.until_ready(client.healthy)  # an engine loads as long as it takes
            if state == "stopped":
                return
            if state == "ended" and child.killed_by:
                raise ServerDiedError(
                    f"the server of scorer {identity.scorer} was killed by {child.killed_by} while it started (out of "
                    "memory?)"
                )
            if state == "ended":
                raise child.start_failure("the model server did not start")
        logger.info("serving", url=identity.url)
        identity.publish(settings.run_folder)
        async with Supervised() as tasks:
            if turns is not None:
                tasks.start(turns.follow(client))
            await child.watch(client.healthy)


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


if __name__ == "__main__":
    raise SystemExit(process.main(serve))
