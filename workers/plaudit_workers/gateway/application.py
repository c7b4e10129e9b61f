"""The routes of a gateway.

| | |
| --- | --- |
| ``POST /v1/score`` | one sample, or ``{"samples": […]}``; answers when scored |
| ``POST /v1/groups`` | ``{"samples": […], "id"}``, or ``{"groups": […]}``; scored together |
| ``GET /v1/scores/{id}`` | the result under an id, now or within ``?wait=`` seconds |
| ``GET /v1/service`` | scorers, version, limits, health |
| ``POST /slime``, ``/openrlhf``, ``/verify`` | the shapes of slime, OpenRLHF and NeMo Gym |
| ``GET /openapi.json``, ``/metrics`` | |

A caller that accepts ``application/x-ndjson`` gets a line for each sample or group as it is scored, in any order, and
an empty line every 15 s without one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plaudit_reward.remote.shapes.plaudit import CALLER_HEADER
from plaudit_wire.outage import OUTAGE
from plaudit_workers.gateway import bodies, openapi
from plaudit_workers.gateway.bodies import RequestBody, SubmittedSamples
from plaudit_workers.gateway.callers.caller_name import caller_name, token_of
from plaudit_workers.gateway.callers.callers import Callers
from plaudit_workers.gateway.callers.rate import SampleRate
from plaudit_workers.gateway.callers.results import GatewayAnswer, SampleAnswer, encode, stored_answer
from plaudit_workers.gateway.callers.tokens import Tokens
from plaudit_workers.gateway.callers.waiting import DisconnectedError
from plaudit_workers.gateway.canary.canary import Canary
from plaudit_workers.gateway.description import ServiceDescription
from plaudit_workers.gateway.exchange import Exchange
from plaudit_workers.gateway.refusal import RefusedRequestError
from plaudit_workers.gateway.series import GatewaySeries
from plaudit_workers.gateway.shapes import nemo_gym, openrlhf, slime
from plaudit_workers.scoring.offline.lines import SampleInput

MOST_BYTES = 64 << 20
"""Bytes of a request's body."""
LONGEST_WAIT_S = 3600.0
"""Seconds that a request waits for its results."""

_BODY_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.2
_NDJSON = "application/x-ndjson"

Handler = Callable[[Request, str], Awaitable[Response | Exchange]]


