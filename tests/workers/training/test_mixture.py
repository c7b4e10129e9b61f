"""Mixtures: shares of an epoch, every row once before it repeats, the same order at every start."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_job.spec.rollout import WeightedDataSpec
from plaudit_workers.data_files import RowError
from plaudit_workers.training.data import EpochOrder, mixture_parts


def mixture(weights, sizes):
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return mixture_parts([WeightedDataSpec(path=f"{weight}", weight=weight) for weight in weights], ends)


PARTS = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), min_size=2, max_size=4)


@given(PARTS, st.one_of(st.none(), st.integers(0, 2**32)))
def test_parts_have_their_shares_and_repeat_no_row_before_all_were_used(parts, seed):
    parts = mixture(*zip(*parts, strict=True))
    order = EpochOrder(parts, seed)
    epochs = 3
    drawn = [order.at(position) for position in range(epochs * len(order))]
    for part in parts:
        visits = Counter(number for number in drawn if part.start <= number < part.end)
        assert visits.total() == epochs * part.places
        assert max(visits.values()) - min(visits[number] for number in range(part.start, part.end)) <= 1
    assert drawn == [EpochOrder(parts, seed).at(position) for position in range(epochs * len(order))]


def test_places_follow_the_weights_and_sum_to_the_rows():
    assert [part.places for part in mixture([3, 1], [10, 30])] == [30, 10]
    assert [part.places for part in mixture([1, 1, 1], [5, 4, 1])] == [4, 3, 3]


def test_without_a_seed_parts_alternate():
    order = EpochOrder(mixture([1, 1], [2, 2]), None)
    assert [order.at(position) for position in range(4)] == [0, 2, 1, 3]


def test_a_part_without_a_used_row_is_refused():
    with pytest.raises(RowError, match="has no prompt that the run uses"):
        mixture([1, 1], [3, 0])
