"""Score with models that the job serves: find a model's servers, send each request to one, read its answer.

Requests go to the least busy healthy server, and to others while it is full. The response decides: 429 means a full
queue, so the request goes to another server, or to the same one after its ``Retry-After``. 503 means a server that is
shutting down: it gets no requests until it is healthy. 401 and 403 mean a wrong token. A lost connection or a 5xx is an
``InfrastructureError``, which the pipeline retries. Everything else is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import msgspec
from aiohttp import web

from plaudit_reward.http import HttpClient, NoResponseError, Response, UnreachableError, error_message, retry_after_s
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import CallTimeoutError, ConfigurationError, DataError, InfrastructureError, ScoreTimeoutError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import Sample

logger = get_logger(__name__)
TOKEN_VARIABLE = "PLAUDIT_MODEL_SERVER_TOKEN"  # noqa: S105  # the variable's name
"""Environment variable of servers and clients: the bearer token of every request; unset or empty: none."""


async def find(places: Sequence[str]) -> tuple[list[str], bool]:
    """Look the servers of a scorer up, at several kinds of places.

    - ``http://10.0.0.7:8000``: one server;
    - ``http://name:8000``: one server for each address that DNS has for the name (a headless Service: its ready pods);
    - ``file:///runs/run/servers/name``: one for each file in the folder, which contains its URL (``plaudit run``).

    Returns their URLs, and True if every place could be looked up. If not, keep the servers known before.
    """
    found = [await _find(place) for place in places]
    return [url for urls in found for url in urls or ()], None not in found


async def _find(place: str) -> list[str] | None:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return await asyncio.to_thread(_listed, Path(url2pathname(parts.path)))
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    hosts = sorted({str(answer[4][0]) for answer in answers})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]


def _listed(folder: Path) -> list[str] | None:
    try:
        return [file.read_text().strip() for file in sorted(folder.glob("*.url"))]
    except OSError:
        return None


class CallGate:
    """Hold the calls to served models while the trainer uses their GPUs, and count those under way. Open at first."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._calls = 0
        self.open()

    @property
    def is_open(self) -> bool:
        """Return True while calls may begin."""
        return self._opened.is_set()

    @property
    def idle(self) -> bool:
        """Return True if no call is under way."""
        return self._calls == 0

    def open(self) -> None:
        """Let all waiting calls begin."""
        self._opened.set()

    def close(self) -> None:
        """Let no further call begin; those under way continue."""
        self._opened.clear()

    async def passed(self) -> None:
        """Wait until calls may begin."""
        await self._opened.wait()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a call as under way."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


FAILURES_BEFORE_EJECTION = 3
_FIRST_PROBE_S = 0.25
_LONGEST_PROBE_S = 5.0


@dataclass(eq=False)
class Replica:
    """Hold the state of one server. Times are seconds of ``time.monotonic``."""

    url: str
    healthy: bool = False
    outstanding: int = 0
    """Requests in flight."""
    failures: int = 0
    """Failures since its last response."""
    paused_until_s: float = 0.0
    """End of the pause that it asked for with a 429."""
    probe_at_s: float = 0.0
    """Time of the next probe."""
    failed_probes: int = 0
    """In a row."""


