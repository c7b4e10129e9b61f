"""The HTTP client against servers that redirect, cut, compress, flood, repeat secrets or are not there."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_reward.http import (
    ConnectionLostError,
    HttpClient,
    ResponseTooLargeError,
    UnreachableError,
    error_message,
    proxy_for,
)
from plaudit_wire.errors import CallTimeoutError, ConfigurationError, InfrastructureError

KEY = "sk-hush-hush"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
Client = Callable[..., HttpClient]


class RawServer:
    """Sends the same bytes for each request; keeps what came in."""

    def __init__(self) -> None:
        self.reply = OK
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self.newest: asyncio.StreamWriter

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.newest = writer
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                self.requests.append(head + await reader.readexactly(int(length[0]) if length else 0))
                writer.write(self.reply)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    server = RawServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()


@pytest.fixture
async def make_client() -> AsyncIterator[Client]:
    made: list[HttpClient] = []

    def make(**options: Any) -> HttpClient:
        made.append(HttpClient(**{"max_connections": 8, **options}))
        return made[-1]

    yield make
    for client in made:
        await client.close()


async def test_connections_are_kept_and_headers_are_sent(server: RawServer, make_client: Client) -> None:
    client = make_client(bearer_token=KEY)
    for _ in range(3):
        response = await client.post(f"{server.url}/v1", b"[]", 5.0, headers={"traceparent": "00-1-2-01"})
        assert (response.status, response.body) == (200, b"{}")
    assert server.connections == 1
    head = server.requests[0].lower()
    assert head.startswith(b"post /v1 http/1.1\r\n")
    assert head.endswith(b"\r\n\r\n[]")
    for line in (b"traceparent: 00-1-2-01", b"authorization: bearer " + KEY.encode(), b"accept-encoding: identity"):
        assert line + b"\r\n" in head


async def test_what_a_server_says_unasked_is_the_answer_to_no_request(server: RawServer, make_client: Client) -> None:
    client = make_client()
    for number in range(1, 4):
        assert (await client.post(server.url, b"[]", 5.0)).body == b"{}"
        assert server.connections == number
        server.newest.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n666")
        await asyncio.sleep(0.01)  # both ends are in this loop


async def test_a_redirect_is_returned_and_not_followed(server: RawServer, make_client: Client) -> None:
    server.reply = b"HTTP/1.1 307 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"
    response = await make_client(bearer_token=KEY).post(server.url, b"[]", 5.0)
    assert (response.status, len(server.requests)) == (307, 1)


@pytest.mark.parametrize("framing", [b"content-length: 50000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\nc350\r\n"])
async def test_a_body_is_read_up_to_its_limit(server: RawServer, make_client: Client, framing: bytes) -> None:
    server.reply = (
        b"HTTP/1.1 200 X\r\n" + framing + b"x" * 50_000 + (b"\r\n0\r\n\r\n" if b"chunked" in framing else b"")
    )
    client = make_client()
    assert len((await client.post(server.url, b"[]", 5.0, max_bytes=50_000)).body) == 50_000
    with pytest.raises(ResponseTooLargeError, match=r"http://127.*: the response is longer than 49999 bytes"):
        await client.post(server.url, b"[]", 5.0, max_bytes=49_999)


async def test_a_compressed_body_is_refused_before_it_grows(server: RawServer, make_client: Client) -> None:
    bomb = gzip.compress(bytes(10 << 20))
    server.reply = b"HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb
    with pytest.raises(ConnectionLostError, match=r"compressed \(gzip\)"):
        await make_client().post(server.url, b"[]", 5.0)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "no response within 0.2 s"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "no response within 0.2 s"),
        (f"NONSENSE {KEY}\r\n\r\n".encode(), "not HTTP"),
        (f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode(), "not HTTP"),
    ],
)
async def test_errors_name_address_and_reason_and_never_the_key(
    server: RawServer, make_client: Client, reply: bytes, words: str
) -> None:
    server.reply = reply
    with pytest.raises((InfrastructureError, CallTimeoutError), match=words) as failure:
        await make_client(bearer_token=KEY).post(f"{server.url}/v1", b"[]", 0.2 if "0.2 s" in words else 20.0)
    assert str(failure.value).startswith(f"{server.url}: ")
    shown: list[str] = []
    error: BaseException | None = failure.value
    while error is not None:  # a log prints causes, not suppressed contexts
        shown += [str(error), repr(error)]
        error = error.__cause__
    assert KEY not in "".join(shown)
    assert failure.value.__suppress_context__


@pytest.mark.parametrize("key", [f"{KEY}\nx", f"{KEY} ", "schlüssel", "sk-\x00", "“sk”"])
def test_a_key_that_no_header_can_carry_is_refused_at_the_start_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigurationError, match=r"judge.apiKeySecret: character \d+ of \d+") as refusal:
        HttpClient(max_connections=1, bearer_token=key, key_field="judge.apiKeySecret")
    assert key not in str(refusal.value)
    assert KEY not in str(refusal.value)


async def test_a_token_that_was_replaced_is_read_again_once_the_server_refuses_it(
    server: RawServer, make_client: Client, tmp_path: Path
) -> None:
    place = tmp_path / "key"
    place.write_text("former")
    client = make_client(bearer_token=place.read_text)
    place.write_text("next")
    await client.post(server.url, b"[]", 5.0)
    refusal = b"the key former is revoked"
    server.reply = b"HTTP/1.1 401 X\r\ncontent-length: %d\r\n\r\n" % len(refusal) + refusal
    refused = await client.post(server.url, b"[]", 5.0)
    assert error_message(refused.body, refused.token) == "the key *** is revoked"
    for unusable in ("schlüssel", None):
        await client.post(server.url, b"[]", 5.0)
        if unusable is None:
            place.unlink()
        else:
            place.write_text(unusable)
    await client.post(server.url, b"[]", 5.0)
    sent = [line for request in server.requests for line in request.split(b"\r\n") if b"Authorization" in line]
    assert [line.rpartition(b" ")[2] for line in sent] == [b"former", b"former", b"next", b"next", b"next"]


async def test_addresses_without_a_server_are_unreachable(make_client: Client) -> None:
    client = make_client()
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:1: cannot connect: Connection refused"):
        await client.post("http://127.0.0.1:1/v1", b"[]", 5.0)
    with pytest.raises(UnreachableError, match=r"http://no-such-name\.invalid: the name cannot be resolved"):
        await client.post("http://no-such-name.invalid/v1", b"[]", 5.0)


async def test_a_certificate_is_verified_against_the_store_that_the_environment_names(
    make_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    await asyncio.to_thread(
        subprocess.run, [*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server = RawServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{listening.sockets[0].getsockname()[1]}"
    with pytest.raises(UnreachableError, match=r"https://localhost:\d+: the TLS certificate is not trusted: .*self"):
        await make_client().post(url, b"[]", 5.0)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert (await make_client().post(url, b"[]", 5.0)).status == 200
    listening.close()


async def test_the_environments_proxy_is_used_where_no_proxy_does_not_except_the_host(
    server: RawServer, make_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", ".internal")
    assert proxy_for("http://judge.internal/v1") is None
    assert proxy_for("https://judge.example/v1") is None
    client = make_client(proxy=proxy_for("http://judge.example/v1"))
    assert (await client.post("http://judge.example/v1", b"[]", 5.0)).status == 200
    assert server.requests[0].startswith(b"POST http://judge.example/v1 HTTP/1.1\r\n")


async def test_a_request_reports_when_it_was_sent(server: RawServer, make_client: Client) -> None:
    sent: list[int] = []
    await make_client().post(server.url, b"[]", 5.0, on_sent=lambda: sent.append(len(server.requests)))
    assert sent == [0]


LIMITS = """
import resource
from plaudit_reward.http import HttpClient
resource.setrlimit(resource.RLIMIT_NOFILE, (64, HARD))
HttpClient(max_connections=2048)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("hard", "words"), [("4096", "4096"), ("1024", "this process may open 1024. Raise the hard")])
def test_the_limit_of_open_files_is_raised_or_the_reason_is_given(hard: str, words: str) -> None:
    run = subprocess.run([sys.executable, "-c", LIMITS.replace("HARD", hard)], capture_output=True, text=True)
    assert words in run.stdout + run.stderr


@pytest.mark.long
async def test_two_thousand_requests_are_in_flight_at_a_time(
    make_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both ends of all connections share an event loop, which a busy machine may hold up for seconds.
    monkeypatch.setattr("plaudit_reward.http._CONNECT_WITHIN_S", 60.0)
    everybody, waiting = asyncio.Event(), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        await reader.readuntil(b"\r\n\r\n[]")
        waiting += 1
        if waiting == 2048:
            everybody.set()
        await everybody.wait()
        writer.write(OK)
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = make_client(max_connections=4200)  # the server's ends are this process's too
    requests: list[Awaitable[Any]] = [client.post(url, b"[]", 60.0) for _ in range(2048)]
    assert {response.status for response in await asyncio.gather(*requests)} == {200}
    listening.close()
