"""Exceptions of user functions: a broken service is told from a broken sample by their type."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import socket
import ssl
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message

import aiohttp
import httpx
import pytest
import redis
import requests
import urllib3

from plaudit_reward.functions.function import failed_score, is_infrastructure
from plaudit_wire.errors import InfrastructureError


class _StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status_code = status


def _like(module: str, name: str) -> Exception:
    """An exception of a library that need not be installed."""
    kind = type(name, (Exception,), {"__module__": module})
    derived = type("Derived", (kind,), {"__module__": "users_own"})
    return derived("away")  # type: ignore[no-any-return]


SERVICE = [
    ConnectionRefusedError("refused"),
    TimeoutError(),
    MemoryError(),
    InfrastructureError("away"),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    redis.ConnectionError("gone"),
    _StatusError(500),
    _StatusError(503),
    _StatusError(429),
    urllib.error.URLError(ConnectionRefusedError("refused")),
    socket.gaierror(-3, "no such name"),
    ssl.SSLEOFError(8, "ended"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    redis.TimeoutError("slow"),
    asyncio.IncompleteReadError(b"", 4),
    ExceptionGroup("tasks", [ConnectionResetError("reset"), ExceptionGroup("inner", [TimeoutError()])]),
    _like("websockets.exceptions", "ConnectionClosed"),
    _like("requests.exceptions", "ConnectionError"),
    _like("requests.exceptions", "Timeout"),
    _like("openai", "APIConnectionError"),
    _like("openai._exceptions", "RateLimitError"),
    _like("aiohttp.client_exceptions", "ClientConnectionError"),
]


class _SecretiveError(Exception):
    """Has nothing to read: not even its class."""

    def __getattribute__(self, name: str) -> object:
        raise SystemExit(name)


class _FragileError(Exception):
    """As some clients' errors: a property raises where there was no answer."""

    @property
    def response(self) -> object:
        raise RuntimeError("there is no response")


_Uncomparable = type("_Uncomparable", (int,), {"__ge__": None})
_OddError = type("_OddError", (Exception,), {"status_code": _Uncomparable(500)})
SAMPLE = [
    urllib.error.HTTPError("http://x", 404, "none", Message(), None),
    ValueError("x"),
    KeyError("k"),
    _StatusError(400),
    _StatusError(404),
    RecursionError(),
    SystemExit(1),
    OSError(errno.ENOENT, "no such file"),
    http.client.InvalidURL("a space"),
    ExceptionGroup("tasks", [ConnectionResetError("reset"), ValueError("x")]),
]


@pytest.mark.parametrize("error", SERVICE, ids=lambda error: type(error).__mro__[1].__name__ + str(error))
def test_failures_of_a_service_may_be_tried_again(error: BaseException) -> None:
    assert is_infrastructure(error)
    assert failed_score(error, "r.py").outcome == "infra_error"


@pytest.mark.parametrize("error", SAMPLE, ids=repr)
def test_failures_of_a_sample_are_final(error: BaseException) -> None:
    assert not is_infrastructure(error)
    assert failed_score(error, "r.py").outcome == "data_error"


@pytest.mark.parametrize("kind", [_SecretiveError, _FragileError, _OddError])
def test_an_error_whose_own_code_fails_is_its_samples(kind: type[Exception]) -> None:
    score = failed_score(kind(), "r.py")
    assert (score.outcome, (score.reason or "").partition(":")[0]) == ("data_error", kind.__name__)


def test_the_reason_names_the_line_of_the_users_file() -> None:
    try:
        raise ValueError("odd answer")
    except ValueError as error:
        score = failed_score(error, __file__)
    assert (score.reason or "").startswith("ValueError: odd answer (")
    assert "in test_the_reason_names_the_line_of_the_users_file" in (score.reason or "")


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
_ENDS = {
    "before a byte": b"",
    "in the status": b"HTT",
    "in the body": _HEAD + b"Content-Length: 9\r\n\r\n12",
    "before the body": _HEAD + b"Content-Length: 3\r\n\r\n",
    "in a chunk": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n12",
    "between chunks": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n12\r\n",
}


def _of_urllib(url: str) -> object:
    with urllib.request.urlopen(url) as response:
        return response.read()


def _of_http_client(url: str) -> object:
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.request("GET", "/")
        return connection.getresponse().read()


def _of_aiohttp(url: str) -> object:
    async def read() -> bytes:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.read()

    return asyncio.run(read())


def _of_urllib3(url: str) -> object:
    with urllib3.PoolManager() as pool:
        return pool.request("GET", url, retries=False).data


def _of_requests(url: str) -> object:
    with requests.Session() as session:
        return session.get(url).content


@pytest.fixture
def ending() -> Iterator[Callable[[bytes, bool], str]]:
    """Return the address of a server that sends these bytes and then closes the connection, or resets it."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def start(sent: bytes, resets: bool) -> str:
        listening = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(sent)
                        if resets:
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        servers.append((listening, threading.Thread(target=serve)))
        servers[-1][1].start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for listening, thread in servers:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.mark.alike
@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("sent", _ENDS.values(), ids=_ENDS)
@pytest.mark.parametrize("ask", [_of_urllib, _of_http_client, _of_requests, _of_urllib3, _of_aiohttp, httpx.get])
def test_an_answer_that_ends_early_is_its_services_failure(
    ending: Callable[[bytes, bool], str], ask: Callable[[str], object], sent: bytes, resets: bool
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of six libraries
        ask(ending(sent, resets))
    assert is_infrastructure(raised.value), repr(raised.value)
