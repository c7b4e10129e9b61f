"""The operator's HTTP port, while clients misbehave."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from plaudit_operator.runtime.health import HealthServer


class Process:
    """The state that the checks report."""

    problem = ""


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def server(process: Process) -> Iterator[HealthServer]:
    registry = CollectorRegistry()
    Gauge("jobs", "Jobs", registry=registry).set(3)
    server = HealthServer(0, lambda: "", lambda: process.problem, registry)
    yield server
    server.close()


def get(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_routes_report_the_problem(server: HealthServer, process: Process):
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/readyz?verbose") == (200, "ok\n")
    process.problem = "waiting for Pod"
    assert get(server, "/readyz") == (503, "waiting for Pod\n")
    assert "jobs 3.0" in get(server, "/metrics")[1]
    assert get(server, "/secret")[0] == 404


def test_hundreds_of_silent_connections_keep_no_probe_waiting_and_cost_no_thread(server: HealthServer):
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(300)]
    try:
        assert get(server, "/healthz")[0] == 200
        assert threading.active_count() == threads
        assert silent[0].recv(1) == b""  # the oldest made room
    except ConnectionResetError:
        pass
    finally:
        for connection in silent:
            connection.close()
