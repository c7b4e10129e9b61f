"""Estimators against values worked out by hand and against their formulas written down in plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from plaudit_workers.training.model.batch import ESTIMATORS, DegenerateGroups, degenerate_groups

GROUP_RELATIVE = ["grpo", "drGrpo", "rloo"]


def estimate(name, scores, group, num_tokens=None):
    tokens = np.ones(len(scores), dtype=np.int64) if num_tokens is None else np.array(num_tokens)
    return ESTIMATORS[name](np.array(scores, dtype=np.float64), np.array(group), tokens)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Scores 0, 1, 2, 5: mean 2, squared deviations 4 + 1 + 0 + 9 = 14, variance 14 / 3.
        ("grpo", [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 0, 3 / math.sqrt(14 / 3)]),
        ("drGrpo", [-2, -1, 0, 3]),
        # Against the mean of the others: 0 - 8/3, 1 - 7/3, 2 - 6/3, 5 - 3/3.
        ("rloo", [-8 / 3, -4 / 3, 0, 4]),
        # Over tokens of equal number: mean 2, variance 14 / 3.
        ("reinforcePlusPlus", [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 0, 3 / math.sqrt(14 / 3)]),
    ],
)
def test_one_group_by_hand(name, expected):
    assert estimate(name, [0, 1, 2, 5], [0, 0, 0, 0]) == pytest.approx(expected, abs=2e-6)


def test_grpo_equals_torch_group_by_group():
    scores, group = [0.3, 1.0, 0.1, 0.7, 0.0, 1.0], [0, 1, 0, 1, 0, 1]
    found = estimate("grpo", scores, group)
    for number in (0, 1):
        own = torch.tensor([score for score, of in zip(scores, group, strict=True) if of == number])
        expected = (own - own.mean()) / (own.std() + 1e-6)
        assert found[np.array(group) == number] == pytest.approx(expected.numpy(), abs=1e-6)


def test_reinforce_plus_plus_is_the_whitening_of_a_token_matrix():
    scores, lengths = [1.0, 0.0, 0.25], [3, 1, 6]
    tokens = [score for score, length in zip(scores, lengths, strict=True) for _ in range(length)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    expected = [(score - mean) / math.sqrt(variance + 1e-8) for score in scores]
    assert estimate("reinforcePlusPlus", scores, [0, 0, 1], lengths) == pytest.approx(expected)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_lone_survivor_teaches_nothing(name):
    assert estimate(name, [0.9, 0.0, 1.0], [0, 1, 1])[0] == 0.0


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_equal_scores_give_exactly_zero(name):
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert list(estimate(name, [0.1, 0.1, 0.1], [0, 0, 0])) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_no_samples_give_no_advantages(name):
    assert estimate(name, [], np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_advantages_of_a_group_sum_to_zero(name):
    found = estimate(name, [0.2, 0.9, 0.4, 1.0, 0.0], [0, 1, 0, 1, 0])
    assert found[[0, 2, 4]].sum() == pytest.approx(0, abs=1e-12)
    assert found[[1, 3]].sum() == pytest.approx(0, abs=1e-12)


def test_degenerate_groups_are_distinguished():
    scores, group = np.array([1.0, 0.5, 0.5, 0.0, 1.0]), np.array([0, 1, 1, 2, 2])
    assert degenerate_groups(scores, group) == DegenerateGroups(single=1, zero_variance=1)
