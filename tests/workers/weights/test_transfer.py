"""Direct weight transfer: every announced byte or nothing, whatever happens to either side in its middle."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from plaudit_wire.messages import PolicyVersion, Transfer, TransferPart
from plaudit_workers.weights import send
from plaudit_workers.weights.receive import Reception
from plaudit_workers.weights.send import (
    BLOCK_BYTES,
    GO,
    NONCE_BYTES,
    TensorShape,
    TransferError,
    WeightPart,
    WeightServer,
    covers_once,
    decode_contents,
    file_layout,
    host_towards,
    make_request,
    send_frame,
)

VERSION = PolicyVersion(2, 7)
TOKEN = "secret"
CONTENT = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES + 5000, dtype=np.uint8)
"""Two blocks."""


@pytest.fixture
def serve():
    """Offers parts, each in a server of its own; returns the transfer that announces them."""
    servers = []

    def start(*parts: WeightPart, num_bytes: int) -> Transfer:
        for part in parts:
            servers.append(WeightServer())
            servers[-1].offer(VERSION, TOKEN, part)
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        announced = [TransferPart(address, part.digest) for address, part in zip(addresses, parts, strict=True)]
        start.servers = servers
        return Transfer(TOKEN, num_bytes, announced)

    yield start
    for server in servers:
        server.close()


def received(transfer: Transfer, **options: float) -> bytes:
    with Reception(VERSION, transfer, **options) as reception:
        return (reception.receive() / "model.safetensors").read_bytes()


def whole(content: np.ndarray = CONTENT) -> WeightPart:
    return WeightPart.of([(0, content.data)], b'{"ids": []}')


def test_the_layout_of_tensors_is_a_safetensors_file(tmp_path):
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1, 2], np.int64), "c": np.float32(4)}
    names = {"float32": "F32", "int64": "I64"}
    layout = file_layout(TensorShape(name, names[str(each.dtype)], each.shape) for name, each in tensors.items())
    content = bytearray(layout.num_bytes)
    content[: len(layout.header)] = layout.header
    for name, tensor in tensors.items():
        content[layout.offsets[name] : layout.offsets[name] + tensor.nbytes] = tensor.tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    loaded = load_file(tmp_path / "model.safetensors")
    assert {name: (each.tolist(), each.dtype) for name, each in loaded.items()} == {
        name: (each.tolist(), each.dtype) for name, each in tensors.items()
    }


def test_several_rollouts_receive_the_parts_of_several_ranks_at_once(serve):
    middle = BLOCK_BYTES // 2 + 3
    parts = [WeightPart.of([(0, CONTENT[:middle].data)], b"probe"), WeightPart.of([(middle, CONTENT[middle:].data)])]
    transfer = serve(*parts, num_bytes=CONTENT.size)
    with ThreadPoolExecutor(3) as rollouts:
        contents = list(rollouts.map(lambda _: received(transfer), range(3)))
    assert contents == [CONTENT.tobytes()] * 3
    with Reception(VERSION, transfer) as late:
        folder = late.receive()
        assert (folder / "probe.json").read_bytes() == b"probe"
    assert not folder.exists()


@pytest.mark.parametrize("change", ["token", "version", "withdrawn"])
def test_who_does_not_know_the_token_or_asks_for_another_version_gets_nothing(serve, change):
    transfer = serve(whole(), num_bytes=CONTENT.size)
    version = PolicyVersion(2, 8) if change == "version" else VERSION
    if change == "token":
        transfer = Transfer("guess", transfer.num_bytes, transfer.parts)
    if change == "withdrawn":
        serve.servers[0].offer(PolicyVersion(2, 9), TOKEN, whole())
    with Reception(version, transfer) as reception, pytest.raises(TransferError, match="closed the connection"):
        reception.receive()


def test_peers_without_the_token_cannot_keep_rollouts_out(serve, monkeypatch):
    """They connect as often as they like and send a byte now and then; one that waits for long is disconnected."""
    transfer = serve(whole(), num_bytes=len(CONTENT))
    host, _, port = transfer.parts[0].address.rpartition(":")
    idle = [socket.create_connection((host, int(port)), timeout=5) for _ in range(600)]
    try:
        for connection in idle:
            with contextlib.suppress(OSError):  # those that others have taken the places of
                connection.sendall((1000).to_bytes(4, "big"))
        assert received(transfer) == CONTENT.tobytes()
        begun = [connection for connection in idle if len(connection.recv(32)) == 32]
        assert received(transfer) == CONTENT.tobytes()
        monkeypatch.setattr(send, "PROOF_WITHIN_S", 0.1)
        late = socket.create_connection((host, int(port)), timeout=5)
        assert len(late.recv(32)) == 32
        assert late.recv(1) == b""
        late.close()
        assert begun
    finally:
        for connection in idle:
            connection.close()


def test_a_process_that_was_short_of_descriptors_serves_weights_again(serve):
    transfer = serve(whole(), num_bytes=len(CONTENT))
    host, _, port = transfer.parts[0].address.rpartition(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        early.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            early.connect((host, int(port)))
            time.sleep(0.1)  # it cannot be accepted meanwhile
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(early.recv(32, socket.MSG_WAITALL)) == 32
    assert received(transfer) == CONTENT.tobytes()


def test_weights_are_offered_at_one_address_only():
    server = WeightServer(0, "127.0.0.2")
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
        socket.create_connection(("127.0.0.2", server.port), timeout=5).close()
    finally:
        server.close()


def test_a_byte_that_differs_from_the_announcement_is_found(serve):
    content = CONTENT.copy()
    transfer = serve(whole(content), num_bytes=content.size)
    content[BLOCK_BYTES + 17] ^= 1
    with pytest.raises(TransferError, match=rf"block at byte {BLOCK_BYTES} does not have the announced digest"):
        received(transfer)
    table = Transfer(TOKEN, transfer.num_bytes, [TransferPart(transfer.parts[0].address, "0" * 64)])
    with pytest.raises(TransferError, match="table of its blocks is not the announced one"):
        received(table)


@pytest.mark.parametrize("start", [0, 10], ids=["missing", "overlapping"])
def test_parts_that_leave_out_bytes_or_overlap_are_refused(serve, start):
    parts = [WeightPart.of([(0, CONTENT[:20].data)]), WeightPart.of([(20 - start, CONTENT[20 - start : 30].data)])]
    transfer = serve(*parts, num_bytes=40 if start == 0 else 30)
    with pytest.raises(TransferError, match="leave out bytes of the weights, or overlap"):
        received(transfer)


def test_a_block_outside_of_the_file_or_bytes_that_are_no_table_are_refused():
    part = WeightPart.of([(5, b"0123456789")])
    assert decode_contents(part.contents, 15).blocks[0].offset == 5
    for encoded, num_bytes in [(part.contents, 14), (b"\x92\x01", 15), (b"", 15)]:
        with pytest.raises(ValueError, match="block"):
            decode_contents(encoded, num_bytes)
    assert not covers_once(decode_contents(part.contents, 15).blocks, 15)


def test_more_bytes_than_memory_are_refused_before_any_is_received(serve):
    with pytest.raises(TransferError, match=r"the weights have 1,000,000,000,000,000 bytes, .* are available"):
        received(serve(whole(), num_bytes=10**15))


@pytest.mark.parametrize("damaged", [True, False])
def test_the_memory_of_a_version_is_free_at_once_when_its_reception_is_closed(serve, damaged):
    content = CONTENT.copy()
    transfer = serve(whole(content), num_bytes=content.size)
    content[-1] ^= damaged
    expected = pytest.raises(TransferError, match="announced digest") if damaged else contextlib.nullcontext()
    gc.disable()  # it could free the memory much later
    try:
        with Reception(VERSION, transfer) as reception, expected:
            reception.receive()
            assert mappings_and_descriptors()
        assert mappings_and_descriptors() == []
    finally:
        gc.enable()


def mappings_and_descriptors() -> list[str]:
    """Those of weights in this process's memory."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [each for each in mappings + descriptors if f"/memfd:weights-{VERSION}" in each]


