"""Weights, failures and their policies: what a sample's scorers come to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_reward.attempts import FailurePolicy, NonePolicy, ScorerPart, values_of, weighted_sum
from plaudit_wire.records import ScorerRecord


def ok(value: float, weight: float = 1.0, name: str = "a") -> ScorerPart:
    return ScorerPart(name, weight, "mask", ScorerRecord("scored", value))


def bad(
    outcome: str = "infra_error",
    policy: FailurePolicy = "mask",
    weight: float = 1.0,
    name: str = "bad",
    attempts: int = 1,
    on_none: NonePolicy = "mask",
) -> ScorerPart:
    record = ScorerRecord(outcome, reason="why", attempts=attempts)  # type: ignore[arg-type]
    return ScorerPart(name, weight, policy, record, on_none)


HELD_BACK = bad("skipped", name="held", attempts=0)

CASES: list[tuple[Sequence[ScorerPart], str, float | None, bool]] = [
    ([ok(0.5)], "scored", 0.5, False),
    ([ok(0.5, 2.0), ok(1.0, -1.0)], "scored", 0.0, False),
    ([ok(0.5), bad()], "infra_error", None, False),
    ([ok(0.5), bad("timeout")], "timeout", None, False),
    ([ok(0.5), bad("skipped")], "skipped", None, False),
    ([ok(0.5), bad(weight=0.0)], "scored", 0.5, False),
    ([ok(0.5), bad(policy="zero")], "scored", 0.5, False),
    ([bad(policy="zero")], "scored", 0.0, False),
    ([ok(0.5), bad(policy="ignore")], "scored", 0.5, False),
    ([bad(policy="ignore")], "infra_error", None, False),
    ([ok(0.5), bad(policy="dropGroup")], "infra_error", None, True),
    ([bad("skipped", "zero")], "skipped", None, False),
    ([bad("skipped", "dropGroup")], "skipped", None, False),
    ([ok(0.5), bad("skipped", "ignore")], "skipped", None, False),
    ([ok(0.5), bad("skipped", on_none="ignore")], "scored", 0.5, False),
    ([ok(0.5), bad("data_error", on_none="ignore")], "data_error", None, False),
    ([bad("skipped", on_none="ignore")], "skipped", None, False),
    ([ok(0.5), HELD_BACK], "scored", 0.5, False),
    ([HELD_BACK], "skipped", None, False),
    ([bad("skipped", name="first"), bad("timeout", name="second")], "timeout", None, False),
    ([bad("data_error"), bad("timeout", name="second")], "data_error", None, False),
    ([ok(0.5, 0.0)], "skipped", None, False),
    ([ok(1e308), ok(1e308)], "data_error", None, False),
    ([], "skipped", None, False),
]


@pytest.mark.parametrize(("parts", "outcome", "value", "drops"), CASES)
def test_the_outcome_rule(parts: Sequence[ScorerPart], outcome: str, value: float | None, drops: bool) -> None:
    combined = weighted_sum(parts)
    assert (combined.score.outcome, combined.score.value, combined.drop_group) == (outcome, value, drops)


def test_the_reason_names_the_scorer() -> None:
    assert weighted_sum([ok(1.0), bad(name="judge")]).score.reason == "judge: why"


def test_before_group_scorers_have_spoken_a_sample_without_failures_passes() -> None:
    assert weighted_sum([], provisional=True).score.outcome == "scored"
    assert weighted_sum([bad()], provisional=True).score.outcome == "infra_error"


def test_a_combining_function_sees_absent_values_as_none_and_zeroes_only_on_request() -> None:
    parts = [ok(0.5), bad(name="b"), bad(policy="zero", name="c"), bad("skipped", "zero", name="d")]
    assert values_of(parts) == {"a": 0.5, "b": None, "c": 0.0, "d": None}


records = st.one_of(
    st.floats(0.5, 10).map(lambda value: ScorerRecord("scored", value)),
    st.sampled_from(["data_error", "infra_error", "timeout", "skipped"]).map(ScorerRecord),
    st.just(ScorerRecord("skipped", attempts=0)),
)
parts = st.lists(
    st.builds(
        ScorerPart,
        st.text("abc", min_size=1),
        st.sampled_from([0.0, 0.5, 2.0]),
        st.sampled_from(["mask", "dropGroup"]),
        records,
    ),
    max_size=5,
)


@given(parts)
def test_no_zero_is_invented(parts: list[ScorerPart]) -> None:
    """All values are at least 0.5 and weights not negative, so a reward below 0.25 could only come from a failure."""
    score = weighted_sum(parts).score
    counted = [part for part in parts if part.weight and not part.held_back]
    if score.outcome == "scored":
        assert score.value is not None
        assert score.value >= 0.25
        assert all(part.record.value is not None for part in counted)
        assert math.isclose(score.value, sum(part.weight * (part.record.value or math.nan) for part in counted))
    else:
        assert score.value is None
        assert not counted or any(part.record.value is None for part in counted)
