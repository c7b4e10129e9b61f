"""Serve OpenAI's Chat Completions and Models API on loopback, for the programs of a rollout's samples.

A request belongs to the sample whose key it carries; keys are random and end with their sample.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from plaudit_metrics.service.http_server import HttpServer, listening_socket
from plaudit_workers.rollout.agents.endpoint.request import RequestError, parse_request
from plaudit_workers.rollout.agents.endpoint.response import (
    completion_document,
    completion_events,
    error_document,
    model_document,
    models_document,
)
from plaudit_workers.rollout.agents.endpoint.session import Completion, EndpointSession

_KEEP_ALIVE_S = 75
_END_WITHIN_S = 2
_MOST_BYTES = 16 << 20


class EndpointServer:
    """Run the server as an asynchronous context manager."""

    def __init__(self) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._socket = listening_socket("127.0.0.1", 0)
        self._task: asyncio.Task[None] | None = None
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/{path:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_WITHIN_S,
        )
        self._server = HttpServer(config)

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

    @property
    def url(self) -> str:
        """Return the value of ``OPENAI_BASE_URL``."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    @contextmanager
    def serving(self, session: EndpointSession) -> Iterator[str]:
        """Serve a sample; the key is that of its program."""
        key = f"sk-plaudit-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            session.close()

    async def _complete(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _unauthorized()
        try:
            chat = parse_request(await _body(request), session.sampling)
            completion = await _unless_disconnected(request, session.complete(chat))
        except RequestError as error:
            return JSONResponse(error_document(str(error), "invalid_request_error", error.param, error.code), 400)
        if completion is None:
            return Response(status_code=499)
        if chat.stream:
            events = completion_events(completion, chat.model, include_usage=chat.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(completion_document(completion, chat.model))

    async def _models(self, request: Request) -> Response:
        return _unauthorized() if self._session(request) is None else JSONResponse(models_document())

    async def _model(self, request: Request) -> Response:
        if self._session(request) is None:
            return _unauthorized()
        return JSONResponse(model_document(request.path_params["name"]))

    async def _unknown(self, request: Request) -> Response:
        message = (
            f"{request.method} {request.url.path} is not served: a policy in training speaks Chat Completions "
            "(POST /v1/chat/completions) and Models. Configure the client to use Chat Completions"
        )
        return JSONResponse(error_document(message, "invalid_request_error", code="unknown_url"), 404)

    def _session(self, request: Request) -> EndpointSession | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise RequestError(f"the request has more than {_MOST_BYTES >> 20} MiB")
    return b"".join(parts)


async def _unless_disconnected(request: Request, work: Any) -> Completion | None:
    """Return the completion; None if the client closed its connection or the sample ended first."""
    completion: asyncio.Task[Completion] = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({completion, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not completion.done() or completion.cancelled():
            return None
        return completion.result()
    finally:
        completion.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _unauthorized() -> Response:
    message = "the key belongs to no running sample: use OPENAI_API_KEY of this program's environment"
    return JSONResponse(error_document(message, "authentication_error", code="invalid_api_key"), 401)
