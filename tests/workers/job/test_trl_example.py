"""examples/06-trl-reward: its functions, its rows and its job, without running it (tests/e2e does)."""

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from plaudit_job.load import load_job
from plaudit_reward.functions.check import check
from plaudit_reward.functions.result import Target
from plaudit_workers.launch.code_checks import unsupported

EXAMPLE = Path(__file__).parents[3] / "examples" / "06-trl-reward"


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
