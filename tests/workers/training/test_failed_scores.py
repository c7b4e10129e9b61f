"""The summary of samples without a score: kinds, counts, one readable line. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plaudit_wire.records import WaitRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.training.conductor.failed_scores import describe, failed_kinds
from plaudit_workers.training.conductor.step_training import wait_records


def group_of(make_groups: Any, *failures: tuple[str, str]) -> Group:
    """A group with one scored sample and one for each (outcome, reason); the scorer's name is ``mine``."""
    (group,) = make_groups([[1.0] * (1 + len(failures))])
    samples = group.samples[:1] + [
        msgspec.structs.replace(
            sample, scoring=msgspec.structs.replace(sample.scoring, outcome=outcome, value=None, reason=reason)
        )
        for sample, (outcome, reason) in zip(group.samples[1:], failures, strict=True)
    ]
    return msgspec.structs.replace(group, samples=samples)


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (("data_error", "mine: KeyError: 'answer' (/home/me/reward.py:2 in score)"), "mine: 1 × KeyError: 'answer' (reward.py:2)"),
        (("data_error", "mine: ValueError: two\n  lines"), "mine: 1 × ValueError: two lines"),
        (("infra_error", "mine: ConnectionError: refused"), "mine: 1 × infra_error, ConnectionError: refused"),
        (("given_up", "its group was ended before it was scored"), "1 × given_up, its group was ended before it was scored"),
        (("skipped", "mine: the function returned None"), ""),
    ],
)  # fmt: skip
def test_a_reason_is_one_line_that_names_scorer_count_and_place(
    make_groups: Any, failure: tuple[str, str], line: str
) -> None:
    assert describe(failed_kinds([group_of(make_groups, failure)])) == line


def test_failures_of_one_kind_are_counted_together_and_the_most_frequent_kind_comes_first(make_groups: Any) -> None:
    first = group_of(make_groups, ("data_error", "mine: KeyError: 'a'"), ("timeout", "mine: too slow"))
    second = group_of(make_groups, ("data_error", "mine: KeyError: 'b'"), ("data_error", "mine: KeyError: 'b'"))
    kinds = failed_kinds([first, second])
    assert [(kind.outcome, kind.scorer, kind.count) for kind in kinds] == [
        ("data_error", "mine", 3),
        ("timeout", "mine", 1),
    ]
    assert describe(kinds) == "mine: 3 × KeyError: 'b'; mine: 1 × timeout, too slow"


def test_many_kinds_are_cut_to_the_most_frequent_ones(make_groups: Any) -> None:
    failures = [("data_error", f"mine: Error{number}: text") for number in range(5)]
    assert describe(failed_kinds([group_of(make_groups, *failures)])).endswith("; 2 × other reasons")


def test_a_wait_is_split_at_the_end_of_the_pause_that_it_fell_into() -> None:
    assert wait_records(5.0, 20.0, ["t-1"], 15.0) == [
        WaitRecord(5.0, 15.0, [], "pause"),
        WaitRecord(15.0, 20.0, ["t-1"]),
    ]


@pytest.mark.parametrize("paused_until", [0.0, 5.0, 30.0], ids=["no pause", "pause before", "ended by older groups"])
def test_a_wait_that_no_pause_prolonged_stays_whole(paused_until: float) -> None:
    assert wait_records(5.0, 20.0, ["t-1"], paused_until) == [WaitRecord(5.0, 20.0, ["t-1"])]
