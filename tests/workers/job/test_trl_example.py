"""examples/06-trl-reward: its functions, its rows and its job, without running it (tests/e2e does)."""

import json
import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from plaudit_job.load import load_job
from plaudit_reward.functions.check import check
from plaudit_reward.functions.result import Target
from plaudit_workers.cli import main
from plaudit_workers.launch.code_checks import unsupported

EXAMPLE = Path(__file__).parents[3] / "examples" / "06-trl-reward"


PAGE = EXAMPLE.parents[1] / "docs" / "coming-from-trl.md"
REWARDS = """
def accuracy_reward(prompts, completions, answer, level, **kwargs):
    return [float(text[0]["content"] == right) for text, right in zip(completions, answer)]


def brevity_reward(completions, **kwargs):
    return [None if len(text[0]["content"]) > 99 else 1.0 for text in completions]
"""


def test_the_job_of_the_page_is_valid_with_the_file_and_the_functions_of_a_user_of_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    job, commands = re.findall(r"```(?:yaml|sh)\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    assert [line.split()[:3] for line in commands.splitlines()] == [
        ["plaudit", name, "job.yaml"] for name in ("validate", "try", "run")
    ]
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "rewards.py").write_text(REWARDS)
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "level": "easy"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 0
    assert main(["try", str(tmp_path / "job.yaml"), "--rows", "1"]) == 0
    assert "accuracy_reward" in capsys.readouterr().out


def functions() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "reward.py"))


@pytest.mark.parametrize("chat", [True, False], ids=["conversational", "plain"])
def test_the_functions_take_conversational_and_plain_completions(chat: bool) -> None:
    texts = ["12 it is", "no idea", "so 13, I think"]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    accuracy = functions()["accuracy"](["?"] * 3, completions, solution=["12"] * 3, level=["easy"] * 3)
    assert accuracy == [1.0, None, 0.0]
    assert functions()["brevity"](completions=completions) == [7 / 8, 1.0, 0.5]


def test_its_job_runs_as_it_is_and_its_functions_fit() -> None:
    job = load_job(EXAMPLE / "job.yaml")
    assert list(unsupported(job)) == []
    for scorer in job.spec.reward.scorers:
        assert scorer.python is not None
        assert check(Target(scorer.python.path, scorer.python.function, scope=scorer.scope)).problem is None


def test_a_row_keeps_the_columns_that_its_functions_ask_for() -> None:
    names = runpy.run_path(str(EXAMPLE / "prepare.py"))
    row = names["job_row"](names["trl_row"](random.Random(1)))
    assert row["extra_info"].keys() == {"solution", "level"}
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["solution"]
    assert row["prompt"][0]["role"] == "user"