class Replicas:
    """Choose the server for a request from the state of each, kept as plain data.

    A server gets requests only after its ``/health`` responded with 200. It is ejected after three failures in a row,
    or after one refused connection, and then probed at growing intervals until it is healthy again. Among healthy
    servers the one with the fewest requests in flight is next; servers with a failure since their last response come
    last, so that one that fails fast does not attract all requests.
    """

    def __init__(self) -> None:
        self._by_url: dict[str, Replica] = {}

    def __len__(self) -> int:
        return len(self._by_url)

    @property
    def any_healthy(self) -> bool:
        """Return True where a request could be sent, now or after a pause."""
        return any(replica.healthy for replica in self._by_url.values())

    def update(self, urls: Iterable[str], *, complete: bool) -> None:
        """Replace the servers by those found; known ones keep their state, and stay if the list is not ``complete``."""
        found = {url: self._by_url.get(url) or Replica(url) for url in urls}
        self._by_url = found if complete else {**self._by_url, **found}

    def pick(self, now_s: float) -> Replica | None:
        """Return the server for the next request; None when all are unhealthy or full."""
        free = [one for one in self._by_url.values() if one.healthy and one.paused_until_s <= now_s]
        return min(free, key=lambda one: (one.failures > 0, one.outstanding), default=None)

    def free_at_s(self) -> float:
        """Return the end of the first pause of a healthy server; infinite when none is healthy."""
        return min((one.paused_until_s for one in self._by_url.values() if one.healthy), default=float("inf"))

    def due(self, now_s: float) -> list[Replica]:
        """Return the servers to probe now."""
        return [one for one in self._by_url.values() if not one.healthy and one.probe_at_s <= now_s]

    def probed(self, replica: Replica, now_s: float, *, healthy: bool) -> None:
        """Record the result of a probe."""
        if healthy:
            replica.healthy, replica.failures, replica.failed_probes = True, 0, 0
            return
        replica.failed_probes += 1
        replica.probe_at_s = now_s + backoff_s(replica.failed_probes, _FIRST_PROBE_S, _LONGEST_PROBE_S)

    def answered(self, replica: Replica) -> None:
        """Record a response, which may be a refusal."""
        replica.failures = 0

    def failed(self, replica: Replica, now_s: float) -> None:
        """Record a missing response, or an error of the server."""
        replica.failures += 1
        if replica.failures >= FAILURES_BEFORE_EJECTION:
            self.eject(replica, now_s)

    def eject(self, replica: Replica, now_s: float, pause_s: float = _FIRST_PROBE_S) -> None:
        """Stop requests to it until a probe finds it healthy; the first probe is after ``pause_s``."""
        replica.healthy = False
        replica.probe_at_s = now_s + pause_s

    def full(self, replica: Replica, now_s: float, pause_s: float) -> None:
        """Record that it asked for a pause."""
        replica.failures = 0
        replica.paused_until_s = now_s + pause_s


_FIND_EVERY_S = 2.0
_WATCH_EVERY_S = 0.1
_PROBE_WITHIN_S = 2.0
_SPARE_CONNECTIONS = 16
"""For probes, so that they never wait for samples."""
_WRONG_TOKEN = frozenset({401, 403})
_LONGEST_RETRY_AFTER_S = 60.0
_Send = Callable[[str, float], Awaitable[Response]]
"""Sends a request to a server (its URL, seconds until the whole response has arrived)."""


