"""Progress from a job's metrics service: the real service, and hostile ones."""

from __future__ import annotations

import gzip
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from plaudit_operator.status.progress import JobProgress, ProgressReader

STEP = {"step": 7, "verdict": "reward", "reward/mean": 0.25, "exposed_reward_s": None, "unknown": [1]}
LOOK = {"streams": {"samples": {"undelivered": 3}}, "redis_memory_bytes": 70, "redis_memory_limit_bytes": 100}
QUEUES = {"looks": [LOOK], "workers": [{"circuits_open": ["quality"]}, {"circuits_open": ["quality"]}]}

Respond = Callable[[socket.socket, str], None]


@contextmanager
def service(respond: Respond, **options: float) -> Iterator[ProgressReader]:
    """A metrics service that responds as a test says; the reader that asks it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

        def handle(connection: socket.socket) -> None:
            with connection:
                request = connection.recv(65536).decode()
                with suppress(OSError):  # the reader hung up
                    respond(connection, request.split()[1])

        threading.Thread(target=serve, daemon=True).start()
        port = listening.getsockname()[1]
        with closing(ProgressReader(lambda name, namespace: f"http://127.0.0.1:{port}", **options)) as reader:
            yield reader
        listening.shutdown(socket.SHUT_RDWR)


def send(connection: socket.socket, body: bytes, headers: str = "", status: str = "200 OK") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    connection.sendall(head.encode() + body)


def last(reader: ProgressReader) -> JobProgress:
    """Ask again until there is an answer, as the operator does."""
    while (progress := reader.read("job", "team", is_last=True)) is None:
        pass
    return progress


def well(connection: socket.socket, path: str) -> None:
    send(connection, json.dumps({"steps": [STEP]} if "steps" in path else QUEUES).encode())


def test_progress_is_the_newest_step_the_backlog_and_the_troubles():
    with service(well) as reader:
        progress = last(reader)
    reasons = [trouble["reason"] for trouble in progress.pop("troubles")]
    assert progress == {"step": 7, "verdict": "reward", "rewardMean": 0.25, "backlog": 3}
    assert reasons == ["JudgeFailing", "RedisFull"]


def test_a_late_response_is_used_in_the_next_look():
    late = threading.Event()

    def respond(connection: socket.socket, path: str) -> None:
        late.wait(2)
        well(connection, path)

    with service(respond) as reader:
        assert reader.read("job", "team") == {}
        late.set()
        end = time.monotonic() + 20
        while not (progress := reader.read("job", "team")) and time.monotonic() < end:
            time.sleep(0.02)
    assert progress["step"] == 7


def test_the_last_look_waits_for_a_response_and_takes_none_from_before():
    steps, asked, answered = iter([{**STEP, "step": 6}, STEP]), threading.Event(), threading.Event()

    def respond(connection: socket.socket, path: str) -> None:
        step = next(steps) if "steps" in path else None
        if step is not None and step["step"] == 6:
            asked.set()
            answered.wait(20)
        send(connection, json.dumps(QUEUES if step is None else {"steps": [step]}).encode())

    with service(respond) as reader:
        assert reader.read("job", "team") == {}
        assert asked.wait(20)
        assert last(reader)["step"] == 7
        answered.set()


def test_the_last_look_is_repeated_while_the_service_fails():
    failures = iter(["503 Service Unavailable"] * 3)

    def respond(connection: socket.socket, path: str) -> None:
        if failure := next(failures, ""):
            send(connection, b"", status=failure)
        else:
            well(connection, path)

    with service(respond) as reader:
        assert last(reader)["step"] == 7


def test_a_service_that_never_responds_is_asked_for_its_last_progress_once():
    requests, ended = [], threading.Event()

    def respond(connection: socket.socket, path: str) -> None:
        requests.append(path)
        ended.wait(20)

    with service(respond, last_within_s=1.0) as reader:
        assert reader.read("job", "team", is_last=True) is None
        assert [last(reader) for _ in range(3)] == [{}, {}, {}]
        ended.set()
    assert len(requests) == 1


BOMB = gzip.compress(b" " * (1 << 20)) * 500


def gzip_bomb(connection: socket.socket, path: str) -> None:
    send(connection, BOMB, "Content-Encoding: gzip\r\n")


def endless_body(connection: socket.socket, path: str) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


def redirect(connection: socket.socket, path: str) -> None:
    if "secret" in path:
        well(connection, path.replace("secret/", ""))
    else:
        send(connection, b"", f"Location: /secret{path}\r\n", "302 Found")


def nested(connection: socket.socket, path: str) -> None:
    send(connection, b"[" * (1 << 20))


def other_types(connection: socket.socket, path: str) -> None:
    send(connection, json.dumps({"steps": [{"step": "x" * 1000}]} if "steps" in path else QUEUES).encode())


@pytest.mark.parametrize("respond", [gzip_bomb, endless_body, redirect, nested, other_types])
def test_a_bad_response_is_no_progress_and_takes_no_memory(respond: Respond, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with service(respond) as reader:
        end = time.monotonic() + 20
        while not caplog.records and time.monotonic() < end:
            assert reader.read("job", "team") == {}
    assert "no progress" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10  # KiB


def test_values_that_the_api_server_would_reject_are_cut_off():
    step = {"step": -5, "verdict": "v" * 5000, "reward/mean": 1e308}
    queues = {"looks": [], "workers": [{"circuits_open": [f"judge-{i}" * 100 for i in range(500)]}]}

    def respond(connection: socket.socket, path: str) -> None:
        send(connection, json.dumps({"steps": [step]} if "steps" in path else queues).encode())

    with service(respond) as reader:
        progress = last(reader)
    assert "step" not in progress
    assert len(progress["verdict"]) == 64
    assert len(progress["troubles"]) <= 64
    assert max(len(trouble["message"]) for trouble in progress["troubles"]) < 1000


def test_services_that_send_a_byte_at_a_time_do_not_keep_others_waiting():
    def drip(connection: socket.socket, path: str) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)

    with service(drip) as slow, service(well) as healthy:
        addresses = {"slow": slow._address_of("", ""), "healthy": healthy._address_of("", "")}
        with closing(ProgressReader(lambda name, namespace: addresses[name])) as reader:
            for number in range(8):
                assert reader.read("slow", f"team-{number}") == {}
            assert reader.read("healthy", "team")["step"] == 7


def test_the_load_of_rollouts_is_read_and_bounded():
    workers = [
        {"worker": "job-rollout-x-1-a1b2c3", "role": "rollout", "busy": 12},
        {"worker": "job-rollout-y-1-a1b2c3", "role": "rollout", "busy": 2**40},
        {"worker": "job-rollout-z-1-a1b2c3", "role": "rollout", "busy": -1},
        {"worker": "job-reward-x-1-a1b2c3", "role": "reward", "busy": 3},
    ]

    def respond(connection: socket.socket, path: str) -> None:
        assert path.startswith("/api/v1/queues")
        send(connection, json.dumps({"looks": [], "workers": workers}).encode())

    with service(respond) as reader:
        found = reader.busy("job", "default")
    assert found == {"job-rollout-x-1-a1b2c3": 12, "job-rollout-y-1-a1b2c3": 2**31 - 1, "job-rollout-z-1-a1b2c3": 0}


@pytest.mark.parametrize("respond", [lambda *_: time.sleep(5), lambda connection, _: send(connection, b"[1]")])
def test_a_bad_response_gives_no_load(respond: Respond):
    with service(respond) as reader:
        assert reader.busy("job", "default") == {}
