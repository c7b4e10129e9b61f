"""Connections that an HTTP server accepts, and requests on them: for another protocol, or with endless headers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plaudit_metrics.service import http_server
from plaudit_metrics.service.http_server import HttpServer, listening_socket

JAVA = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
SIZED = b"Host: x\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
PLAIN = b"POST / HTTP/1.1\r\n" + SIZED


def test_accepted_connections_send_small_packets_at_once() -> None:
    with listening_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """Where a server listens that answers with the request's body."""

    async def echo(request: Request) -> Response:
        return Response(b"%s:%s;" % (request.method.encode(), await request.body()))

    routes = [Route("/", echo, methods=["GET", "POST"])]
    server = HttpServer(Starlette(routes=routes), end_within_s=5, keep_alive_s=5)
    listener = listening_socket("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    yield listener.getsockname()[:2]
    server.should_exit = True
    await serving
    listener.close()


async def answers(address: tuple[str, int], *packets: bytes) -> bytes:
    """Return all that a server answers to packets that arrive one by one, until it closes."""
    reader, writer = await asyncio.open_connection(*address)
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0)
    answered = await reader.read()
    writer.close()
    return answered


@pytest.mark.parametrize("ask", [JAVA, b"Connection: upgrade\r\nUpgrade: websocket\r\n"])
@pytest.mark.parametrize("rest", [SIZED, CHUNKED])
@pytest.mark.parametrize("size", [1, 40, 1000])
async def test_a_request_that_asks_for_another_protocol_is_read_without_the_wish(
    address: tuple[str, int], ask: bytes, rest: bytes, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST / HTTP/1.1\r\n"
    last = b"POST / HTTP/1.1\r\nConnection: close\r\n" + SIZED
    sent = head + ask + rest + PLAIN + head + ask + rest + last
    packets = [sent[place : place + size] for place in range(0, len(sent), size)]
    answered = await answers(address, *packets)
    assert (answered.count(b"200 OK"), answered.count(b"POST:abc;")) == (4, 4)
    assert not caplog.records


async def test_many_wishes_in_one_packet_are_answered_and_what_is_no_request_is_refused(
    address: tuple[str, int],
) -> None:
    wish = b"GET / HTTP/1.1\r\nHost: x\r\n" + JAVA + b"\r\n"
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await answers(address, 500 * wish + last)).count(b"GET:;") == 501
    for wrong in (
        b"POST / HTTP/1.1\r\n" + JAVA + b"Host: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nab",
        b"POST / HTTP/1.1\r\n" + JAVA + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"CONNECT x:80 HTTP/1.1\r\n" + JAVA + b"Host: x\r\n\r\n",
        wish + b"\x00\x01\x02",
    ):
        assert b"HTTP/1.1 400" in await answers(address, wrong)


@pytest.mark.parametrize("before", [b"", b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"])
@pytest.mark.parametrize("header", [b"a: " + 10_000 * b"b" + b"\r\n", 10_000 * b"b"])
async def test_headers_and_trailers_without_an_end_close_their_connection(
    address: tuple[str, int], before: bytes, header: bytes
) -> None:
    with pytest.raises(ConnectionError):
        await answers(address, b"POST / HTTP/1.1\r\n" + before, *3000 * [header])
    body = b"Host: x\r\nContent-Length: 1000000\r\n\r\n" + 1_000_000 * b"a"
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert (await answers(address, b"POST / HTTP/1.1\r\n" + body + PLAIN, last)).count(b"200 OK") == 3


@pytest.mark.parametrize("before", [b"", PLAIN])
@pytest.mark.parametrize("head", [b"", b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nLong: a"])
async def test_headers_that_do_not_come_in_time_close_their_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, before: bytes, head: bytes
) -> None:
    monkeypatch.setattr(http_server, "_HEAD_WITHIN_S", 0.1)
    answered = await asyncio.wait_for(answers(address, before, head), 30)
    assert answered.count(b"200 OK") == (before == PLAIN)


async def test_a_slow_body_and_an_idle_connection_are_no_late_headers(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HEAD_WITHIN_S", 0.1)
    reader, writer = await asyncio.open_connection(*address)
    for part in (PLAIN[:-2], PLAIN[-2:], PLAIN):
        writer.write(part)
        await asyncio.sleep(0.3)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 30)).count(b"200 OK") == 3
    writer.close()
