"""The failures of scorers are counted by kind, with the first reason of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_metrics.statistics.columns import NO_SCORER, FailureCounts, shortened
from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.records import GROUP_ENDED, Failure, SampleRecord, ScorerRecord, ScoringRecord, StepRecord
from stage_records import build_group, build_sample


def failed(reason: str, outcome: Any = "data_error") -> ScorerRecord:
    return ScorerRecord(outcome, reason=reason)


def failures_of(samples: Sequence[SampleRecord]) -> list[Failure]:
    counts = FailureCounts()
    for each in samples:
        counts.add(each.scoring)
    return counts.failures()


def test_samples_that_fail_for_the_same_reason_are_one_line_with_their_count() -> None:
    raised = failed("KeyError: 'answer' (/home/me/job/reward.py:2 in compute_score)")
    samples = [build_sample(index=index, outcome="data_error", scorers={"mine": raised}) for index in range(64)]
    (failure,) = failures_of(samples)
    assert str(failure) == "64 × KeyError: 'answer' (reward.py:2 in compute_score)"
    assert (failure.scorer, failure.outcome) == ("mine", "data_error")


def test_a_reason_that_differs_from_sample_to_sample_is_one_kind_shown_by_its_first() -> None:
    texts = [f"ValueError: no number in {number!r} (/x/reward.py:7 in f)" for number in ("a", "b", "c")]
    texts += ["ValueError: no number in 'd' (/x/reward.py:9 in f)"]
    texts += [f"ground_truth {truth!r} is blank" for truth in ("", "$: $")]
    samples = [build_sample(outcome="data_error", scorers={"mine": failed(text)}) for text in texts]
    assert [str(each) for each in failures_of(samples)] == [
        "3 × ValueError: no number in 'a' (reward.py:7 in f)",
        "2 × ground_truth '' is blank",
        "1 × ValueError: no number in 'd' (reward.py:9 in f)",
    ]


def test_failures_are_listed_by_scorer_the_most_frequent_first() -> None:
    samples = [build_sample(outcome="timeout", scorers={"slow": failed("took longer than 5 s", "timeout")})]
    samples += [build_sample(scorers={"mine": failed("KeyError: 1"), "rule": ScorerRecord("scored", 1.0)})] * 2
    assert [(each.scorer, each.count) for each in failures_of(samples)] == [("mine", 2), ("slow", 1)]


def test_a_scorer_that_was_skipped_did_not_fail() -> None:
    skipped = ScorerRecord("skipped", reason="when: rule is not 1", attempts=0)
    assert failures_of([build_sample(scorers={"judge": skipped, "rule": ScorerRecord("scored", 0.0)})]) == []


def test_a_sample_that_ended_without_any_scorer_is_listed_by_its_outcome() -> None:
    assert failures_of([build_sample(outcome="poison"), build_sample(outcome="poison")]) == [
        Failure(NO_SCORER, "poison", "", 2)
    ]
    assert str(Failure(NO_SCORER, "poison", "", 2)) == "2 × poison"


def test_kinds_are_bounded() -> None:
    kinds = [failed(f"{chr(97 + number)}{'x' * number}Error: wrong") for number in range(26)]
    failures = failures_of([build_sample(outcome="data_error", scorers={"mine": kind}) for kind in kinds])
    assert len(failures) == 8
    assert sum(each.count for each in failures) == 26


def test_the_failures_of_the_open_step_are_those_after_the_newest_step_in_one_batch_too() -> None:
    view = RunView(RunSeries(), KeptSteps())
    closed = [build_sample("t-0-1.0", index, outcome="timeout") for index in range(2)]
    step = StepRecord(1, 1, closed[0].stamps.admitted, 2_000_000.0, 2, 1, {"step_s": 1.0})
    view.handle([*closed, build_group(closed), step, build_sample("t-1-1.0", outcome="poison")], True)
    assert [(each.outcome, each.count) for each in view.failures.failures()] == [("poison", 1)]


def test_samples_of_a_group_that_a_resume_rolled_back_did_not_fail() -> None:
    view = RunView(RunSeries(), KeptSteps())
    rolled_back = replace(build_sample("t-0-1.0"), scoring=ScoringRecord("given_up", reason=GROUP_ENDED))
    view.handle([rolled_back, build_sample("t-1-1.0", outcome="given_up")], True)
    assert [(each.outcome, each.count) for each in view.failures.failures()] == [("given_up", 1)]
    assert view.failures.samples == 1


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("KeyError: 'a' (/srv/code/reward.py:2 in f)", "KeyError: 'a' (reward.py:2 in f)"),
        ("a\nb\n  c", "a b c"),
        ("", ""),
        ("\x1b[2J\x07gone", "\ufffd[2J\ufffdgone"),
    ],
)
def test_a_reason_becomes_one_line(reason: str, shown: str) -> None:
    assert shortened(reason) == shown


def test_a_long_reason_is_cut_and_keeps_its_place() -> None:
    text = shortened(f"ValueError: {'x' * 500} (/srv/reward.py:12 in f)")
    assert len(text) <= 200
    assert text.endswith("… (reward.py:12 in f)")


def test_the_record_of_a_step_carries_the_reasons_by_scorer() -> None:
    raised = failed("KeyError: 'answer' (reward.py:2 in compute_score)")
    record = step_record(
        3, 1, [build_sample(outcome="data_error", scorers={"mine": raised})] * 2, opened=0.0, closed=9.0
    )
    assert record.labels["reward_pipeline/scorer/mine/reasons"] == (
        "2 × KeyError: 'answer' (reward.py:2 in compute_score)"
    )
    assert record.verdict == "unscored"
