"""GDPO's normalisation: each scorer over its group, before the weighted sum."""

from __future__ import annotations

import math
import statistics
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_reward.attempts import GroupStage, Rules, ScorerPart, Stage, weighted_sum
from plaudit_reward.pipeline import Pipeline, normalised
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.records import ScorerRecord
from reward_samples import make_sample
from scripted_scorer import ScriptedScorer


def part(name: str, value: float | None, weight: float = 1.0, policy: str = "mask") -> ScorerPart:
    record = ScorerRecord("scored", value) if value is not None else ScorerRecord("timeout")
    return ScorerPart(name, weight, policy, record)  # type: ignore[arg-type]


def sums(*group: list[ScorerPart]) -> list[float | None]:
    return [weighted_sum(parts).score.value for parts in normalised(group)]


def test_two_rewards_with_equal_sums_are_distinguished() -> None:
    """The paper's example: totals (0, 1) and (0, 2) are the same to GRPO, and not here."""
    one = sums([part("a", 0.0), part("b", 0.0)], [part("a", 0.0), part("b", 1.0)])
    both = sums([part("a", 0.0), part("b", 0.0)], [part("a", 1.0), part("b", 1.0)])
    half = math.sqrt(0.5)
    assert one == pytest.approx([-half, half], rel=1e-5)
    assert both == pytest.approx([-2 * half, 2 * half], rel=1e-5)


def test_weights_count_and_scales_do_not() -> None:
    group = [[part("a", float(i), 2.0), part("b", 1000.0 * i, -1.0)] for i in range(3)]
    assert sums(*group) == pytest.approx([-1.0, 0.0, 1.0], rel=1e-5)


def test_a_scorer_without_spread_counts_nothing() -> None:
    assert sums([part("a", 5.0)], [part("a", 5.0)]) == [0.0, 0.0]
    assert sums([part("a", 5.0)]) == [0.0]


def test_a_failure_is_left_out_of_the_mean_unless_it_counts_as_zero() -> None:
    masked = sums([part("a", 1.0)], [part("a", 3.0)], [part("a", None)])
    assert masked == [pytest.approx(-math.sqrt(0.5), rel=1e-5), pytest.approx(math.sqrt(0.5), rel=1e-5), None]
    zero = sums([part("a", 1.0)], [part("a", -1.0)], [part("a", None, policy="zero")])
    assert zero == pytest.approx([1.0, -1.0, 0.0], rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8).filter(lambda v: statistics.pstdev(v) > 1e-3))
def test_the_values_of_a_scorer_have_mean_0_and_deviation_1(values: list[float]) -> None:
    found = [parts[0].record.value or 0.0 for parts in normalised([[part("a", value)] for value in values])]
    assert statistics.fmean(found) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(found) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("large", [1e155, 1e200, sys.float_info.max])
def test_values_whose_squares_are_no_floats_are_normalised_like_others(large: float) -> None:
    half = math.sqrt(0.5)
    assert sums([part("a", large)], [part("a", -large)]) == pytest.approx([half, -half])
    assert sums([part("a", large)], [part("a", large / 2)]) == pytest.approx([half, -half])
    assert sums([part("a", large)], [part("a", large)]) == [0.0, 0.0]


async def test_a_pipeline_normalises_a_complete_group_and_keeps_the_scorers_values() -> None:
    number = ScriptedScorer("number", lambda sample: float(sample.response))
    length = ScriptedScorer("length", lambda sample: 100.0 * len(sample.response))
    pipeline = Pipeline([Stage(number)], [GroupStage(length, Rules(weight=0.5))], normalize=True)
    samples = [make_sample(text, i) for i, text in enumerate(("1", "22", "333"))]
    scorings = await pipeline.score_group(samples, [await pipeline.score(sample) for sample in samples])
    spread = statistics.stdev((1, 22, 333))
    assert [s.value for s in scorings] == pytest.approx(
        [(n - 356 / 3) / spread + 0.5 * rank for n, rank in zip((1, 22, 333), (-1, 0, 1), strict=True)], rel=1e-4
    )
    assert [s.scorers["number"].value for s in scorings] == [1.0, 22.0, 333.0]
    validation = await pipeline.score(make_sample("7", split="validation"))
    assert validation.value == 7.0


ALONE = [
    ("mask", None),
    ("dropGroup", None),
    ("zero", 3.0),
    ("ignore", 3.0),
]


@pytest.mark.parametrize(("policy", "value"), ALONE)
async def test_a_sample_keeps_its_fallback_score_if_its_group_is_never_scored(policy: str, value: float | None) -> None:
    number = ScriptedScorer("number", lambda sample: 3.0)
    rank = ScriptedScorer("rank", lambda sample: InfrastructureError("away"))
    rules = Rules(on_failure=policy, retries=0)  # type: ignore[arg-type]
    pipeline = Pipeline([Stage(number)], [GroupStage(rank, rules)])
    scoring = await pipeline.score(make_sample())
    assert scoring.alone == value
    [scored] = await pipeline.score_group([make_sample()], [scoring])
    assert (scored.value, scored.alone) == (value, None)  # the same as when the scorer itself fails
    replacing = Pipeline([Stage(number)], [GroupStage(rank, rules, replaces=True)])
    assert (await replacing.score(make_sample())).alone == (0.0 if policy == "zero" else value)
