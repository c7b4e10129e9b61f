"""Serve the routes of a gateway.

| | |
| --- | --- |
| ``POST /v1/score`` | one sample, or ``{"samples": […]}``; answers when scored |
| ``POST /v1/groups`` | ``{"samples": […], "id"}``, or ``{"groups": […]}``; scored together |
| ``GET /v1/scores/{id}`` | the result under an id, now or within ``?wait=`` seconds |
| ``GET /v1/service`` | scorers, version, limits, health |
| ``POST /slime``, ``/openrlhf``, ``/verify`` | the shapes of slime, OpenRLHF and NeMo Gym |
| ``POST /score_group`` | a group, by a session of the Open Reward Standard (``OpenRewardSessions``) |
| ``GET /openapi.json``, ``/metrics`` | |

A caller that accepts ``application/x-ndjson`` gets a line for each sample or group as it is scored, in any order, and
an empty line every 15 s without one.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plaudit_job.spec.rljob import RLJob
from plaudit_reward.endpoint.shapes import (
    CALLER_HEADER,
    GATEWAY_SHAPES,
    OPEN_REWARD_BLOCKS,
    OPEN_REWARD_ROUTE,
    GatewayResult,
    GatewayShape,
    open_reward_answer,
)
from plaudit_wire import VERSION
from plaudit_wire.messages import Service, decode
from plaudit_wire.redis import OUTAGE
from plaudit_workers.service import openapi, requests
from plaudit_workers.service.callers import (
    Awaited,
    Callers,
    CallerSession,
    DisconnectedError,
    GatewayAnswer,
    GroupAnswer,
    MissingAnswer,
    SampleAnswer,
    answer_of,
    as_they_come,
    encode,
    stored_answer,
    wait_for_accepted,
    wait_for_all,
)
from plaudit_workers.service.canary import SECONDS, Canary, CanarySeries
from plaudit_workers.service.requests import (
    LONGEST_WAIT_S,
    SAMPLE_ID,
    RefusedRequestError,
    RequestBody,
    SubmittedSamples,
)
from plaudit_workers.service.tokens import SampleRate, Tokens, caller_name, token_of

RECOGNISED = "recognised"
"""Entry of a connection's state: to be called once a request has brought a token."""
_ACCEPTED_WITHIN_S = 5.0
_QUIET_S = 15.0
_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold lines back
]


