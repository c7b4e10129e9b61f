"""Serve the broker of a run's machines over HTTP: the process ``sandboxes``.

The routes are those of ``plaudit_reward.served_machines``; each request carries the run's token. Beside
them the broker keeps machines ready for the prompts that rollouts take next (``sandboxes.warm``): the trainer admits
prompts before a rollout has room for them, so their tasks are known, and images are pulled and machines started
meanwhile. The samples of a prompt, and prompts of equal shape, share a pool.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from plaudit_job.load import load_job
from plaudit_job.tasks import Task
from plaudit_metrics.service.http_server import HttpServer, listening_socket
from plaudit_reward.machines import task_of
from plaudit_reward.providers import WarmProvider, provider_of
from plaudit_reward.served_machines import (
    POLL_S,
    TOKEN_VARIABLE,
    BrokerRefusal,
    ClaimRequest,
    Nothing,
    ReleaseRequest,
    RunRequest,
    VerifyRequest,
    read_token,
)
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError, RefusedError, described
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt, RecordError, decode
from plaudit_wire.names import CONSUMER_GROUPS
from plaudit_workers.process import EXIT_DONE, HealthServer, ProcessSettings, Supervised
from plaudit_workers.sandboxes.broker import Broker
from plaudit_workers.sandboxes.places import DeposedError, Places
from plaudit_workers.sandboxes.series import BrokerSeries
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import VolumeError

logger = get_logger(__name__)
_MOST_BYTES = 32 << 20
_END_WITHIN_S = 5
_MOST_THREADS = 512
"""A claim whose machine is being made holds one, and so does a machine that is removed."""
_LOOK_EVERY_S = 0.5
_NEXT_PROMPTS = 64
"""Prompts that are looked at: the next ones."""
_KEPT_S: Final = 60.0
"""Seconds for which a pool stays that no prompt needs: those that were just taken claim their machines soon."""
Asked = TypeVar("Asked", bound=msgspec.Struct)


@dataclass(frozen=True)
class BrokerSettings:
    """Hold the environment of a broker."""

    host: str
    """``PLAUDIT_SANDBOXES_HOST``: the address it listens on; default 127.0.0.1."""
    port: int
    """``PLAUDIT_SANDBOXES_PORT``; 0 is any free one."""
    token: str
    """Of the file that ``PLAUDIT_SANDBOXES_TOKEN_FILE`` names."""
    lease_s: float = 15.0
    """``PLAUDIT_SANDBOXES_LEASE_S``: seconds after which another broker takes over from one that died."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> BrokerSettings:
        """Read the settings. Raise ``RefusedError`` if one is missing or no port."""
        port = environment.get("PLAUDIT_SANDBOXES_PORT", "")
        if not port.isdigit():
            raise RefusedError(f"PLAUDIT_SANDBOXES_PORT is {port!r}: give a port. The operator sets it")
        token = read_token(environment.get(TOKEN_VARIABLE, ""))
        host = environment.get("PLAUDIT_SANDBOXES_HOST", "127.0.0.1")
        return cls(host, int(port), token, float(environment.get("PLAUDIT_SANDBOXES_LEASE_S", cls.lease_s)))


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Run a broker until ``stop`` is set."""
    own, job = BrokerSettings.from_environment(), load_job(settings.job_path)
    spec = job.spec.sandboxes
    provider = cast(WarmProvider, provider_of(spec, settings.run_folder))
    if not hasattr(provider, "start"):
        raise RefusedError(f"spec.sandboxes.provider: machines of {spec.provider} have no broker")
    threads = min(2 * spec.max_concurrent + 16, _MOST_THREADS)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
    series = BrokerSeries()
    transport = await Transport.open(settings.redis, settings.run, settings.run_folder / "spill", stop=stop)
    places = Places(transport, settings.worker, spec.max_concurrent, own.lease_s)
    broker = Broker(settings.run_folder, provider, places, series, spec.keep)
    pools = Pools(transport, broker, provider, spec.warm)
    try:
        async with HealthServer(settings.health_port, lambda: places.leads, {"/metrics": series.page}):
            if await places.lead(stop):
                await serve_led(own, broker, places, pools, stop)
    finally:
        await transport.close()
    return EXIT_DONE


async def serve_led(own: BrokerSettings, broker: Broker, places: Places, pools: Pools, stop: asyncio.Event) -> None:
    """Serve while this process is the run's only broker. Raises ``DeposedError`` when it is not any more."""
    try:
        async with Supervised() as tasks:
            tasks.start(places.keep())
            try:
                await broker.open()
            except ConfigurationError as error:
                raise RefusedError(f"spec.sandboxes: {error}") from error
            tasks.start(broker.run())
            tasks.start(pools.keep())
            async with BrokerServer(own, broker, places):
                await stop.wait()
    finally:
        await broker.close()
        await places.leave()


