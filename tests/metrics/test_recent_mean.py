"""The mean over the newest values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plaudit_metrics.service.series.collectors import RecentMean


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 50))
def test_it_covers_at_least_so_many_of_the_newest_values_and_no_batch_more_than_it_needs(
    batches: list[int], size: int
) -> None:
    recent, values = RecentMean(size), list[tuple[int, int]]()
    for number, count in enumerate(batches):
        recent.add(float(number * count), count)
        values.append((number, count))
    covered, total = 0, 0
    for number, count in reversed(values):
        if covered >= size:
            break
        covered, total = covered + count, total + number * count
    assert recent.mean == total / covered


def test_too_few_values_have_no_mean() -> None:
    recent = RecentMean(100, least=20)
    recent.add(19.0, 19)
    assert recent.mean is None
    recent.add(0.0, 1)
    assert recent.mean == 0.95