TRAINER = """
import sys
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.weights.send import WeightPart, WeightServer
part = WeightPart.of([(0, memoryview(bytes(200 << 20)))])
server = WeightServer()
server.offer(PolicyVersion(2, 7), "secret", part)
print(server.port, part.digest, flush=True)
sys.stdin.read()
"""


def test_a_trainer_killed_in_mid_transfer_is_an_error_of_the_rollout():
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        port, digest = trainer.stdout.readline().decode().split()
        with (
            relay(int(port), after_bytes=1 << 20, then=trainer.kill) as address,
            pytest.raises(TransferError, match=r"closed the connection|reset by peer"),
        ):
            received(Transfer(TOKEN, 200 << 20, [TransferPart(address, digest)]))


def test_a_trainer_that_stalls_is_given_up(serve):
    transfer = serve(whole(), num_bytes=CONTENT.size)
    port = int(transfer.parts[0].address.rpartition(":")[2])
    stalled = threading.Event()
    with relay(port, after_bytes=1 << 20, then=stalled.wait) as address:
        announced = Transfer(TOKEN, transfer.num_bytes, [TransferPart(address, transfer.parts[0].digest)])
        try:
            with pytest.raises(TransferError, match="timed out"):
                received(announced, stalled_after_s=0.2)
        finally:
            stalled.set()