class Exchange:
    """Submit the samples of one request at once; answer as a whole or line by line. An ASGI response.

    ``field`` names the list in the answer to a batch; ``answered`` gets groups and their answers when these are sent.
    """

    status_code = 200

    def __init__(
        self,
        session: CallerSession,
        body: RequestBody,
        *,
        field: str,
        streams: bool,
        timeout_s: float,
        answered: Callable[[Sequence[SubmittedSamples], Sequence[GatewayAnswer]], None],
    ) -> None:
        self._session = session
        self._body = body
        self._field = field
        self._streams = streams
        self._timeout_s = timeout_s
        self._answered = answered
        self._awaited: list[Awaited] = []
        try:
            for group in body.groups:
                self._awaited.append(session.await_result(group))
        except Exception as error:  # the boundary to what callers send: it ends this request and nothing else
            self.leave(delivered=False)
            raise RefusedRequestError(422, "invalid_sample", f"the samples cannot be stored: {error}") from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; leave the wait for its results in any case."""
        delivered = False
        try:
            if self._streams:
                await self._send_lines(receive, send)
            else:
                await self._send_all(receive, send)
            delivered = True
        finally:
            self.leave(delivered=delivered)

    def leave(self, *, delivered: bool) -> None:
        """End the wait for the results; see ``CallerSession.leave``."""
        awaited, self._awaited = self._awaited, []
        self._session.leave(awaited, delivered=delivered)

    async def answers(self, receive: Receive) -> list[GatewayAnswer]:
        """Wait for all results; raise ``DisconnectedError`` if the caller has left.

        Raise ``RefusedRequestError`` if time is up, or if an id belongs to another sample.
        """
        try:
            if not await wait_for_all(self._awaited, receive, self._timeout_s):
                raise RefusedRequestError(504, "not_scored_yet", self._not_scored(), retry_after_s=1)
            answers = [self._answer(position) for position in range(len(self._awaited))]
            if missing := {i: a.error for i, a in enumerate(answers) if isinstance(a, MissingAnswer)}:
                first = next(iter(missing.values()))
                messages = {i: error["message"] for i, error in missing.items()}
                status = 409 if first["type"] == "conflict" else 422
                raise RefusedRequestError(status, first["type"], first["message"], samples=messages)
        except BaseException:
            self.leave(delivered=False)
            raise
        self._answered(self._body.groups, answers)
        return answers

    def _not_scored(self) -> str:
        """Return what becomes of the samples when time is up."""
        named = [group.id for group in self._body.groups if group.is_named]
        text = f"not scored within {self._timeout_s:g} s"
        if named:
            text += f"; scoring goes on, and the scores wait under the ids ({', '.join(named[:3])}, …)"
        if len(named) < len(self._body.groups):
            text += "; the scores of samples without an id are dropped: give each an id, or more time"
        return text

    async def _send_all(self, receive: Receive, send: Send) -> None:
        answers = await self.answers(receive)
        content = encode({self._field: answers} if self._body.is_batch else answers[0])
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, length]})
        await send({"type": "http.response.body", "body": content})

    async def _send_lines(self, receive: Receive, send: Send) -> None:
        """Send the headers once Redis holds the samples, then each result; an answer that ends early lacks some."""
        await wait_for_accepted(self._awaited, _ACCEPTED_WITHIN_S)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        async for positions in as_they_come(self._awaited, receive, self._timeout_s, _QUIET_S):
            answers = [self._answer(position) for position in positions]
            self._answered([self._body.groups[position] for position in positions], answers)
            content = b"".join(encode(answer) + b"\n" for answer in answers) or b"\n"
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _answer(self, position: int) -> GatewayAnswer:
        return answer_of(self._body.groups[position], self._awaited[position].result.result())


@dataclass(frozen=True)
class ServiceDescription:
    """Describe one service, for ``GET /v1/service``."""

    job: RLJob
    run: str
    limits: dict[str, float]
    canary: CanarySeries | None = None

    async def read(self, callers: Callers) -> dict[str, Any]:
        """Return the description with the service's present health."""
        service = callers.service
        offered: Any = await callers.transport.commands.get(callers.transport.names.service)
        workers = [worker for worker in await callers.transport.workers() if worker.role == "reward"]
        return {
            "job": self.job.metadata.name,
            "run": self.run,
            "version": VERSION,
            "scoring": decode(offered, Service).scoring if offered else "",
            "scorers": [
                {"name": scorer.name, "kind": scorer.kind, "scope": scorer.scope, "weight": scorer.weight}
                for scorer in self.job.spec.reward.rewarding.scorers
            ],
            "limits": self.limits | {"room": service.room, "group_deadline_s": service.group_deadline_s},
            "health": {
                "workers": len(workers),
                "workers_ready": sum(worker.ready for worker in workers),
                "circuits_open": sorted({judge for worker in workers for judge in worker.circuits_open}),
                "awaited": callers.num_awaited,
                "memory": await callers.memory(),
            },
        } | ({"canary": self.canary.description()} if self.canary else {})


