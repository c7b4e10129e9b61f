"""What plaudit run refuses, what it ignores, and what cannot work on Kubernetes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plaudit_job.checks import kubernetes_problems, without_effect
from plaudit_job.load import parse_job, read_job
from plaudit_workers.launch.code_checks import ignored, unsupported
from small_job import SMALL_JOB, changed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rollout.sampling": {"topP": 0.9}}, "spec.rollout.sampling: topP 0.9, topK -1 cut the distribution"),
        ({"rollout.sampling": {"topK": 5}}, "spec.rollout.sampling: topP 1.0, topK 5 cut the distribution"),
        (
            {"transport": {"url": "rediss://r:1/0", "tls": {"caConfigMap": {"name": "ca", "key": "ca.crt"}}}},
            "spec.transport.tls.caConfigMap: is not supported by plaudit run",
        ),
    ],
)
def test_unimplemented_features_are_refused(fields: dict[str, Any], words: str) -> None:
    (problem,) = unsupported(parse_job(changed(fields)))
    assert str(problem).startswith(words)


@pytest.mark.parametrize(
    ("correction", "mini_batches", "noted"),
    [("tis", 1, True), ("decoupled", 1, True), ("none", 1, False), ("tis", 2, False)],
)
def test_a_clip_that_never_acts_is_noted(correction: str, mini_batches: int, noted: bool) -> None:
    loss, fields = {"correction": correction}, {"algorithm.miniBatchesPerStep": mini_batches}
    notes = without_effect(parse_job(changed(fields | {"algorithm.loss": loss | {"clipHigh": 0.28}})))
    assert [note.field for note in notes] == ["spec.algorithm.loss.correction"] * noted
    assert without_effect(parse_job(changed(fields | {"algorithm.loss": loss}))) == []  # its clips are nobody's wish


@pytest.mark.parametrize(
    ("section", "settings", "noted"),
    [
        ("loss", {"kind": "cispo", "clipRatioC": 5}, "loss.clipRatioC: kind cispo has no dual clip: 5 changes nothing"),
        ("loss", {"kind": "gspo", "clipRatioC": 5}, "loss.clipRatioC: kind gspo has no dual clip: 5 changes nothing"),
        ("loss", {"kind": "dppo", "clipRatioC": 5}, ""),
        ("loss", {"correction": "none", "correctionCap": 9}, "loss.correctionCap: correction none has no importance w"),
        ("loss", {"correction": "none", "correctionFloor": 0.1}, "loss.correctionFloor: correction none has no import"),
        ("loss", {"correction": "none", "correctionLevel": "sequence"}, "loss.correctionLevel: correction none has no"),
        ("loss", {"correction": "reject", "correctionFloor": 0.1, "correctionLevel": "geometric"}, ""),
        (
            "loss",
            {"klImportanceWeight": True},
            "loss.klImportanceWeight: klCoefficient 0 and klIn loss give the loss no",
        ),
        ("loss", {"klImportanceWeight": True, "klCoefficient": 0.1}, ""),
        ("optimizer", {"minRateShare": 0.1}, "optimizer.minRateShare: with schedule constant the rate does not fall"),
        ("optimizer", {"minRateShare": 0.1, "schedule": "linear"}, ""),
    ],
)
def test_a_setting_that_another_one_switches_off_is_noted(section: str, settings: dict[str, Any], noted: str) -> None:
    notes = without_effect(parse_job(changed({f"algorithm.{section}": settings, "algorithm.miniBatchesPerStep": 2})))
    assert len(notes) == bool(noted)
    assert f"spec.algorithm.{noted}" in "".join(map(str, notes)) or not noted


def test_a_job_that_only_scores_is_run() -> None:
    only_scores = {"rollout": None, "trainer": None, "model": None, "data": None, "algorithm": None}
    assert list(unsupported(parse_job(changed(only_scores)))) == []


def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = parse_job(changed({"trainer.sinks": ["tensorboard", "wandb"]}))
    assert list(unsupported(job)) == []
    monkeypatch.setitem(sys.modules, "wandb", None)  # how Python marks a module that cannot be imported
    (problem,) = unsupported(job)
    assert str(problem).startswith("spec.trainer.sinks[1]: wandb is not installed")


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_MODE", "NETRC"])
def test_wandb_without_a_key_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=SimpleNamespace()))
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "empty").write_text("")
    monkeypatch.setenv("NETRC", str(tmp_path / "empty"))
    job = parse_job(changed({"trainer.sinks": ["wandb"]}))
    (problem,) = unsupported(job)
    assert "names wandb, for which this machine has no key" in problem.message
    monkeypatch.setenv(name, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline", "NETRC": str(tmp_path / "netrc")}[name])
    assert list(unsupported(job)) == []


def test_mlflow_without_a_server_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(__spec__=SimpleNamespace()))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = parse_job(changed({"trainer.sinks": ["mlflow"]}))
    (problem,) = unsupported(job)
    assert "names mlflow, and MLFLOW_TRACKING_URI is not set" in problem.message
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert list(unsupported(job)) == []


def test_a_usual_job_is_accepted_without_ignored_fields() -> None:
    job = parse_job(changed({"trainer.sinks": ["tensorboard"], "rollout.agent": {"kind": "singleTurn"}}))
    assert list(unsupported(job)) == []
    assert ignored(job) == []


def test_fields_of_kubernetes_are_named_as_ignored() -> None:
    fields = {
        "reward.workers": {"autoscaling": {}, "pod": {"image": "i"}},
        "reward.networkPolicy": {"egress": [{"cidr": "10.0.0.0/8"}]},
        "transport": {"managed": {"storage": "20Gi"}},
        "storage": {"claimName": "c"},
        "files": {"configMap": "f"},
        "scheduling": {"queueName": "q"},
        "lifecycle": {"cleanup": "None", "failurePolicy": {"maxRestarts": 1, "maxDisruptions": 1}},
        "trainer.pod": {"nodeSelector": {"gpu": "h100"}},
        "rollout.pod": {"resources": {"limits": {"cpu": 4}}},
    }
    assert [problem.field for problem in ignored(parse_job(changed(fields)))] == [
        "spec.reward.workers.autoscaling",
        "spec.reward.networkPolicy",
        "spec.transport.managed.storage",
        "spec.storage",
        "spec.files",
        "spec.scheduling",
        "spec.lifecycle.cleanup",
        "spec.lifecycle.failurePolicy.maxDisruptions",
        "spec.reward.workers.pod",
        "spec.trainer.pod",
    ]


def test_relative_paths_and_a_missing_claim_cannot_work_on_kubernetes(write_job: Callable[..., Path]) -> None:
    fields = [problem.field for problem in kubernetes_problems(read_job(write_job(SMALL_JOB)))]
    assert fields == [
        "spec.model.source",
        "spec.data.train.path",
        "spec.reward.scorers[0].python.path",
        "spec.storage.claimName",
    ]


@pytest.mark.parametrize("items", [[], [{"key": "r", "path": "reward.py"}]])
def test_files_from_a_config_map_and_paths_on_the_volume_work_on_kubernetes(items: list[dict[str, str]]) -> None:
    fields = {
        "model.source": "Qwen/Qwen2.5-0.5B",
        "data.train.path": "/plaudit/data/train.parquet",
        "files": {"configMap": "rewards", "items": items},
        "storage": {"claimName": "shared"},
    }
    assert kubernetes_problems(parse_job(changed(fields))) == []


def test_data_cannot_come_from_a_config_map() -> None:
    fields = {
        "model.source": "/models/m",
        "files": {"configMap": "rewards", "items": []},
        "storage": {"claimName": "shared"},
    }
    (problem,) = kubernetes_problems(parse_job(changed(fields)))
    assert problem.field == "spec.data.train.path"


def test_a_mistyped_parser_or_argument_of_the_engine_is_found() -> None:
    agent = {"kind": "tools", "tools": [{"path": "tools.py", "function": "f"}]}
    assert list(unsupported(parse_job(changed({"rollout.agent": agent})))) == []
    (problem,) = unsupported(parse_job(changed({"rollout.agent": {**agent, "toolParser": "hermess"}})))
    assert problem.field == "spec.rollout.agent.toolParser"
    assert problem.message == "vLLM has no parser 'hermess'"
    engine = {"arguments": {"kv_cache_memory_bytes": 1, "gpu_memory_utilisation": 0.5}}
    assert list(map(str, unsupported(parse_job(changed({"rollout.engine": engine}))))) == [
        "spec.rollout.engine.arguments: vLLM has no engine argument 'gpu_memory_utilisation'. "
        "Did you mean gpu_memory_utilization?"
    ]
    assert problem.remedy.startswith("Did you mean hermes? It has ")
