"""Decide which requests the server reads: who may send them, how large they are, how slowly they may come."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from starlette.requests import Request

from plaudit_reward.served.addresses import TOKEN_VARIABLE


@dataclass(frozen=True)
class Access:
    """Bounds on requests."""

    token: str = ""
    """Bearer token that a request must carry; empty: none. ``/health`` and ``/metrics`` never need it."""
    max_body_bytes: int = 4 << 20
    """Bytes of a request's body."""
    sleep_token: str = ""
    """Bearer token of ``/sleep`` and ``/wake_up``; empty: there are no such routes."""
    body_within_s: float = 30.0
    """Seconds within which a whole body must arrive."""


class AccessError(Exception):
    """The request is refused before it is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_token(request: Request, access: Access) -> None:
    """Raise ``AccessError`` (401) unless the request carries the token."""
    if not access.token:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), access.token.encode()):
        raise AccessError(401, f"the bearer token is missing or wrong: send the one of {TOKEN_VARIABLE}")


async def read_body(request: Request, access: Access) -> bytes:
    """Return the request's body.

    Raises:
        AccessError: it is longer than allowed (413), or does not arrive in time (408).
        ClientDisconnect: the client is gone.
    """
    too_long = AccessError(413, f"the body is longer than {access.max_body_bytes} bytes (--max-body-bytes): send less")
    if int(request.headers.get("content-length", 0)) > access.max_body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(access.body_within_s):
            async for part in request.stream():
                body += part
                if len(body) > access.max_body_bytes:
                    raise too_long
    except TimeoutError:
        raise AccessError(408, f"the body did not arrive within {access.body_within_s:g} s") from None
    return bytes(body)
