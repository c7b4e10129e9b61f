"""The two questions of a kubelet."""

import asyncio

import pytest

from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import HealthServer


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def status(port: int, path: str) -> int:
    answer = await ask(port, f"GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n".encode())
    return int(answer.split(b" ")[1])


async def test_readiness_and_health_are_answered_apart() -> None:
    state = {"ready": False}
    port = free_port()
    async with HealthServer(port, ready=lambda: state["ready"]):
        assert (await status(port, "/readyz"), await status(port, "/healthz")) == (503, 200)
        state.update(ready=True)
        assert (await status(port, "/readyz?verbose=1"), await status(port, "/healthz")) == (200, 200)
        assert await status(port, "/metrics") == 404


@pytest.mark.parametrize("garbage", [b"hello\r\n\r\n", b"\r\n\r\n", b"\x00\xff\x00\r\n\r\n"])
async def test_garbage_is_answered_with_404_without_harm(garbage) -> None:
    port = free_port()
    async with HealthServer(port, ready=lambda: True):
        assert b"404" in await ask(port, garbage)
        assert await status(port, "/readyz") == 200


async def test_port_0_serves_nothing() -> None:
    async with HealthServer(0, ready=lambda: True):
        pass