class GatewayShape(Protocol):
    """Convert the request and answer of another system's reward server; a module of ``shapes``."""

    def samples(self, body: dict[str, Any]) -> list[SampleInput]:
        """Return the samples of a request. Raise ``ValueError``."""

    def answer(self, body: dict[str, Any], results: Sequence[SampleAnswer]) -> Any:
        """Return the answer. Raise ``ValueError`` where the shape cannot express a missing score."""


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

    async def close(self) -> None:
        """Close the connections to the canary."""
        if self._canary is not None:
            await self._canary.close()

    def asgi(self) -> Starlette:
        """Return the application."""
        shapes: dict[str, Any] = {"/slime": slime, "/openrlhf": openrlhf, "/verify": nemo_gym}
        return Starlette(
            routes=[
                Route("/v1/score", self._endpoint(self._score), methods=["POST"]),
                Route("/v1/groups", self._endpoint(self._groups), methods=["POST"]),
                Route("/v1/scores/{id}", self._endpoint(self._stored), methods=["GET"]),
                Route("/v1/service", self._endpoint(self._service), methods=["GET"]),
                *(Route(path, self._endpoint(self._shaped(shape)), methods=["POST"]) for path, shape in shapes.items()),
                Route("/openapi.json", _openapi, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ]
        )

    def _endpoint(self, handler: Handler) -> _Endpoint:
        return _Endpoint(handler, self._tokens, self._callers, self._series)

    async def _score(self, request: Request, caller: str) -> Exchange:
        return self._exchange(request, caller, bodies.read_samples(await _body(request)))

    async def _groups(self, request: Request, caller: str) -> Exchange:
        body = bodies.read_groups(await _body(request))
        return self._exchange(request, caller, body, field="groups")

    def _exchange(self, request: Request, caller: str, body: RequestBody, field: str = "results") -> Exchange:
        session = self._callers.session(caller)
        wait_s = self._rate.take(token_of(caller), sum(len(group.samples) for group in body.groups))
        if wait_s > 0:
            message = "this token has submitted more samples than reward.gateway.samplesPerMinute allows"
            raise RefusedRequestError(429, "rate", message, retry_after_s=math.ceil(wait_s))
        if session.is_full:
            raise RefusedRequestError(429, "busy", "too many samples of this token wait already", retry_after_s=1)
        return Exchange(
            session,
            body,
            field=field,
            streams=_NDJSON in request.headers.get("accept", ""),
            timeout_s=_seconds(request, "timeout", LONGEST_WAIT_S),
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
            body = bodies.read_object(await _body(request))
            try:
                samples = shape.samples(body)
            except ValueError as error:
                raise RefusedRequestError(422, "invalid_sample", str(error)) from error
            submitted = [SubmittedSamples(bodies.new_id(), [sample]) for sample in samples]
            exchange = self._exchange(request, caller, RequestBody(submitted, is_batch=True))
            results = [each for each in await exchange.answers(request.receive) if isinstance(each, SampleAnswer)]
            exchange.leave(delivered=True)
            try:
                answer = shape.answer(body, results)
            except ValueError as error:
                raise RefusedRequestError(502, "no_score", str(error)) from error
            return Response(encode(answer), media_type="application/json")

        return handle

    async def _stored(self, request: Request, caller: str) -> Response:
        own_id, session = request.path_params["id"], self._callers.session(caller)
        until = time.monotonic() + _seconds(request, "wait", LONGEST_WAIT_S, default=0.0)
        while True:
            is_known, result = await session.find(own_id)
            if result is not None:
                is_group = len(result.samples) > 1
                return Response(encode(stored_answer(own_id, result, is_group=is_group)), media_type="application/json")
            if not is_known:
                raise RefusedRequestError(404, "unknown_id", f"id {own_id!r} is not, or no longer, known: submit it")
            if time.monotonic() >= until:
                return JSONResponse({"id": own_id, "state": "in_work"}, 202, headers={"retry-after": "1"})
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _service(self, request: Request, caller: str) -> Response:
        return JSONResponse(await self._description.read(self._callers.transport, self._callers.num_awaited))

    def metrics(self) -> bytes:
        """Return all series in Prometheus's text format."""
        self._series.awaited.set(self._callers.num_awaited)
        return self._series.text()

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics(), media_type="text/plain; version=0.0.4")


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
        caller = self._tokens.caller(request.headers.get("authorization", ""))
        status = 200
        try:
            if caller is None:
                raise RefusedRequestError(401, "unauthorized", "give the service's token: Authorization: Bearer TOKEN")
            caller = self._named(caller, request)
            answer = await self._handler(request, caller)
            await answer(scope, receive, send)
            status = answer.status_code
        except (DisconnectedError, ClientDisconnect):
            status = 499
        except RefusedRequestError as error:
            status = error.status
            await JSONResponse(error.body(), status, error.headers())(scope, receive, send)
        except OUTAGE as error:
            status = 503
            refused = RefusedRequestError(503, "unavailable", f"Redis is unavailable: {error}", retry_after_s=1)
            await JSONResponse(refused.body(), status, refused.headers())(scope, receive, send)
        self._series.requests.labels(
            token_of(caller or ""), scope["route"].path if "route" in scope else "", status
        ).inc()

    def _named(self, caller: str, request: Request) -> str:
        try:
            return caller_name(caller, request.headers.get(CALLER_HEADER, ""), self._callers.names)
        except ValueError as error:
            raise RefusedRequestError(422, "invalid_caller", str(error)) from error


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi.document())


async def _body(request: Request) -> bytes:
    """Return the body. Raise ``RefusedRequestError`` if it is compressed, too large or too slow."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RefusedRequestError(415, "compressed", "content-encoding: send the body uncompressed")
    too_large = RefusedRequestError(413, "too_large", f"the body has more than {MOST_BYTES >> 20} MiB: split it")
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise RefusedRequestError(408, "slow_body", f"the body took more than {_BODY_WITHIN_S:.0f} s") from error
    return b"".join(parts)


def _seconds(request: Request, name: str, longest: float, default: float | None = None) -> float:
    written = request.query_params.get(name)
    if written is None:
        return longest if default is None else default
    try:
        seconds = float(written)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= longest:
        raise RefusedRequestError(422, "invalid_query", f"{name}={written!r}: give seconds from 0 to {longest:.0f}")
    return seconds
