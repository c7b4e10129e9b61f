"""The summary of failed scores, and the pause within a wait. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.records import REDIS, ScorerRecord, ScoringRecord, WaitRecord
from plaudit_workers.stream.groups import GroupSample
from plaudit_workers.training.groups import failed_samples, failure_reasons, is_permanent
from plaudit_workers.training.step import wait_records, without_outages


def failed(make_groups: Any, *failures: tuple[str, str]) -> list[GroupSample]:
    """The failed samples of a group: one for each (outcome, reason) of the scorer ``mine``, beside a scored one."""
    (group,) = make_groups([[1.0] * (1 + len(failures))])
    samples = group.samples[:1] + [
        msgspec.structs.replace(
            sample,
            scoring=ScoringRecord(outcome, reason=reason, scorers={"mine": ScorerRecord(outcome, reason=reason)}),
        )
        for sample, (outcome, reason) in zip(group.samples[1:], failures, strict=True)
    ]
    return list(failed_samples([msgspec.structs.replace(group, samples=samples)]))


def test_the_reasons_name_scorer_count_and_place_the_most_frequent_first(make_groups: Any) -> None:
    error = ("data_error", "KeyError: 'answer' (/home/me/reward.py:2 in score)")
    samples = failed(make_groups, ("timeout", "too slow"), error, error, ("skipped", "the function returned None"))
    reasons = "mine: 2 × KeyError: 'answer' (reward.py:2 in score); mine: 1 × too slow"
    assert (len(samples), failure_reasons(samples)) == (3, reasons)


def test_rare_kinds_are_counted_together(make_groups: Any) -> None:
    samples = failed(make_groups, *(("data_error", f"{name}: text") for name in "ABCDE"))
    assert failure_reasons(samples).endswith("mine: 1 × C: text; 2 × other reasons")


def test_only_data_errors_are_permanent(make_groups: Any) -> None:
    assert is_permanent(failed(make_groups, ("data_error", "KeyError"), ("skipped", "None")))
    assert not is_permanent(failed(make_groups, ("data_error", "KeyError"), ("timeout", "too slow")))


def test_a_wait_is_split_at_the_end_of_the_pause_that_it_fell_into() -> None:
    assert wait_records(5.0, 20.0, ["t-1"], 15.0) == [
        WaitRecord(5.0, 15.0, [], "pause"),
        WaitRecord(15.0, 20.0, ["t-1"]),
    ]


@pytest.mark.parametrize("paused_until", [0.0, 5.0, 30.0], ids=["no pause", "pause before", "ended by older groups"])
def test_a_wait_that_no_pause_prolonged_stays_whole(paused_until: float) -> None:
    assert wait_records(5.0, 20.0, ["t-1"], paused_until) == [WaitRecord(5.0, 20.0, ["t-1"])]


_MOMENTS = st.lists(st.integers(0, 100), min_size=2, max_size=12, unique=True).map(sorted)


@given(_MOMENTS, _MOMENTS)
def test_the_parts_of_a_wait_add_up_to_it_and_outages_are_waits_for_redis(waits: list[int], outages: list[int]) -> None:
    given_waits = [WaitRecord(float(a), float(b), ["t-1"]) for a, b in zip(waits[::2], waits[1::2], strict=False)]
    away = [(float(a), float(b)) for a, b in zip(outages[::2], outages[1::2], strict=False)]
    parts = without_outages(given_waits, away)
    assert sum(part.end - part.start for part in parts) == sum(wait.end - wait.start for wait in given_waits)
    assert all(part.start < part.end for part in parts)
    for moment in (place + 0.5 for place in range(100)):
        causes = [part.cause for part in parts if part.start < moment < part.end]
        waited = any(wait.start < moment < wait.end for wait in given_waits)
        gone = any(began < moment < ended for began, ended in away)
        assert causes == ([REDIS if gone else ""] if waited else [])