class ServerResponseError(InfrastructureError):
    """A server responded that it failed, or refuses every request; the message has URL, status and the server's own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerPool:
    """Send requests to the servers of one scorer's model, found at ``places`` (see ``find``), with a bearer token.

    ``gate`` holds requests while the servers' GPUs are in other use; None: they never are.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[str],
        *,
        max_concurrent: int = 256,
        token: str = "",
        gate: CallGate | None = None,
    ) -> None:
        self.name = name
        self._gate = gate or CallGate()
        self._places = list(places)
        self._max_concurrent = max_concurrent
        self._replicas = Replicas()
        self._changed = asyncio.Event()
        self._token = token
        self._http: HttpClient | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to look for servers; they may come up later than the worker.

        Raises as ``HttpClient``, and ``ConfigurationError`` if there are no addresses of servers.
        """
        if not self._places:
            raise ConfigurationError(
                f"scorer {self.name}: the address of its model is missing. 'plaudit run' and the operator "
                "start the servers; to start this process by hand, set PLAUDIT_MODEL_SERVERS"
            )
        # The servers belong to the job, so no proxy lies between.
        self._http = HttpClient(
            max_connections=self._max_concurrent + _SPARE_CONNECTIONS,
            bearer_token=self._token,
            key_field=TOKEN_VARIABLE,
        )
        self._watching = asyncio.create_task(self._watch())

    @property
    def any_healthy(self) -> bool:
        """Return True where a request could be sent, now or after a pause."""
        return self._gate.is_open and self._replicas.any_healthy

    async def post(
        self,
        path: str,
        body: bytes,
        attempt: Attempt,
        *,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> tuple[str, Response]:
        """Send JSON to one server after another until one takes it; return its URL and its response.

        That is a 200, or a 4xx about this request. Waits for full servers are added to ``attempt.waited_s``. Each
        server that is asked has ``on_sent`` called when the body has been handed to its connection.

        Raises ``InfrastructureError`` if a server failed or refused the token, or none is healthy within the limit, and
        ``CallTimeoutError`` without a response within it.
        """
        http = self._opened()
        return await self._send(
            lambda url, limit_s: http.post(f"{url}{path}", body, limit_s, headers=headers, on_sent=on_sent), attempt
        )

    async def get(self, path: str, attempt: Attempt) -> tuple[str, Response]:
        """Read from one server; returns and raises as ``post`` does."""
        http = self._opened()
        return await self._send(lambda url, limit_s: http.get(f"{url}{path}", limit_s), attempt)

    def explained(self, response: Response) -> str:
        """Return a response's status and message, without the token."""
        return f"{response.status}: {error_message(response.body, self._token)}"

    async def close(self) -> None:
        """Stop the probes and close the connections."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._http is not None:
            await self._http.close()

    def _opened(self) -> HttpClient:
        assert self._http is not None
        return self._http

    async def _send(self, send: _Send, attempt: Attempt) -> tuple[str, Response]:
        began_s = time.monotonic()
        while True:
            replica = await self._pick(attempt, began_s)
            with self._gate.call():
                response = await self._ask(replica, send, _left_s(attempt, began_s))
            if response is not None:
                return replica.url, response

    async def _pick(self, attempt: Attempt, began_s: float) -> Replica:
        """Wait for a server: for one that sleeps or is full as limiter wait, else within the sample's time."""
        while True:
            with attempt.waiting():
                await self._gate.passed()
            now_s = time.monotonic()
            replica = self._replicas.pick(now_s)
            if replica is not None:
                return replica
            if self._replicas.any_healthy:  # all are full
                with attempt.waiting():
                    await self._wait(self._replicas.free_at_s() - now_s)
                continue
            left_s = _left_s(attempt, began_s)
            if left_s <= 0:
                raise InfrastructureError(
                    f"none of {len(self._replicas)} servers of the model of scorer {self.name} is healthy"
                )
            await self._wait(left_s)

    async def _wait(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_most_s)):
                await self._changed.wait()

    async def _ask(self, replica: Replica, send: _Send, limit_s: float) -> Response | None:
        """Send one request; return None when another server must be asked."""
        replica.outstanding += 1
        try:
            response = await self._asked(replica, send, limit_s)
        finally:
            replica.outstanding -= 1
        now_s = time.monotonic()
        if response.status == 429:
            self._replicas.full(replica, now_s, _pause_s(response))
            return None
        if response.status == 503:
            self._replicas.eject(replica, now_s, _pause_s(response))
            return None
        if response.status >= 500 or response.status == 408:
            self._replicas.failed(replica, now_s)
            raise ServerResponseError(f"{replica.url} responded {self.explained(response)}", response.status)
        self._replicas.answered(replica)
        if response.status in _WRONG_TOKEN:
            raise ServerResponseError(
                f"{replica.url} responded {self.explained(response)} (set {TOKEN_VARIABLE} to the server's token)",
                response.status,
            )
        if response.status != 200 and response.status < 400:
            message = f"{replica.url} responded {response.status}; the server of a model sends 200"
            raise ServerResponseError(message, response.status)
        return response

    async def _asked(self, replica: Replica, send: _Send, limit_s: float) -> Response:
        try:
            return await send(replica.url, limit_s)
        except UnreachableError:
            self._replicas.eject(replica, time.monotonic())
            raise
        except (CallTimeoutError, NoResponseError):
            self._replicas.failed(replica, time.monotonic())
            raise

    async def _watch(self) -> None:
        """Look up the servers and probe the unhealthy ones until the pool closes."""
        find_at_s = 0.0
        while True:
            if time.monotonic() >= find_at_s:
                urls, complete = await find(self._places)
                self._replicas.update(urls, complete=complete)
                find_at_s = time.monotonic() + _FIND_EVERY_S
            await asyncio.gather(*(self._probe(replica) for replica in self._replicas.due(time.monotonic())))
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _probe(self, replica: Replica) -> None:
        try:
            healthy = (await self._opened().get(f"{replica.url}/health", _PROBE_WITHIN_S)).status == 200
        except (NoResponseError, CallTimeoutError):
            healthy = False
        self._replicas.probed(replica, time.monotonic(), healthy=healthy)
        if healthy:
            logger.info("the server of a model is healthy", scorer=self.name, url=replica.url)
            self._changed.set()  # all waiting samples look again
            self._changed = asyncio.Event()


def _pause_s(response: Response) -> float:
    """Return the seconds of ``Retry-After``, at most a minute; one where the header is missing."""
    asked_s = retry_after_s(response.headers)
    return 1.0 if asked_s is None else min(asked_s, _LONGEST_RETRY_AFTER_S)


def _left_s(attempt: Attempt, began_s: float) -> float:
    """Return the seconds that the attempt has left, waits for limits excluded."""
    return attempt.limit_s - (time.monotonic() - began_s - attempt.waited_s)


_LARGEST_BODY_BYTES = 64 << 20