class GatewaySeries:
    """Hold the Prometheus series of one process.

    Labels are callers (the names of tokens) and fixed values, so they stay few.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "plaudit_gateway_requests", "Requests answered", ["caller", "path", "status"], registry=registry
        )
        self.samples = prometheus_client.Counter(
            "plaudit_gateway_samples", "Samples answered, by outcome", ["caller", "outcome"], registry=registry
        )
        self.seconds = Histogram(
            "plaudit_gateway_sample_seconds",
            "Seconds from a sample's submission to its score",
            ["caller"],
            buckets=SECONDS,
            registry=registry,
        )
        self.awaited = Gauge("plaudit_gateway_awaited", "Samples and groups that requests await", registry=registry)

    def count(self, caller: str, answers: Sequence[GatewayAnswer]) -> None:
        """Count the samples of answers that are sent to a caller."""
        of_each = (answer.results if isinstance(answer, GroupAnswer) else [answer] for answer in answers)
        samples = [sample for some in of_each for sample in some if isinstance(sample, SampleAnswer)]
        for outcome, number in Counter(sample.outcome for sample in samples).items():
            self.samples.labels(caller, outcome).inc(number)
        seconds = self.seconds.labels(caller)
        for sample in samples:
            seconds.observe(sample.seconds)


_LOOK_EVERY_S = 0.2
_READ_AT_ONCE_BYTES = 1 << 20
"""Larger bodies are read beside the event loop, one at a time."""
T = TypeVar("T")
Handler = Callable[[Request, str], Awaitable["Response | Exchange | GroupEvents"]]


class Application:
    """Serve a gateway as an ASGI application; ``canary`` gets copies of a share of the samples."""

    def __init__(
        self,
        callers: Callers,
        tokens: Tokens,
        description: ServiceDescription,
        series: GatewaySeries,
        rate: SampleRate,
        canary: Canary | None = None,
    ) -> None:
        self._callers = callers
        self._tokens = tokens
        self._description = description
        self._rate = rate
        self._canary = canary
        self._series = series
        self._open_reward = OpenRewardSessions(callers)
        self._reading = asyncio.Lock()
        self._bodies = requests.BodyRoom()

    async def close(self) -> None:
        """Close the connections to the canary."""
        if self._canary is not None:
            await self._canary.close()

    def asgi(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/v1/score", self._endpoint(self._score), methods=["POST"]),
                Route("/v1/groups", self._endpoint(self._groups), methods=["POST"]),
                Route("/v1/scores/{id:path}", self._endpoint(self._stored), methods=["GET"]),
                Route("/v1/service", self._endpoint(self._service), methods=["GET"]),
                *(
                    Route(path, self._endpoint(self._shaped(shape)), methods=["POST"])
                    for path, shape in GATEWAY_SHAPES.items()
                ),
                *self._open_reward_routes(),
                Route("/openapi.json", _openapi, methods=["GET"]),
                Route("/metrics", self._endpoint(self._metrics), methods=["GET"]),
            ]
        )

    def _endpoint(self, handler: Handler) -> _Endpoint:
        return _Endpoint(handler, self._tokens, self._callers, self._series)

    async def _score(self, request: Request, caller: str) -> Exchange:
        return self._exchange(request, caller, await self._read(request, caller, requests.read_samples))

    async def _groups(self, request: Request, caller: str) -> Exchange:
        body = await self._read(request, caller, requests.read_groups)
        return self._exchange(request, caller, body, field="groups")

    async def _read(self, request: Request, caller: str, read: Callable[[bytes], T]) -> T:
        """Return what a request's body holds, without holding up other requests."""
        with self._bodies.held(token_of(caller)) as hold:
            body = await requests.read_body(request, hold)
            if len(body) <= _READ_AT_ONCE_BYTES:
                return read(body)
            async with self._reading:
                return await asyncio.to_thread(read, body)

    def _exchange(self, request: Request, caller: str, body: RequestBody, field: str = "results") -> Exchange:
        session = self._callers.session(caller)
        wait_s = self._rate.take(token_of(caller), sum(len(group.samples) for group in body.groups))
        if wait_s > 0:
            message = "this token has submitted more samples than reward.gateway.samplesPerMinute allows"
            raise RefusedRequestError(429, "rate", message, retry_after_s=math.ceil(wait_s))
        if self._callers.is_full(caller):
            raise RefusedRequestError(429, "busy", "too many samples of this token wait already", retry_after_s=1)
        return Exchange(
            session,
            body,
            field=field,
            streams=requests.accepts_lines(request),
            timeout_s=requests.query_seconds(request, "timeout", LONGEST_WAIT_S),
            answered=lambda groups, answers: self._answered(caller, groups, answers),
        )

    def _answered(self, caller: str, groups: Sequence[SubmittedSamples], answers: Sequence[GatewayAnswer]) -> None:
        self._series.count(token_of(caller), answers)
        if self._canary is not None:
            for group, answer in zip(groups, answers, strict=True):
                self._canary.offer(group, answer)

    def _shaped(self, shape: GatewayShape) -> Handler:
        """Return the handler of a shape; its samples have no ids, so a repeat is scored again."""

        async def handle(request: Request, caller: str) -> Response:
            body, submitted = await self._read(request, caller, partial(requests.read_shape, shape=shape))
            exchange = self._exchange(request, caller, submitted)
            answers = await exchange.answers(request.receive)
            results = [_result(each) for each in answers if isinstance(each, SampleAnswer)]
            exchange.leave(delivered=True)
            try:
                answer = shape.answer(body, results)
            except ValueError as error:
                raise RefusedRequestError(502, "no_score", str(error)) from error
            return Response(encode(answer), media_type="application/json")

        return handle

    def _open_reward_routes(self) -> Iterator[Route]:
        """Yield the routes of the standard's client; those of the environment with its name, and without it."""
        sessions, name = self._open_reward, self._description.job.metadata.name
        yield Route(OPEN_REWARD_ROUTE, self._endpoint(_constant([name])))
        for path, handler in {
            "/create_session": _create_session,
            "/create": self._create,
            "/ping": sessions.keep,
            "/delete": sessions.end,
            "/delete_session": sessions.end,
        }.items():
            yield Route(path, self._endpoint(handler), methods=["POST"])
        for prefix in ("", f"/{name}"):
            yield Route(f"{prefix}/tools", self._endpoint(_constant(_GROUPS_ONLY)))
            yield Route(f"{prefix}/task_tools", self._endpoint(_constant(_GROUPS_ONLY)))
            yield Route(f"{prefix}/score_group", self._endpoint(self._score_group), methods=["POST"])

    async def _create(self, request: Request, caller: str) -> Response:
        task = await self._read(request, caller, requests.read_task)
        return await self._open_reward.begin(request, caller, task)

    async def _score_group(self, request: Request, caller: str) -> GroupEvents:
        task = await self._open_reward.task(request, caller)
        group = await self._read(request, caller, partial(requests.read_candidates, task=task))
        return GroupEvents(self._exchange(request, caller, RequestBody([group], is_batch=False)), group.id)

    async def _stored(self, request: Request, caller: str) -> Response:
        own_id, session = request.path_params["id"], self._callers.session(caller)
        until = time.monotonic() + requests.query_seconds(request, "wait", 0.0)
        while True:
            is_known, result = await session.find(own_id)
            if result is not None:
                answer = stored_answer(own_id, result, is_group=result.is_group)
                return Response(encode(answer), media_type="application/json")
            if not is_known:
                raise RefusedRequestError(404, "unknown_id", f"id {own_id!r} is not, or no longer, known: submit it")
            if time.monotonic() >= until:
                return JSONResponse({"id": own_id, "state": "in_work"}, 202, headers={"retry-after": "1"})
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _service(self, request: Request, caller: str) -> Response:
        return JSONResponse(await self._description.read(self._callers))

    def metrics(self) -> bytes:
        """Return all series in Prometheus's text format."""
        self._series.awaited.set(self._callers.num_awaited)
        return generate_latest(self._series.registry)

    async def _metrics(self, request: Request, caller: str) -> Response:
        return Response(self.metrics(), media_type="text/plain; version=0.0.4")


