"""The operator's HTTP port, while clients misbehave."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from plaudit_operator.runtime.health import ControllerHealthServer, MetricsAccess
from plaudit_operator.runtime.kube import ApiUnavailableError


class Process:
    """The state that the checks report."""

    problem = ""


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def server(process: Process) -> Iterator[ControllerHealthServer]:
    registry = CollectorRegistry()
    Gauge("jobs", "Jobs", registry=registry).set(3)
    server = ControllerHealthServer(0, lambda: "", lambda: process.problem, registry)
    yield server
    server.close()


def get(server: ControllerHealthServer, path: str, authorization: str = "") -> tuple[int, str]:
    headers = {"Authorization": authorization} if authorization else {}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_routes_report_the_problem(server: ControllerHealthServer, process: Process):
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/readyz?verbose") == (200, "ok\n")
    process.problem = "waiting for Pod"
    assert get(server, "/readyz") == (503, "waiting for Pod\n")
    assert "jobs 3.0" in get(server, "/metrics")[1]
    assert get(server, "/secret")[0] == 404


def test_hundreds_of_silent_connections_keep_no_probe_waiting_and_cost_no_thread(server: ControllerHealthServer):
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


class Reviewer:
    """Answers reviews as an API server does: ``prometheus`` may read the series, ``stranger`` may not."""

    def __init__(self) -> None:
        self.reviews: list[str] = []
        self.is_away = False

    def __call__(self, path: str, review: dict[str, Any]) -> dict[str, Any]:
        if self.is_away:
            raise ApiUnavailableError("no response")
        self.reviews.append(review["kind"])
        if review["kind"] == "TokenReview":
            name = {"token-p": "prometheus", "token-s": "stranger"}.get(review["spec"]["token"])
            return {
                **review,
                "status": {"authenticated": name is not None, "user": {"username": name, "groups": ["g"]}},
            }
        assert review["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {**review, "status": {"allowed": review["spec"]["user"] == "prometheus"}}


def test_only_those_whom_rbac_allows_read_the_series():
    reviewer, now = Reviewer(), [0.0]
    access = MetricsAccess(reviewer, lambda: now[0])
    server = ControllerHealthServer(0, lambda: "", lambda: "", CollectorRegistry(), access.allows)
    try:
        answers = [get(server, "/metrics", text)[0] for text in ("", "Basic x", "Bearer x", "Bearer token-s")]
        assert answers == [401, 401, 403, 403]
        assert reviewer.reviews == ["TokenReview", "TokenReview", "SubjectAccessReview"]
        assert [get(server, "/metrics", "Bearer token-p")[0] for _ in range(3)] == [200] * 3
        assert len(reviewer.reviews) == 5  # a decision is kept
        now[0], reviewer.is_away = 61.0, True
        assert get(server, "/metrics", "Bearer token-p")[0] == 503
        assert get(server, "/healthz")[0] == 200
    finally:
        server.close()
