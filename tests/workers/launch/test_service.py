"""The addresses of a reward service that a run leaves in its folder."""

import asyncio
from pathlib import Path
from typing import Any

from plaudit_job.spec.rewards import GatewaySpec
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.run import GatewayAddress, gateway_address, write_address, write_when_answered


def test_a_resumed_run_keeps_port_and_token(tmp_path: Path) -> None:
    first = gateway_address(tmp_path, GatewaySpec())
    write_address(tmp_path, RedisAddress("redis://127.0.0.1:1/0", "secret"), first)
    assert gateway_address(tmp_path, GatewaySpec()) == first
    assert gateway_address(tmp_path, GatewaySpec(port=8710)) == GatewayAddress("http://127.0.0.1:8710", first.token)


def test_only_the_owner_reads_the_token(tmp_path: Path) -> None:
    address = gateway_address(tmp_path, GatewaySpec())
    write_address(tmp_path, RedisAddress("redis://127.0.0.1:1/0"), address)
    file = tmp_path / "tokens" / "client"
    assert file.read_text() == address.token
    assert file.stat().st_mode & 0o777 == (tmp_path / "service.json").stat().st_mode & 0o777 == 0o600
    assert address.token not in repr(address)


def test_without_a_gateway_there_is_no_address(tmp_path: Path) -> None:
    assert gateway_address(tmp_path, GatewaySpec(replicas=0)) == GatewayAddress()


async def test_the_file_appears_when_the_gateway_answers(tmp_path: Path) -> None:
    address = gateway_address(tmp_path, GatewaySpec())
    file, asked = tmp_path / "service.json", asyncio.Event()

    async def answer(reader: Any, writer: Any) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        assert f"Bearer {address.token}".encode() in request
        assert not file.exists()
        status = b"200 OK" if asked.is_set() else b"503 Service Unavailable"
        asked.set()
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    writing = asyncio.create_task(write_when_answered(tmp_path, RedisAddress("redis://127.0.0.1:1/0"), address))
    async with await asyncio.start_server(answer, "127.0.0.1", address.port):
        await writing
    assert file.exists()
