"""Scorers of group scope: who takes part, what their values do to the samples'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plaudit_reward.attempts import GroupStage, Rules, Stage
from plaudit_reward.isolation.function_scorer import PostProcess
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import Score
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.records import Sample, ScoringRecord
from reward_samples import make_sample
from scripted_scorer import ScriptedScorer

Open = Callable[..., Any]

NUMBERS = ScriptedScorer(
    "number", lambda sample: float(sample.response) if sample.response != "bad" else DataError("x")
)


async def score_all(pipeline: Pipeline, samples: list[Sample]) -> list[ScoringRecord]:
    return await pipeline.score_group(samples, [await pipeline.score(sample) for sample in samples])


@pytest.fixture
def samples() -> list[Sample]:
    return [make_sample(text, i) for i, text in enumerate(("1", "bad", "3"))]


async def test_a_group_scorer_adds_its_weighted_value_to_samples_that_have_one(samples: list[Sample]) -> None:
    length = ScriptedScorer("length", lambda sample: 10.0)
    pipeline = Pipeline([Stage(NUMBERS)], [GroupStage(length, Rules(weight=0.5))])
    scorings = await score_all(pipeline, samples)
    assert [scoring.value for scoring in scorings] == [6.0, None, 8.0]
    assert scorings[1].outcome == "data_error"
    assert "length" not in scorings[1].scorers
    assert scorings[0].scorers["length"].value == 10.0
    assert [scorings[0].scorers[name].of_group for name in ("number", "length")] == [False, True]


async def test_with_group_scorers_only_a_sample_has_no_value_of_its_own() -> None:
    group = ScriptedScorer("trl", lambda sample: float(sample.response))
    pipeline = Pipeline([], [GroupStage(group)])
    samples = [make_sample("1", 0), make_sample("2", 1)]
    assert [scoring.value for scoring in await score_all(pipeline, samples)] == [1.0, 2.0]


async def test_a_validation_sample_is_then_scored_as_a_group_of_one() -> None:
    group = ScriptedScorer("trl", lambda sample: float(sample.response))
    scoring = await Pipeline([], [GroupStage(group)]).score(make_sample("7", split="validation"))
    assert (scoring.value, scoring.scorers["trl"].value) == (7.0, 7.0)


POLICIES = [
    ("mask", "infra_error", [None, None, None], False),
    ("zero", "scored", [1.0, None, 3.0], False),
    ("ignore", "scored", [1.0, None, 3.0], False),
    ("dropGroup", "infra_error", [None, None, None], True),
]


@pytest.mark.parametrize(("policy", "outcome", "values", "drops"), POLICIES)
async def test_a_failed_group_scorer_follows_its_policy(
    samples: list[Sample], policy: Any, outcome: str, values: list[float | None], drops: bool
) -> None:
    away = ScriptedScorer("rank", lambda sample: InfrastructureError("away"))
    pipeline = Pipeline([Stage(NUMBERS)], [GroupStage(away, Rules(on_failure=policy, retries=0))])
    scorings = await score_all(pipeline, samples)
    assert [scoring.value for scoring in scorings] == values
    assert scorings[0].outcome == outcome
    assert scorings[0].drop_group is drops
    assert scorings[0].scorers["rank"].outcome == "infra_error"


async def test_values_can_be_replaced_by_a_function_of_all_of_them(samples: list[Sample], open_scorer: Open) -> None:
    source = """
    def post_process_scores(rewards):
        mean = sum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]
    """
    function = await open_scorer(source, "post_process_scores", scope="group")
    assert function.replaces_values
    pipeline = Pipeline([Stage(NUMBERS)], [GroupStage(function, replaces=True)])
    scorings = await score_all(pipeline, samples)
    assert [scoring.value for scoring in scorings] == [-1.0, None, 1.0]
    assert scorings[0].scorers["mine"].value == -1.0


async def test_a_replacing_function_that_fails_leaves_no_value_unless_it_is_ignored(samples: list[Sample]) -> None:
    broken = ScriptedScorer("spread", lambda sample: Score.failed("data_error", "returned 2 scores for 3 samples"))
    masked = Pipeline([Stage(NUMBERS)], [GroupStage(broken, replaces=True)])
    ignored = Pipeline([Stage(NUMBERS)], [GroupStage(broken, Rules(on_failure="ignore"), replaces=True)])
    assert [scoring.value for scoring in await score_all(masked, samples)] == [None, None, None]
    assert [scoring.value for scoring in await score_all(ignored, samples)] == [1.0, None, 3.0]


async def test_the_class_of_a_scorer_may_change_its_values_afterwards(samples: list[Sample], open_scorer: Open) -> None:
    source = """
    class Agent:
        def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
            return float(solution_str), solution_str, f"score: {solution_str}"
        def post_process_scores(self, rewards):
            return [10 * reward for reward in rewards]
    """
    agent = await open_scorer(source, "Agent")
    other = ScriptedScorer("other", lambda sample: 1.0)
    pipeline = Pipeline(
        [Stage(agent, Rules(weight=0.5)), Stage(other)], [GroupStage(PostProcess(agent), Rules(weight=0.5), of="mine")]
    )
    assert pipeline.scores_groups
    scorings = await score_all(pipeline, samples)
    assert [scoring.value for scoring in scorings] == [6.0, None, 16.0]
    record = scorings[0].scorers["mine"]
    assert (record.value, record.extra["before_post_process"], record.extra["explanation"]) == (10.0, 1.0, "score: 1")
    assert (record.post_process_s > 0, record.of_group) == (True, False)


async def test_trl_functions_score_a_group_in_one_call(open_scorer: Open) -> None:
    source = """
    def relative_length(completions, **columns):
        longest = max(map(len, completions))
        return [len(completion) / longest if completion else None for completion in completions]
    """
    function = await open_scorer(source, "relative_length", scope="group")
    samples = [make_sample(text, i) for i, text in enumerate(("ab", "", "abcd"))]
    scorings = await score_all(Pipeline([], [GroupStage(function)]), samples)
    assert [(scoring.outcome, scoring.value) for scoring in scorings] == [
        ("scored", 0.5),
        ("skipped", None),
        ("scored", 1.0),
    ]


async def test_a_group_without_any_value_is_left_alone() -> None:
    rank = ScriptedScorer("rank", lambda sample: 1.0)
    scorings = await score_all(Pipeline([Stage(NUMBERS)], [GroupStage(rank)]), [make_sample("bad")])
    assert (scorings[0].outcome, rank.num_calls) == ("data_error", 0)