class BrokerServer:
    """Serve a broker's routes, as an asynchronous context manager."""

    def __init__(self, own: BrokerSettings, broker: Broker, places: Places) -> None:
        self._token = f"Bearer {own.token}".encode()
        self._broker = broker
        self._places = places
        self._socket = listening_socket(own.host, own.port)
        routes = [
            Route("/v1/claim", self._answering(ClaimRequest, self._broker.claim), methods=["POST"]),
            Route("/v1/run", self._answering(RunRequest, self._broker.execute), methods=["POST"]),
            Route("/v1/verify", self._answering(VerifyRequest, self._broker.verify), methods=["POST"]),
            Route("/v1/release", self._answering(ReleaseRequest, self._release), methods=["POST"]),
        ]
        self._server = HttpServer(Starlette(routes=routes), end_within_s=_END_WITHIN_S)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Return where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> BrokerServer:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        logger.info("serving", address=self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        try:
            if self._task is not None:
                await self._task
        finally:  # a broker that fails, whose body is cancelled, answers nobody any more
            for accepting in self._server.servers:
                accepting.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._socket.close()

    async def _release(self, request: ReleaseRequest) -> asyncio.Future[Any]:
        names = None if request.all else request.machines
        work = asyncio.ensure_future(self._broker.release(names, keeps=request.keep))
        work.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
        return work

    def _answering(
        self, kind: type[Asked], handle: Callable[[Asked], Awaitable[asyncio.Future[Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of one route."""
        decoder = msgspec.json.Decoder(kind)

        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._token):
                return _refusal(401, "unauthorized", "the token is not this run's")
            if not self._places.leads:
                return _refusal(503, "infra_error", "another broker of the machines may have taken over")
            try:
                asked = decoder.decode(await _body(request))
            except (msgspec.DecodeError, ValueError) as error:
                return _refusal(400, "bad_request", str(error))
            return await self._answer(handle, asked)

        return answer

    async def _answer(self, handle: Callable[[Asked], Awaitable[asyncio.Future[Any]]], asked: Asked) -> Response:
        """Return what a request's work gives, 202 while it gives nothing yet, or its error."""
        try:
            work = await handle(asked)
            done, _ = await asyncio.wait([work], timeout=POLL_S)
            if not done:
                return Response(status_code=202)
            if work.cancelled():
                return _refusal(410, "infra_error", "the machine was removed")
            result = work.result()
        except DataError as error:
            return _refusal(422, "data_error", str(error))
        except InfrastructureError as error:
            return _refusal(502, "infra_error", str(error))
        except DeposedError as error:
            return _refusal(503, "infra_error", str(error))
        except Exception as error:  # the boundary to what providers raise: it ends this request and nothing else
            logger.exception("a request failed", kind=type(asked).__name__)
            return _refusal(500, "infra_error", described(error))
        return _json(200, Nothing() if result is None else result)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise ValueError(f"a request of more than {_MOST_BYTES >> 20} MiB")
    except ClientDisconnect as error:
        raise ValueError("the client has left") from error
    return bytes(body)


def _refusal(status: int, kind: str, message: str) -> Response:
    return _json(status, {"error": BrokerRefusal(kind, message)})


def _json(status: int, content: object) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


class Pools:
    """Start warm machines, and remove those that are not needed any more.

    Args:
        size: Machines kept ready for each shape that is needed.
    """

    def __init__(self, transport: Transport, broker: Broker, provider: WarmProvider, size: int) -> None:
        self._transport = transport
        self._broker = broker
        self._provider = provider
        self._size = size
        self._needed_s: dict[str, float] = {}
        """When each shape was needed last."""

    async def keep(self) -> None:
        """Follow the admitted prompts until cancelled; do nothing for pools of no size."""
        while self._size:
            needed = await self.needed()
            now = time.monotonic()
            self._needed_s.update(dict.fromkeys(needed, now))
            await self._start(needed)
            for shape in self._broker.shapes():
                if now - self._needed_s.setdefault(shape, now) > _KEPT_S:
                    for held in self._broker.warm(shape):
                        await self._broker.end(held)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _start(self, needed: Mapping[str, tuple[int, Task | None]]) -> None:
        """Start what is missing, for the next prompts first, while places are free that no claim waits for."""
        for shape, (samples, task) in needed.items():
            for _ in range(min(self._size, samples) - len(self._broker.warm(shape))):
                if self._broker.free <= 0:
                    return
                await self._broker.start_warm(shape, task)

    async def needed(self) -> dict[str, tuple[int, Task | None]]:
        """Return how many samples of each shape the next prompts have, and a task of it, in the order of need."""
        records = await self._transport.retry_through_outage(self._undelivered)
        needed: dict[str, tuple[int, Task | None]] = {}
        for record in records:
            try:
                prompt = decode(await self._transport.volume.load(record), Prompt)
                task = await asyncio.to_thread(task_of, prompt.extra_info)
            except (RecordError, VolumeError, DataError, ValueError):  # whoever takes the prompt reports it
                continue
            shape = self._provider.shape(task)
            samples, first = needed.get(shape, (0, task))
            needed[shape] = (samples + prompt.n, first)
        return needed

    async def _undelivered(self) -> list[bytes]:
        stream, commands = self._transport.names.prompts, self._transport.commands
        groups: Any = await commands.xinfo_groups(stream)
        own = next((each for each in groups if each["name"] == CONSUMER_GROUPS["prompts"].encode()), None)
        if own is None:
            return []
        entries: Any = await commands.xrange(stream, b"(" + own["last-delivered-id"], "+", _NEXT_PROMPTS)
        pipeline = commands.pipeline(transaction=False)  # a prompt whose group has ended stays until somebody reads it
        for _, fields in entries:
            pipeline.hmget(self._transport.names.group(fields.get(b"group", b"").decode()), ["phase"])
        phases = await pipeline.execute()
        return [fields[b"record"] for (_, fields), (phase,) in zip(entries, phases, strict=True) if phase == b"open"]
