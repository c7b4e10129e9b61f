"""A job's reward section becomes a pipeline, or is refused in words with nothing left running."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from plaudit_wire.errors import RefusedError
from plaudit_wire.records import Sample
from plaudit_workers.job_start import has_group_scorers
from plaudit_workers.service.build import build_pipeline

Make = Callable[..., Any]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


SAMPLE = Sample("t-0-1.0", 0, "openai/gsm8k", "2 + 2?", "#### 4", ground_truth="4")

REFUSED = [
    ("def f(sample: pass", "line 1"),
    ("def g(sample): pass", "f does not exist"),
    ("def f(sample, k): pass", "python.arguments.k"),
    ("raise OSError('no such thing')", "cannot be imported: OSError: no such thing"),
]


@pytest.mark.parametrize(("source", "words"), REFUSED)
async def test_a_scorer_that_cannot_work_refuses_the_job_and_leaves_nothing(
    make_reward: Make, source: str, words: str
) -> None:
    before = children()
    reward = make_reward([{"name": "correct", "kind": "rule"}, {"name": "mine", "function": "f"}], source)
    with pytest.raises(RefusedError) as refusal:
        await build_pipeline(reward, "reward-0")
    assert words in str(refusal.value)
    assert children() == before


async def test_all_refusals_are_reported_at_once(make_reward: Make) -> None:
    reward = make_reward([{"name": "a", "function": "f"}, {"name": "b", "function": "g"}], "x = 1")
    with pytest.raises(RefusedError, match=r"(?s)f does not exist.*g does not exist"):
        await build_pipeline(reward, "reward-0")


async def test_a_reward_model_without_a_server_is_refused(make_reward: Make) -> None:
    reward = make_reward([{"name": "helpful", "kind": "model", "model": {"source": "some/model"}}])
    with pytest.raises(RefusedError, match="scorer helpful: the address of its model is missing"):
        await build_pipeline(reward, "reward-0")


async def test_settings_of_the_job_reach_the_scorers(make_reward: Make) -> None:
    source = """
import time
def slow(sample): time.sleep(1000)
def bonus(sample, by): return by
def total(values): return 100 * values["bonus"] + (values["slow"] or 0)
"""
    reward = make_reward(
        [
            {"name": "correct", "kind": "rule", "rule": "gsm8k", "weight": 0},
            {"name": "bonus", "function": "bonus", "arguments": {"by": 2}, "when": {"scorer": "correct", "equals": 1}},
            {"name": "slow", "function": "slow", "timeoutSeconds": 0.2, "onFailure": "ignore"},
        ],
        source,
        combine={"kind": "python", "path": "rewards.py", "function": "total"},
    )
    reward = reward.model_copy(
        update={"combine": reward.combine.model_copy(update={"path": reward.scorers[1].python.path})}
    )
    pipeline = await build_pipeline(reward, "reward-0")
    scoring = await pipeline.score(SAMPLE)
    await pipeline.close()
    assert (scoring.value, scoring.worker) == (200.0, "reward-0")
    assert scoring.scorers["slow"].outcome == "timeout"


GROUPS = [
    ([{"name": "correct", "kind": "rule"}], "", False),
    ([{"name": "mine", "function": "f"}], "def f(sample): pass", False),
    ([{"name": "mine", "function": "f", "scope": "group"}], "def f(samples): pass", True),
    ([{"name": "mine", "function": "A"}], "class A:\n    def post_process_scores(self, rewards): pass", True),
]


@pytest.mark.parametrize(("scorers", "source", "expected"), GROUPS)
def test_the_trainer_learns_whether_groups_are_scored(
    make_reward: Make, scorers: list[dict[str, Any]], source: str, expected: bool
) -> None:
    assert has_group_scorers(make_reward(scorers, source)) is expected


async def test_closing_the_pipeline_ends_its_children(make_reward: Make) -> None:
    before = children()
    pipeline = await build_pipeline(make_reward([{"name": "mine", "function": "f"}], "def f(sample): return 1"), "r")
    assert children() > before
    await pipeline.score(SAMPLE)
    await pipeline.close()
    assert children() == before
    assert str(os.getpid()) not in children()
