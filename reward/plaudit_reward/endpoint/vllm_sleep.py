"""Route ``POST /sleep`` and ``POST /wake_up`` in vLLM's API server: ``--middleware …vllm_sleep.SleepRoutes``.

vLLM has such routes itself, but only beside others that run any method of its workers (``VLLM_SERVER_DEV_MODE``), and
open to everybody who reaches the port. These need the token of the process that started the server, which only that
process knows. Imports stay light: this runs inside vLLM's server.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

SLEEP_TOKEN_VARIABLE = "PLAUDIT_MODEL_SERVER_SLEEP_TOKEN"  # noqa: S105  # the variable's name
"""Environment variable of a server: the token of ``/sleep`` and ``/wake_up``; unset or empty: it has no such routes."""


def is_permitted(headers: Mapping[str, str], token: str) -> bool:
    """Return True if a request carries ``token``; False for every request where there is none."""
    sent = headers.get("authorization", "").removeprefix("Bearer ")
    return bool(token) and hmac.compare_digest(sent.encode(), token.encode())


class _Engine(Protocol):
    """The part of vLLM's ``EngineClient`` that is used here (vLLM 0.32)."""

    async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> bool: ...


class SleepRoutes:
    """Add ASGI routes: ``/sleep`` finishes running requests, then keeps the weights in host memory (level 1)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._token = os.environ.get(SLEEP_TOKEN_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the two routes; pass everything else on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in {"/sleep", "/wake_up"}:
            await self._app(scope, receive, send)
            return
        response = await self._answer(scope["path"], Request(scope), scope["app"].state.engine_client)
        await response(scope, receive, send)

    async def _answer(self, path: str, request: Request, engine: _Engine) -> Response:
        if not is_permitted(request.headers, self._token):
            return Response(status_code=404)
        if path == "/sleep":
            await engine.sleep(level=1, mode="wait")
            return JSONResponse({"status": "sleeping"})
        awake = await engine.wake_up()
        return JSONResponse({"status": "awake" if awake else "sleeping"}, 200 if awake else 500)