def test_a_version_that_is_published_in_the_middle_of_a_transfer_does_not_break_it_however_many_ranks_send(serve):
    size, ranks = 200_000, 20
    pieces = [CONTENT[rank * size : (rank + 1) * size] for rank in range(ranks)]
    transfer = serve(
        *(WeightPart.of([(rank * size, piece.data)]) for rank, piece in enumerate(pieces)), num_bytes=ranks * size
    )

    def publish() -> None:
        for server in serve.servers:
            server.offer(PolicyVersion(2, 8), TOKEN, whole())

    all_send = threading.Barrier(8, publish)  # as many as send at once
    with contextlib.ExitStack() as relays:
        addresses = [
            relays.enter_context(relay(server.port, after_bytes=100_000, then=all_send.wait))
            for server in serve.servers[:8]
        ]
        relayed = [TransferPart(address, part.digest) for address, part in zip(addresses, transfer.parts, strict=False)]
        announced = Transfer(TOKEN, transfer.num_bytes, [*relayed, *transfer.parts[8:]])
        assert received(announced) == CONTENT[: ranks * size].tobytes()


def test_a_replaced_version_is_kept_for_its_transfers_and_freed_when_room_is_made(serve):
    transfer = serve(part := whole(CONTENT.copy()), num_bytes=CONTENT.size)
    kept, server = weakref.ref(part), serve.servers[0]
    del part
    going_on, ended = threading.Event(), threading.Event()

    def publish() -> None:
        server.make_room()
        server.offer(PolicyVersion(2, 8), TOKEN, whole())
        going_on.set()
        ended.wait()

    with relay(server.port, after_bytes=1 << 20, then=publish) as address, ThreadPoolExecutor(1) as thread:
        announced = Transfer(TOKEN, transfer.num_bytes, [TransferPart(address, transfer.parts[0].digest)])
        receiving = thread.submit(received, announced)
        assert going_on.wait(20)
        assert kept() is not None
        server.make_room()
        ended.set()
        with pytest.raises(TransferError, match=r"closed the connection|reset by peer"):
            receiving.result(20)
    deadline = time.monotonic() + 20
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread that sent ends
    assert kept() is None


def test_a_rollout_that_dies_in_mid_transfer_does_not_disturb_the_others(serve):
    transfer = serve(whole(), num_bytes=CONTENT.size)
    host, _, port = transfer.parts[0].address.rpartition(":")
    for _ in range(3):
        dying = socket.create_connection((host, int(port)))
        nonce = dying.recv(NONCE_BYTES, socket.MSG_WAITALL)
        send_frame(dying, make_request(TOKEN, nonce, VERSION))
        dying.sendall(GO)
        assert dying.recv(100_000)
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dying.close()  # resets the connection, as the kernel does for a killed process
    assert received(transfer) == CONTENT.tobytes()


def test_closing_a_reception_ends_it_in_its_middle(serve):
    transfer = serve(whole(), num_bytes=CONTENT.size)
    port = int(transfer.parts[0].address.rpartition(":")[2])
    arrived, ended = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        ended.wait()

    with relay(port, after_bytes=1 << 20, then=hold) as address, ThreadPoolExecutor(1) as thread:
        announced = Transfer(TOKEN, transfer.num_bytes, [TransferPart(address, transfer.parts[0].digest)])
        reception = Reception(VERSION, announced)
        receiving = thread.submit(reception.receive)
        assert arrived.wait(20)
        reception.close()
        with pytest.raises(TransferError):
            receiving.result(20)
        ended.set()


def test_the_address_of_this_host_is_the_one_that_reaches_redis():
    assert host_towards("redis://127.0.0.1:6379") == "127.0.0.1"
    assert host_towards("unix:///run/redis.sock") == "127.0.0.1"


@contextlib.contextmanager
def relay(port: int, after_bytes: int, then):
    """A TCP relay to ``port`` for one connection that calls ``then`` after so many bytes from it."""

    def copy(source: socket.socket, target: socket.socket, limit: float = float("inf")) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                target.sendall(chunk)
                limit -= len(chunk)
                if limit <= 0:
                    then()
                    limit = float("inf")
            target.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as upstream:
                threading.Thread(target=copy, args=(client, upstream), daemon=True).start()
                copy(upstream, client, after_bytes)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=run, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
