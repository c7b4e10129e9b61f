"""Models on a hub are looked up before anything starts."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from plaudit_workers.job.loading.load import parse_job
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.launch.preflight.hub_models import check_hub_models


class Hub(BaseHTTPRequestHandler):
    """Has one model."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/models/org/model/revision/main" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        yield url
        server.shutdown()


def job(source: str) -> RLJob:
    scorer = {"name": "helpful", "kind": "model", "model": {"source": source}}
    spec = {"reward": {"scorers": [scorer]}}
    return parse_job({"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec})


def test_a_model_that_the_hub_has_is_no_problem(hub: str) -> None:
    assert check_hub_models(job("org/model")) == []


def test_a_misspelt_model_is_named_with_the_ways_to_correct_it(hub: str) -> None:
    (problem,) = check_hub_models(job("org/modle"))
    assert problem.field == "spec.reward.scorers[0].model.source"
    assert f"'org/modle' is no folder beside the job file, and {hub} has no such model" in str(problem)
    assert "write its path with ./ or /" in str(problem)


def test_a_model_in_the_cache_is_not_looked_up(hub: str, tmp_path: Path) -> None:
    (tmp_path / "models--org--cached").mkdir()
    assert check_hub_models(job("org/cached")) == []


def test_a_hub_that_cannot_be_reached_is_named(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    (problem,) = check_hub_models(job("org/model"))
    assert "the model hub does not respond: http://127.0.0.1:1" in str(problem)
