"""``plaudit try``: the scorers on the first rows of the data, before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plaudit_workers.cli import main
from tiny_vision import noise_image, vision_row

REWARDS = """
def exact(solution_str, ground_truth):
    print("compares", repr(solution_str))
    return float(solution_str == ground_truth)

def broken(sample):
    return {}["answer"]

def longest(samples):
    return [float(len(s.response) == max(len(s.response) for s in samples)) for s in samples]
"""
ROWS: list[dict[str, Any]] = [
    {"data_source": "openai/gsm8k", "prompt": "2+2?", "reward_model": {"ground_truth": "4"}},
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "3+2?"}],
        "reward_model": {"ground_truth": "5"},
        "extra_info": '{"answer": "3+2 is #### 5"}',
    },
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows, reward functions, and the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def tried(folder: Path, *scorers: str, data: str = "rows.jsonl") -> int:
    (folder / "job.yaml").write_text(
        "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: new}\n"
        f"spec: {{reward: {{workers: {{processes: 1}}, scorers: [{', '.join(scorers)}]}}}}\n"
    )
    return main(["try", "job.yaml", "--data", data])


def python(function: str, **more: str) -> str:
    fields = {"name": function, "kind": "python", **more}
    return json.dumps({**fields, "python": {"path": "rewards.py", "function": function}})


def test_answers_are_compared_with_empty_responses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scorers = ("{name: gsm8k, kind: rule, rule: gsm8k}", python("exact"), python("longest", scope="group"))
    assert tried(folder, *scorers) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "row 1 (openai/gsm8k)"
    assert "  2  ground truth '4': gsm8k 0 (" in lines[1]
    assert "  0  empty response: gsm8k 0 (" in lines[2]
    assert "  2  extra_info.answer '3+2 is #### 5': gsm8k 1 (" in lines[4]
    assert lines[-1] == "the answer scores higher than an empty response in 2 of 2 rows"
    assert "exact: compares '4'" in printed.err


def test_a_function_that_raises_shows_its_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(folder, python("broken")) == 1
    out = capsys.readouterr().out
    assert "  no score  ground truth '4': broken data_error (" in out
    assert "      broken: KeyError: 'answer'" in out
    assert out.endswith("in 0 of 2 rows; 4 of 4 samples have no score\n")


def test_the_reason_of_each_scorer_is_shown_also_where_the_sample_has_a_reward(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(folder, python("exact"), python("broken", onFailure="ignore")) == 0
    out = capsys.readouterr().out
    assert "  1  ground truth '4': exact 1 (" in out
    assert "      broken: KeyError: 'answer'" in out


def test_reward_models_are_skipped_and_other_data_is_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "{name: helpful, kind: model, model: {source: ./m}}"
    assert tried(folder, model, python("exact")) == 0
    assert "skipped, because only a run serves their models: helpful" in capsys.readouterr().err
    assert tried(folder, model) == 2
    assert tried(folder, python("exact"), data="absent.jsonl") == 2
    assert "--data: absent.jsonl: does not exist" in capsys.readouterr().err


def test_rows_with_images_are_tried_without_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.png").write_bytes(noise_image(1))
    row = vision_row(0, ["a.png"])
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"images": []}) + "\n")
    job = (
        "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: new}\nspec:\n  model: {source: ./model}\n"
        f"  data: {{train: {{path: rows.jsonl}}, images: {{}}}}\n  algorithm: {{steps: 1}}\n  rollout: {{}}\n"
        f"  trainer: {{}}\n  reward: {{workers: {{processes: 1}}, scorers: [{python('exact')}]}}\n"
    )
    (folder / "job.yaml").write_text(job)
    assert main(["try", "job.yaml", "--rows", "1"]) == 2
    assert "row 2: column images has 0 images, but the prompt has 1 place for one" in capsys.readouterr().err
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["try", "job.yaml"]) == 0
    assert "in 1 of 1 rows" in capsys.readouterr().out
