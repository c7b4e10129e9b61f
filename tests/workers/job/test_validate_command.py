"""``plaudit validate`` reports every problem that ``plaudit run`` would, in one list with one exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_job.load import parse_job
from plaudit_workers.cli import main
from plaudit_workers.launch import code_checks
from plaudit_workers.launch.code_checks import lacking_gpus, lacking_packages
from small_job import changed, problems_of

REWARDS = """
import nowhere_to_be_found

def compute_score(sample): ...
"""
TRL = "def accuracy_reward(completions, solution, level): return [1.0 for _ in completions]\n"
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: scores}
spec:
  reward:
    retry: 3
    scorers:
      - {name: accuracy_reward, kind: python, python: {path: rewards.py}}
      - {name: other, kind: python, python: {path: other.py, arguments: {typo: 1}}}
      - {name: gated, kind: rule, rule: gsm8k, when: {scorer: nobody, equals: 1}}
      - {name: gone, kind: python, python: {path: gone.py}}
"""


def lines_of(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["validate", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return [line.removeprefix(f"{path}:") for line in printed.err.splitlines()]


def test_fields_rules_files_imports_and_arguments_are_one_list(
    write_job: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "other.py").write_text("def compute_score(sample): ...\n")
    found = lines_of(write_job(JOB), capsys)
    assert [line.split(": ")[:2] for line in found] == [
        ["7", "spec.reward.retry"],
        ["9", "spec.reward.scorers[0].python"],
        ["10", "spec.reward.scorers[1].python"],
        ["11", "spec.reward.scorers[2].when.scorer"],
        ["12", "spec.reward.scorers[3].python.path"],
    ]
    assert "No module named 'nowhere_to_be_found'" in found[1]
    assert "has no parameter 'typo'" in found[2]


@pytest.mark.parametrize("field", ["reward.scorers.0.kind", "rewards"])
def test_a_broken_scorer_causes_no_problem_of_the_data(
    write_job: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    """What stands in for the scorer is a rule, and the rows have none."""
    row = {"data_source": "mine", "prompt": "b", "reward_model": {"ground_truth": "c"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    given = changed({"data.train.path": "rows.jsonl", **({field: "pyton"} if "." in field else {})})
    if field == "rewards":
        given["spec"]["rewards"] = given["spec"].pop("reward")
    found = lines_of(write_job(given), capsys)
    assert [line for line in found if "spec.data" in line or "has no rule" in line] == []
    assert any(f"spec.{field.replace('.0.', '[0].')}: " in line for line in found)


def test_a_reward_file_whose_import_does_not_end_is_noted(
    write_job: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("plaudit_reward.functions.check.IMPORTED_WITHIN_S", 0.01)
    (tmp_path / "rewards.py").write_text("def compute_score(sample): ...\n")
    path = write_job(JOB[: JOB.index("      - {name: other")].replace("    retry: 3\n", ""))
    assert main(["validate", str(path)]) == 0
    assert f"importing {tmp_path}/rewards.py took more than" in capsys.readouterr().out


def test_a_feature_that_plaudit_run_lacks_is_a_problem(
    write_job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines_of(write_job(changed({"rollout.sampling": {"topP": 0.9}})), capsys)
    assert any("topP 0.9, topK -1 cut the distribution" in line for line in found)


def test_columns_that_a_trl_function_requires_are_compared_with_the_data(
    write_job: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"data_source": "a", "prompt": "b", "reward_model": {"ground_truth": "c"}}
    rows = [{**row, "extra_info": {"level": 1, "unit": "m"}}, {**row, "extra_info": '{"unit": "m"}'}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    (tmp_path / "rewards.py").write_text(TRL)
    scorer = {"name": "accuracy_reward", "kind": "python", "scope": "group"}
    scorer["python"] = {"path": "rewards.py", "function": "accuracy_reward"}  # type: ignore[assignment]
    job = changed({"reward.scorers": [scorer], "data.train.path": "rows.jsonl"})
    found = [line for line in lines_of(write_job(job), capsys) if "accuracy_reward" in line]
    assert len(found) == 1
    assert "accuracy_reward requires column level, which extra_info of" in found[0]
    assert "does not have in every row (it has unit)" in found[0]


@pytest.mark.parametrize(
    ("agent", "found"),
    [
        ({"kind": "singleTurn"}, ["held requires environments, but no sample is played in an environment's class"]),
        ({"kind": "environment", "url": "http://127.0.0.1:1"}, ["held requires environments, but no sample"]),
        ({"kind": "environment", "path": "rewards.py", "class": "Board"}, []),
    ],
)
def test_a_function_that_requires_environments_needs_an_agent_that_plays_in_them(
    write_job: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    agent: dict[str, Any],
    found: list[str],
) -> None:
    row = {"data_source": "a", "prompt": "b", "reward_model": {"ground_truth": "c"}, "extra_info": {}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "rewards.py").write_text(
        "class Board:\n    def reset(self): pass\n\n\ndef held(completions, environments): return [1.0]"
    )
    scorer = {"name": "held", "kind": "python", "scope": "group", "python": {"path": "rewards.py", "function": "held"}}
    job = changed({"reward.scorers": [scorer], "data.train.path": "rows.jsonl", "rollout.agent": agent})
    lines = [line for line in lines_of(write_job(job), capsys) if "environments" in line and "held" in line]
    assert len(lines) == len(found)
    assert all(words in line for words, line in zip(found, lines, strict=True))


@pytest.mark.parametrize(
    ("field", "agent"),
    [
        ("spec.rollout.agent.url", {"kind": "environment", "url": "http://127.0.0.1:1"}),
        ("spec.rollout.agent.tools[0].mcp.url", {"kind": "tools", "tools": [{"mcp": {"url": "http://127.0.0.1:1"}}]}),
    ],
)
def test_servers_that_only_a_cluster_reaches_leave_a_job_valid(
    write_job: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    agent: dict[str, Any],
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    row = {"data_source": "a", "prompt": "b", "reward_model": {"ground_truth": "c"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    section = {"model": "m", "baseUrl": "http://127.0.0.1:1/v1", "promptTemplate": {"path": "judge.j2"}}
    judge = {"name": "judge", "kind": "judge", "judge": {**section, "parse": {"jsonPath": "$.score"}}}
    (tmp_path / "judge.j2").write_text("{{ response }}")
    fields = {"model.source": "hub/id", "data.train.path": "rows.jsonl", "reward.scorers": [judge]}
    assert main(["validate", str(write_job(changed({**fields, "rollout.agent": agent})))]) == 0
    printed = capsys.readouterr().out
    refused = "accepts no connection from this machine (Connection refused). Start the server before the run"
    assert f"{field}: http://127.0.0.1:1 {refused}" in printed
    assert f"spec.reward.scorers[0].judge.baseUrl: http://127.0.0.1:1/v1 {refused}" in printed


@pytest.mark.parametrize(
    ("fields", "suggestion"),
    [
        ({"algorithm.learningRate": 1e-5}, "Did you mean spec.algorithm.optimizer.learningRate? Fields here: steps"),
        ({"trainer.learningRate": 1e-5}, "Did you mean spec.algorithm.optimizer.learningRate? Fields here: ranks"),
        ({"algorithm.everySteps": 1}, "Did you mean spec.data.validation.everySteps or spec.trainer.checkpoint."),
        ({"reward.judge": {}}, "Did you mean spec.reward.scorers[].judge? Fields here: "),
    ],
)
def test_a_field_in_the_wrong_section_is_shown_its_section(fields: dict[str, Any], suggestion: str) -> None:
    (problem,) = problems_of(changed(fields))
    assert problem.remedy.startswith(suggestion)


def test_a_reward_model_s_name_names_pods() -> None:
    model = {"name": "my_model", "kind": "model", "model": {"source": "./m"}}
    (problem,) = problems_of(changed({"reward.scorers": [model]}))
    assert (problem.field, problem.remedy) == ("spec.reward.scorers[0].name", "Use '-': my-model")


LOSSES = """
import os

print("imported")

def good(tokens, anchor, settings):
    return -tokens.advantages * tokens.logprobs

def detached(tokens, anchor, settings):
    return -tokens.advantages * tokens.logprobs.detach()

def ends(tokens, anchor, settings):
    os._exit(9)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("detached", "returned losses without a gradient, so nothing would be trained"),
        ("ends", "ended its process (exit status 9"),
        ("good", ""),
    ],
)
def test_a_loss_of_the_user_s_is_computed_once(
    write_job: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, words: str
) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    path = write_job(changed({"algorithm.loss": {"kind": "python", "path": "losses.py", "function": function}}))
    found = [line for line in lines_of(path, capsys) if "spec.algorithm.loss" in line]
    assert len(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        (
            {"engine": {"tensorParallelSize": 2}},
            "spec.rollout.engine.tensorParallelSize: one copy of the model takes 2 GPUs, and this machine has 0",
        ),
        ({"engine": {"tensorParallelSize": 1}}, ""),
        ({"engine": {"kind": "scripted", "tensorParallelSize": 2}}, ""),
        ({"engine": {"tensorParallelSize": 2}, "pod": {"resources": {"limits": {"nvidia.com/gpu": 0}}}}, ""),
        (
            {"groups": [{"name": "a", "engine": {"pipelineParallelSize": 4}}]},
            "spec.rollout.groups[0].engine.pipelineParallelSize: one copy",
        ),
    ],
    ids=["two", "one", "without a model", "on CPUs", "a group"],
)
def test_engines_of_more_gpus_than_the_machine_has_are_named(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = "".join(map(str, lacking_gpus(parse_job(changed({"rollout": rollout})))))
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_packages_that_a_run_would_lack_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = parse_job(changed({"rollout.engine.kind": "vllm"}))
    assert list(lacking_packages(job)) == []
    monkeypatch.setattr(code_checks, "find_spec", lambda package: None)
    engine, trainer = map(str, lacking_packages(job))
    assert engine.startswith("spec.rollout.engine.kind: vllm is not installed for ")
    assert "Install plaudit-workers[training], or run the job where it is" in trainer
