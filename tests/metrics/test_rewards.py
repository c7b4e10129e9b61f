"""Groups without a signal, length, and what several samples of a prompt tell."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_sample_record
from plaudit_metrics.statistics.columns import SampleColumns
from plaudit_metrics.statistics.stages import best_of, majority
from plaudit_metrics.statistics.steps import reward_statistics, step_record
from plaudit_wire.records import GenerationRecord, ScoringRecord, Stamps


def statistics(*groups):
    """Groups of (reward, response tokens); a reward of None is a failure."""
    return reward_statistics(
        SampleColumns.from_records(
            make_sample_record(
                Stamps(1.0),
                ScoringRecord("scored", value) if value is not None else ScoringRecord("timeout"),
                group=f"t-{number}-1.0",
                index=index,
                generation=GenerationRecord("rollout-0", 1.0, 10, tokens, 0, 0),
            )
            for number, group in enumerate(groups)
            for index, (value, tokens) in enumerate(group)
        )
    )


def test_groups_are_solved_by_all_or_by_none_of_their_samples():
    solved, failed = [(1.0, 5), (1.0, 6)], [(0.0, 5), (-0.5, 6), (None, 7)]
    mixed, alone = [(0.0, 5), (1.0, 5)], [(1.0, 5), (None, 5)]
    found = statistics(solved, failed, mixed, alone)
    assert found["reward/solved_all_share"] == found["reward/solved_none_share"] == pytest.approx(1 / 3)
    assert found["reward/zero_variance_share"] == pytest.approx(1 / 3)


def test_length_is_compared_within_groups():
    # Within each group the longer response earns more, although the group of long ones earns less.
    assert statistics([(1.0, 10), (0.8, 8)], [(0.2, 100), (0.0, 98)])["reward/length_correlation"] == pytest.approx(1)
    assert statistics([(0.0, 10), (1.0, 8)])["reward/length_correlation"] == pytest.approx(-1)
    assert "reward/length_correlation" not in statistics([(1.0, 10), (1.0, 8)])
    assert statistics([(None, 10)]) == {}


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.data())
def test_best_of_is_the_mean_over_all_draws(values, data):
    count = data.draw(st.integers(1, len(values)))
    draws = [max(draw) for draw in itertools.combinations(values, count)]
    assert best_of(values, count) == pytest.approx(sum(draws) / len(draws), abs=1e-9)


@pytest.mark.parametrize("largest", [100.0, sys.float_info.max])
def test_best_of_very_many_and_of_enormous_rewards_is_a_number(largest):
    assert best_of([largest, -largest] * 512, 512) == pytest.approx(largest)
    assert best_of([-largest] * 1024, 512) == pytest.approx(-largest)
    assert best_of([largest, largest, -largest], 1) == pytest.approx(largest / 3)
    assert majority([("4", largest), ("4", largest)]) == largest


def test_the_majority_is_the_most_frequent_answer_and_of_equals_the_first():
    assert majority([("4", 1.0), ("5", 0.0), ("5", 0.0)]) == 0
    assert majority([("4", 1.0), ("5", 0.0)]) == 1
    assert majority([("4", 1.0), ("4", 0.0), ("5", 0.5)]) == 0.5


def test_samples_that_end_at_the_token_limit_are_truncated():
    reasons = ["length", "stop", "length", "tool", None]
    samples = [
        make_sample_record(
            Stamps(1.0),
            ScoringRecord("scored", 1.0),
            group="t-0-1.0",
            index=index,
            generation=reason and GenerationRecord("rollout-0", 1.0, 10, 4, 0, 0, finish_reason=reason),
        )
        for index, reason in enumerate(reasons)
    ]
    found = step_record(1, 1, samples, opened=0.0, closed=2.0).statistics
    assert found["generation/truncated_share"] == 0.5  # a sample without a generation does not count
