"""Send one request over HTTP and return one whole response, or raise one typed error. Retries belong to the caller.

The message of an error begins with the server's address.

::

    InfrastructureError
    └── NoResponseError           no whole response
        ├── UnreachableError         no connection: DNS, refused, TLS, a proxy; the server never saw the request
        ├── ConnectionLostError      the connection ended, or carried something other than HTTP
        └── ResponseTooLargeError    the body passed the limit

    CallTimeoutError              no whole response within the time limit
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict, MultiMapping
from yarl import URL

from plaudit_wire.errors import CallTimeoutError, ConfigurationError, InfrastructureError, RefusedError

Token = str | Callable[[], str]
"""A bearer token, or how to read it: again whenever a server refuses it, since a Secret may have another by then."""


class NoResponseError(InfrastructureError):
    """No whole response arrived."""


class UnreachableError(NoResponseError):
    """No connection could be opened."""


class ConnectionLostError(NoResponseError):
    """An open connection ended before the whole response, or the response was not HTTP."""


class ResponseTooLargeError(NoResponseError):
    """The response's body is larger than the caller accepts."""


_TOKEN_REFUSED = frozenset({401, 403})
_SPARE = 256
"""For everything else that this process opens: logs, Redis, child processes and their pipes."""


def allow_connections(count: int) -> None:
    """Raise the process's soft limit of open files for ``count`` connections, each of which needs one.

    Raises ``ConfigurationError`` if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")) + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigurationError(
            f"{count} connections need {needed} open files, and this process may open {hard}. Raise the hard limit "
            "(ulimit -Hn, LimitNOFILE, the container's ulimits) or lower reward.workers.maxConcurrentSamples"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


_LONGEST_RETRY_AFTER_S = 3600.0
_MAX_EXCERPT_CHARACTERS = 300
_REDACTED = "***"


@dataclass(frozen=True)
class Response:
    """Hold a status, its headers and the whole body."""

    status: int
    headers: MultiMapping[str]
    """Names in any case."""
    body: bytes
    token: str = field(default="", repr=False)
    """With which it was asked for; a later request may bring another."""


def error_message(body: bytes, secret: str = "") -> str:
    """Return the server's own explanation of an error, short and on one line, with ``***`` in place of ``secret``.

    Looks for OpenAI's and vLLM's ``error.message`` and FastAPI's ``detail``; falls back to the body's text.
    """
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return excerpt(body, secret)
    if isinstance(content, dict):
        error = content.get("error", content)
        for holder in (error, content):
            for name in ("message", "detail"):
                if isinstance(holder, dict) and isinstance(holder.get(name), str):
                    return one_line(holder[name], secret)
        if isinstance(error, str):
            return one_line(error, secret)
    return excerpt(body, secret)


def excerpt(body: bytes, secret: str = "") -> str:
    """Return the beginning of a body as one line, without ``secret``."""
    return one_line(body.decode(errors="replace"), secret)


def one_line(text: str, secret: str = "") -> str:
    """Return the beginning of a text as one line, without ``secret``."""
    if secret:
        text = text.replace(secret, _REDACTED)
    return " ".join(text.split())[:_MAX_EXCERPT_CHARACTERS]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, at most an hour; None without a finite value.

    Reads seconds and dates. A date is compared with the response's own ``Date``, so that a wrong clock on either side
    does no harm. Names of ``headers`` are in lower case, or the mapping ignores case.
    """
    text = headers.get("retry-after", "").strip()
    try:
        return _bounded(float(text))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    try:
        now = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        now = time.time()
    return _bounded(until - now)


def _bounded(seconds: float) -> float | None:
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else None


MAX_RESPONSE_BYTES = 4 << 20
_CONNECT_WITHIN_S = 10.0
_KEEP_IDLE_S = 2.0
"""Below the 5 s after which uvicorn (vLLM's server) closes an idle connection: a request must not meet its end."""