def _result(answer: SampleAnswer) -> GatewayResult:
    values = {name: of.value for name, of in answer.scorers.items()}
    return GatewayResult(answer.score, answer.outcome, answer.reason, values, answer.drop_group)


_SESSION_KEPT_S = 900
"""Of the Open Reward Standard, since its last request, as its own server keeps one; clients ping every ten seconds."""
_SIZES_KEPT_S = 24 * 3600
_MOST_TASK_BYTES = 1 << 20
_MOST_BYTES_OF_TOKEN = 64 << 20
_BYTES_OF_SESSION = 512
"""Bytes that a session takes in Redis in addition to its task."""
_PING_S = 10.0
_EVENT_CHARACTERS = 1 << 14
"""Clients read a stream by lines of bounded length."""
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_GROUPS_ONLY = {
    "tools": [],
    "terminal_tool": None,
    "supports_score_group": True,
    "message_block_types": list(OPEN_REWARD_BLOCKS),
}
"""An environment without tools: it scores groups."""


class OpenRewardSessions:
    """Keep the tasks of the Open Reward Standard's sessions, in Redis: any gateway may get the next request of one.

    A session is named by the header ``X-Session-ID``; each token sees its own.
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._redis: Any = callers.transport.commands  # redis-py's types allow a client without a loop as well
        self._names = callers.transport.names

    async def begin(self, request: Request, caller: str, task: dict[str, Any]) -> Response:
        """Keep the task of a session, as ``/create`` gives it; a repeat replaces it."""
        encoded = encode(task)
        if len(encoded) > _MOST_TASK_BYTES:
            problem = f"task_spec has {len(encoded):,} bytes: give at most {_MOST_TASK_BYTES:,}, or use POST /v1/groups"
            raise RefusedRequestError(413, "too_large", problem)
        if (await self._callers.memory())["is_short"]:
            raise RefusedRequestError(429, "busy", "Redis's memory is short: repeat later", retry_after_s=1)
        key, session = self._key(request, caller), request.headers[_SESSION_HEADER]
        sizes, num_bytes = self._names.open_reward_sizes(token_of(caller)), len(encoded) + _BYTES_OF_SESSION
        if await self._held_bytes(caller, session) + num_bytes > _MOST_BYTES_OF_TOKEN:
            problem = f"the tasks of this token's sessions have {_MOST_BYTES_OF_TOKEN >> 20} MiB: POST /delete ends one"
            raise RefusedRequestError(429, "busy", problem, retry_after_s=10)
        async with self._redis.pipeline(transaction=False) as all_of_it:
            all_of_it.hset(sizes, session, num_bytes)
            all_of_it.hset(key, "task", encoded)
            all_of_it.expire(key, _SESSION_KEPT_S)
            all_of_it.expire(sizes, _SIZES_KEPT_S)
            await all_of_it.execute()
        return JSONResponse({"sid": session})

    async def _held_bytes(self, caller: str, session: str) -> int:
        """Return the bytes of a caller's other sessions; forget those that have lapsed once they are too many."""
        sizes = self._names.open_reward_sizes(token_of(caller))
        held = {name.decode(): int(size) for name, size in (await self._redis.hgetall(sizes)).items()}
        if sum(held.values()) > _MOST_BYTES_OF_TOKEN - _MOST_TASK_BYTES:
            names = [*held]
            async with self._redis.pipeline(transaction=False) as all_of_them:
                for name in names:
                    all_of_them.hlen(self._names.open_reward_session(token_of(caller), name))
                exist = await all_of_them.execute()
            if lapsed := [name for name, fields in zip(names, exist, strict=True) if not fields]:
                await self._redis.hdel(sizes, *lapsed)
            held = {name: size for name, size in held.items() if name not in lapsed}
        return sum(size for name, size in held.items() if name != session)

    async def task(self, request: Request, caller: str) -> dict[str, Any]:
        """Return the task of a request's session. Raise ``RefusedRequestError`` for one that has ended."""
        await self.keep(request, caller)
        encoded = await self._redis.hget(self._key(request, caller), "task")
        if encoded is None:
            raise _ended()
        return cast(dict[str, Any], msgspec.json.decode(encoded))

    async def keep(self, request: Request, caller: str) -> Response:
        """Keep a session for longer."""
        if not await self._redis.expire(self._key(request, caller), _SESSION_KEPT_S):
            raise _ended()
        return JSONResponse({"status": "ok"})

    async def end(self, request: Request, caller: str) -> Response:
        """Delete a session."""
        session = request.headers.get(_SESSION_HEADER, "")
        await self._redis.unlink(self._key(request, caller))
        await self._redis.hdel(self._names.open_reward_sizes(token_of(caller)), session)
        return JSONResponse({"sid": session})

    def _key(self, request: Request, caller: str) -> str:
        session = request.headers.get(_SESSION_HEADER, "")
        if not SAMPLE_ID.fullmatch(session):
            problem = f"{_SESSION_HEADER}: {session[:80]!r} names no session: POST /create_session gives a name"
            raise RefusedRequestError(400, "invalid_session", problem)
        return self._names.open_reward_session(token_of(caller), session)


