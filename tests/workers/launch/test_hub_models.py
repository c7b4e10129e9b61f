"""Models on a hub are looked up before anything starts."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from plaudit_job.load import parse_job
from plaudit_job.spec.rljob import RLJob
from plaudit_workers.launch.preflight import check_hub_models

CLASSES = {
    "model": "Qwen2ForSequenceClassification",
    "modeling": "Qwen2ForRewardModeling",
    "rm": "InternLM2ForRewardModel",
    "process": "Qwen2ForProcessRewardModel",
}


class Hub(BaseHTTPRequestHandler):
    """Has some models, and describes them as the hub does."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/org/").removesuffix("/revision/main")
        body = (
            json.dumps({"id": f"org/{name}", "config": {"architectures": [CLASSES[name]]}}) if name in CLASSES else ""
        )
        self.send_response(200 if body else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

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


def job(source: str, **fields: Any) -> RLJob:
    scorer = {"name": "helpful", "kind": "model", "model": {"source": source, **fields}}
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


@pytest.mark.parametrize("name", ["modeling", "rm", "process"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_model_that_vllm_takes_for_an_embedder_is_refused_before_it_is_downloaded(
    hub: str, tmp_path: Path, name: str, cached: bool
) -> None:
    if cached:
        folder = tmp_path / f"models--org--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc\n")
        (folder / "snapshots" / "abc").mkdir(parents=True)
        (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps({"architectures": [CLASSES[name]]}))
    (problem,) = check_hub_models(job(f"org/{name}"))
    assert problem.field == "spec.reward.scorers[0].model.source"
    assert f"org/{name} has class {CLASSES[name]}, which " in str(problem)
    remedies = {
        "modeling": "architectures: [Qwen2ForSequenceClassification]}}; else set engine to plaudit",
        "rm": "architectures: [InternLM2ForSequenceClassification]}}; else set engine to plaudit",
        "process": "scores the steps of a response, not the response. Name a classifier with one output",
    }
    assert remedies[name] in str(problem)
    overrides = {"hf_overrides": {"architectures": ["Qwen2ForSequenceClassification"]}}
    assert check_hub_models(job(f"org/{name}", arguments=overrides)) == []
    assert check_hub_models(job(f"org/{name}", engine="plaudit")) == []


def test_a_hub_that_cannot_be_reached_is_named(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    (problem,) = check_hub_models(job("org/model"))
    assert "the model hub does not respond: http://127.0.0.1:1" in str(problem)