class HttpClient:
    """Send requests over a pool of kept-alive connections.

    Verifies TLS certificates against the system's store (or ``SSL_CERT_FILE``, ``SSL_CERT_DIR``), follows no
    redirects, keeps no cookies and asks for uncompressed bodies, so that a response cannot grow after its size was
    checked.

    Args:
        max_connections: requests at a time; the rest wait, within their time limit.
        bearer_token: sent with every request; empty: none. No error repeats it.
        key_field: field or variable that holds the token, for errors.
        proxy: URL of the proxy to use; None: connect directly.

    Raises ``ConfigurationError`` if a header cannot carry the token, or the process may not open so many connections.
    """

    def __init__(
        self, *, max_connections: int, bearer_token: Token = "", key_field: str = "the token", proxy: str | None = None
    ) -> None:
        allow_connections(max_connections)
        self._max_connections = max_connections
        self._read_token = bearer_token if callable(bearer_token) else None
        self._key_field = key_field
        self.token = bearer_token() if callable(bearer_token) else bearer_token
        """As the next request brings it."""
        self._check(self.token)
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "plaudit"}

    async def post(
        self,
        url: str,
        body: bytes,
        limit_s: float,
        *,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> Response:
        """Send JSON and return the response, whatever its status; call ``on_sent`` once a connection has the body.

        Raises ``NoResponseError`` without a whole response of at most ``max_bytes``, ``CallTimeoutError`` if it has not
        arrived within ``limit_s``, the opening of a connection included.
        """
        data = body if on_sent is None else _NotifyingPayload(body, on_sent)
        return await self._send("POST", url, limit_s, max_bytes, data, headers)

    async def get(self, url: str, limit_s: float) -> Response:
        """Return the response of a ``GET``. Raises as ``post`` does."""
        return await self._send("GET", url, limit_s, MAX_RESPONSE_BYTES, None, None)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(
        self, method: str, url: str, limit_s: float, max_bytes: int, data: Any, headers: Mapping[str, str] | None
    ) -> Response:
        token = self.token
        if token:
            headers = {"Authorization": f"Bearer {token}", **(headers or {})}
        try:
            async with asyncio.timeout(limit_s):
                session = self._session or self._open()
                async with session.request(
                    method, url, data=data, headers=headers, allow_redirects=False, proxy=self._proxy
                ) as response:
                    if response.status in _TOKEN_REFUSED:
                        self._renew_token()
                    return Response(response.status, response.headers, await bounded_body(response, max_bytes), token)
        except aiohttp.ConnectionTimeoutError:
            raise UnreachableError(f"{_address(url)}: no connection within {_CONNECT_WITHIN_S:g} s") from None
        except TimeoutError:
            raise CallTimeoutError(f"{_address(url)}: no response within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Without the cause: aiohttp's errors hold the request's headers, and so the token.
            kind = UnreachableError if isinstance(error, _UNREACHABLE) else ConnectionLostError
            raise kind(f"{_address(url)}: {one_line(_reason(error), token)}") from None

    def _check(self, token: str) -> None:
        for place, character in enumerate(token, 1):
            if not "!" <= character <= "~":
                raise ConfigurationError(
                    f"{self._key_field}: character {place} of {len(token)} is no visible ASCII character, and an HTTP "
                    "header cannot carry it. Store the key without spaces, line ends and quotes"
                )

    def _renew_token(self) -> None:
        """Take the token that its place holds by now for the requests that follow, if it can be read."""
        if self._read_token is None:
            return
        with contextlib.suppress(RefusedError, ConfigurationError, OSError, ValueError):
            token = self._read_token()
            self._check(token)
            self.token = token

    def _open(self) -> aiohttp.ClientSession:
        """Create the session inside the event loop that will use it."""
        # A context of its own: aiohttp's is made at import, before a process may have set SSL_CERT_FILE.
        connector = _Connector(
            limit=self._max_connections, keepalive_timeout=_KEEP_IDLE_S, ssl=ssl.create_default_context()
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=CIMultiDict(self._headers),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self._session


class _Connector(aiohttp.TCPConnector):
    """Keep connections, and use none again on which the server has said something that nobody asked for.

    It would be read as the answer to the next request, and every later answer would belong to another sample.
    """

    async def connect(self, *arguments: Any, **named: Any) -> aiohttp.connector.Connection:
        """Return a connection, a new one or one that was silent since its last response."""
        while True:
            connection = await super().connect(*arguments, **named)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


class _NotifyingPayload(aiohttp.BytesPayload):
    """Report when the bytes have been handed to the connection."""

    def __init__(self, value: bytes, on_sent: Callable[[], None]) -> None:
        super().__init__(value)
        self._on_sent = on_sent

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await super().write_with_length(writer, content_length)
        self._on_sent()


async def bounded_body(response: aiohttp.ClientResponse, max_bytes: int = MAX_RESPONSE_BYTES) -> bytes:
    """Return the whole body of a response; see ``bounded_parts``."""
    return b"".join([part async for part in bounded_parts(response, max_bytes)])


async def bounded_parts(response: aiohttp.ClientResponse, max_bytes: int = MAX_RESPONSE_BYTES) -> AsyncIterator[bytes]:
    """Yield the body of a response as it arrives.

    Raises ``ResponseTooLargeError`` beyond ``max_bytes``, ``ConnectionLostError`` for a compressed one, which could
    grow after its size was checked.
    """
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ConnectionLostError(f"{_address(str(response.url))}: the response is compressed ({one_line(encoding)})")
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > max_bytes:
            raise ResponseTooLargeError(f"{_address(str(response.url))}: the response is longer than {max_bytes} bytes")
        yield part


_UNREACHABLE = (
    aiohttp.ClientConnectorError,
    aiohttp.ClientHttpProxyError,
    aiohttp.InvalidURL,
    aiohttp.NonHttpUrlClientError,
)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the TLS certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name cannot be resolved: {_system_reason(error.os_error)}"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return f"the proxy cannot be reached: {_system_reason(error.os_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {_system_reason(error.os_error)}"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy refused with {error.status}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return "the connection ended before the whole response"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"the response is not HTTP: {error.message}"
    if isinstance(error, aiohttp.ClientOSError):
        return f"the connection broke: {_system_reason(error)}"
    return f"{type(error).__name__}: {error}"


def _system_reason(error: OSError) -> str:
    """Return the operating system's own message; asyncio adds address and call to it."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _address(url: str) -> str:
    """Return scheme, host and port of a URL: what an error may show of it."""
    try:
        return str(URL(url).origin())
    except ValueError:
        return "the server's address is not a URL"


def proxy_for(url: str) -> str | None:
    """Return the proxy's URL, or None, by ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``."""
    parts = urlsplit(url)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