class LocalRouter:
    """Serve one loopback address for all servers of a model, for functions that expect verl's router.

    Responses arrive whole, also those that the caller wants streamed, within ``limit_s``; the caller's own limit is
    usually shorter.
    """

    def __init__(self, pool: ServerPool, limit_s: float) -> None:
        self._pool = pool
        self._limit_s = limit_s
        self._runner: web.AppRunner | None = None

    async def open(self) -> str:
        """Start to look for servers and to listen; return ``host:port``. Raises as ``ServerPool.open``."""
        await self._pool.open()
        application = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._forward)
        # A caller that gives up must not keep a server busy.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"{host}:{port}"

    @property
    def ready(self) -> bool:
        """Return True while some server is healthy."""
        return self._pool.any_healthy

    async def close(self) -> None:
        """Stop listening, and close the connections to the servers."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self._pool.close()

    async def _forward(self, request: web.Request) -> web.Response:
        if request.method not in {"GET", "POST"}:
            return _failure(405, f"{request.method} is not forwarded; use GET or POST")
        attempt = Attempt(self._limit_s)
        try:
            if request.method == "GET":
                _, response = await self._pool.get(request.raw_path, attempt)
            else:
                _, response = await self._pool.post(request.raw_path, await request.read(), attempt)
        except CallTimeoutError as error:
            return _failure(504, str(error))
        except InfrastructureError as error:
            return _failure(502, str(error))
        kind = response.headers.get("Content-Type", "application/json")
        return web.Response(status=response.status, body=response.body, headers={"Content-Type": kind})


def _failure(status: int, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"type": "router", "message": message}})
    return web.Response(status=status, body=body, content_type="application/json")


InputForm = Literal["chat", "text"]
"""The messages and the response, rendered by the reward model's chat template; or prompt and response, concatenated."""


class _Result(msgspec.Struct):
    probs: list[float | None]
    """None is what JSON has for NaN."""


class _Answer(msgspec.Struct):
    data: list[_Result]


_decode = msgspec.json.Decoder(_Answer).decode


class ModelScorer:
    """Score by a reward model with one output, behind vLLM's ``/classify`` or Plaudit's own (``kind: model``).

    A 200 carries the value. A 4xx is about this sample (too long, no chat template) and is never retried. Opens and
    closes ``pool``, the model's servers; ``traceparent`` is as for ``JudgeScorer``.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        form: InputForm = "chat",
        max_concurrent: int = 256,
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self.name = pool.name
        self._pool = pool
        self._form = form
        self._max_concurrent = max_concurrent
        self._traceparent = traceparent
        self._in_work = 0

    async def open(self) -> None:
        """Start to look for servers. Raises as ``ServerPool.open``."""
        await self._pool.open()

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample; ask further servers while those asked are full or shutting down."""
        self._in_work += 1
        try:
            headers = {"traceparent": self._traceparent(sample)} if self._traceparent else None
            body = request_body(sample, self._form)
            url, response = await self._pool.post("/classify", body, attempt, headers=headers)
        except CallTimeoutError as error:
            raise ScoreTimeoutError(str(error)) from None  # a forward pass that took so long once is not repeated
        finally:
            self._in_work -= 1
        if response.status != 200:
            raise DataError(f"{url} refused the sample: {self._pool.explained(response)}")
        return _score_of(url, response.body)

    def room(self) -> int:
        """Return how many more samples could begin; none while no server is healthy, so that their time stays whole."""
        return max(0, self._max_concurrent - self._in_work) if self._pool.any_healthy else 0

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self._pool.close()


def request_body(sample: Sample, form: InputForm) -> bytes:
    """Return the body of the request for a sample's raw logit.

    A prompt without messages becomes one message of the user.
    """
    if form == "text":
        return msgspec.json.encode({"input": sample.prompt + sample.response, "use_activation": False})
    prompt: list[dict[str, Any]] = sample.messages or [{"role": "user", "content": sample.prompt}]
    messages = [*prompt, {"role": "assistant", "content": sample.response}]
    return msgspec.json.encode({"messages": messages, "use_activation": False})


def _score_of(url: str, body: bytes) -> Score:
    try:
        (result,) = _decode(body).data
    except (ValueError, RecursionError) as error:
        raise InfrastructureError(f"{url}: the response is not a classification of one input: {error}") from error
    if len(result.probs) != 1:
        raise DataError(
            f"{url}: the model has {len(result.probs)} labels; a reward model has one (num_labels: 1). Name another "
            "source"
        )
    (logit,) = result.probs
    return Score.scored(math.nan if logit is None else logit)