_SESSION_HEADER = "x-session-id"


def _ended() -> RefusedRequestError:
    # 404 would say that groups cannot be scored here.
    return RefusedRequestError(410, "ended_session", "the session has ended, or never began: POST /create begins it")


class GroupEvents:
    """Answer with server-sent events: the id by which a request is resumed, then the scores. An ASGI response."""

    status_code = 200

    def __init__(self, exchange: Exchange, own_id: str) -> None:
        self._exchange = exchange
        self._id = own_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; leave the wait for its results in any case."""
        answers = asyncio.ensure_future(self._exchange.answers(receive))
        delivered = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await _send_event(send, "task_id", self._id)
            while not (await asyncio.wait([answers], timeout=_PING_S))[0]:
                await _send(send, ": ping\n\n")
            try:
                (group,) = answers.result()
                assert isinstance(group, GroupAnswer)
                content = encode(open_reward_answer([_result(each) for each in group.results])).decode()
            except (RefusedRequestError, ValueError) as error:
                await _send_event(send, "error", str(error))
            else:
                for start in range(0, len(content), _EVENT_CHARACTERS):
                    await _send_event(send, "chunk", content[start : start + _EVENT_CHARACTERS])
                await _send_event(send, "end", "")
            await send({"type": "http.response.body", "body": b""})
            delivered = True
        finally:
            answers.cancel()
            self._exchange.leave(delivered=delivered)


async def _send_event(send: Send, name: str, data: str) -> None:
    await _send(send, f"event: {name}\n" + "".join(f"data: {line}\n" for line in data.split("\n")) + "\n")


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _create_session(request: Request, caller: str) -> Response:
    content = f"event: task_id\ndata: {uuid.uuid4().hex}\n\nevent: end\ndata:\n\n"
    return Response(content, headers={name.decode(): value.decode() for name, value in _EVENT_HEADERS})


def _constant(content: Any) -> Handler:
    async def handle(request: Request, caller: str) -> Response:
        return JSONResponse(content)

    return handle


class _Endpoint:
    """Serve one route: authenticate, handle, answer; every error is an answer."""

    def __init__(self, handler: Handler, tokens: Tokens, callers: Callers, series: GatewaySeries) -> None:
        self._handler = handler
        self._tokens = tokens
        self._callers = callers
        self._series = series

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        request = Request(scope, receive)
        key = f"Bearer {request.headers.get('x-api-key', '')}"  # of clients of the Open Reward Standard
        caller = self._tokens.caller(request.headers.get("authorization") or key)
        refused: RefusedRequestError | None = None
        try:
            if caller is None:
                raise RefusedRequestError(401, "unauthorized", "give the service's token: Authorization: Bearer TOKEN")
            if (recognised := scope.get("state", {}).get(RECOGNISED)) is not None:
                recognised()
            caller = caller_name(caller, request.headers.get(CALLER_HEADER, ""), self._callers.names)
            answer = await self._handler(request, caller)
            await answer(scope, receive, send)
            status = answer.status_code
        except (DisconnectedError, ClientDisconnect):
            status = 499
        except RefusedRequestError as error:
            refused = error
        except OUTAGE as error:
            refused = RefusedRequestError(503, "unavailable", f"Redis is unavailable: {error}", retry_after_s=1)
        if refused is not None:
            status = refused.status
            await JSONResponse(refused.body(), status, refused.headers())(scope, receive, send)
        path = scope["route"].path if "route" in scope else ""
        self._series.requests.labels(token_of(caller or ""), path, status).inc()


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi.document())
