"""Shares among recent samples: exact for a step of any length, whatever ends last, and forgotten when they are old."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_metrics.monitoring.rules import LEAST_SAMPLES, THRESHOLDS
from plaudit_metrics.service.series.collectors import RecentLow, RecentWindow
from plaudit_metrics.service.series.run import RunInfo, RunSeries
from plaudit_metrics.sources.snapshot import RunSnapshot
from plaudit_wire.records import (
    NO_STEP,
    SampleRecord,
    ScorerRecord,
    ScorerWork,
    ScoringRecord,
    Stamps,
    StepRecord,
    WorkerRecord,
)

GROUP = 8
JOB, SERVICE = RunInfo("j", "on-policy", 0), RunInfo("s", "service", None)


def sample(
    ended: float, *, bad: bool = False, scorer: str = "judge", step: int = 1, split: str = "train"
) -> SampleRecord:
    outcome, value, took_s = ("timeout", None, 60.0) if bad else ("scored", 1.0, 5.0)
    own = ScorerRecord(outcome, value, call_s=took_s, limiter_s=20.0 if bad else 0.0)
    scoring = ScoringRecord(outcome, value, scorers={scorer: own}, call_s=took_s)
    return SampleRecord(
        "g", 0, split, step, "d", Stamps(0.0, 0.0, ended - took_s, None, ended - took_s, ended), scoring
    )


def step_of(series: RunSeries, number: int, bad: int, samples: int, random: Random) -> None:
    """A step whose slow and failed samples end last, reported group by group, as real ones are."""
    marks = [True] * bad + [False] * (samples - bad)
    random.shuffle(marks)
    groups = [[sample(100.0 * number, bad=mark) for mark in marks[at : at + GROUP]] for at in range(0, samples, GROUP)]
    for records in sorted(groups, key=lambda group: any(not each.scoring.is_scored for each in group)):
        series.count_samples(records)
    series.count_step(StepRecord(number, 1, 0.0, 100.0, samples, samples // GROUP, {}), records_missing=0)


@pytest.mark.long
@given(st.sampled_from([16, 64, 256, 1024, 4096]), st.floats(0, 0.2), st.integers(1, 3), st.integers(0, 2**32))
def test_shares_are_those_of_whole_steps(samples: int, share: float, steps: int, seed: int) -> None:
    series, bad, random = RunSeries(info=JOB), round(share * samples), Random(seed)
    for number in range(1, steps + 1):
        step_of(series, number, bad, samples, random)
        if samples * number < 20:
            continue
        for name, labels in RATIOS:
            assert get(series, name, **labels) == pytest.approx(bad / samples)


RATIOS = (
    ("plaudit_recent_failed_ratio", {}),
    ("plaudit_recent_late_ratio", {}),
    ("plaudit_scorer_recent_failed_ratio", {"scorer": "judge"}),
)


def get(series: RunSeries, name: str, **labels: str) -> float | None:
    return series.registry.get_sample_value(name, labels)


def test_within_a_step_no_share_exceeds_the_true_one_by_more_than_a_groups_part() -> None:
    series, random = RunSeries(info=JOB), Random(1)
    seen: list[float] = []
    for number in (1, 2, 3):
        groups = [[sample(100.0 * number, bad=bad) for _ in range(GROUP)] for bad in [False] * 126 + [True] * 2]
        random.shuffle(groups[:126])
        for records in groups:
            series.count_samples(records)
            seen.append(get(series, "plaudit_recent_failed_ratio") or 0.0)
        series.count_step(StepRecord(number, 1, 0.0, 100.0, 1024, 128, {}), records_missing=0)
    assert max(seen) <= 2 / 128 + 1e-9


def test_a_repaired_scorer_is_forgotten_after_one_good_step() -> None:
    series, random = RunSeries(info=JOB), Random(2)
    step_of(series, 1, 60, 64, random)
    step_of(series, 2, 0, 64, random)
    assert [get(series, name, **labels) for name, labels in RATIOS] == [0.0, 0.0, 0.0]


LOW, SCORER_LOW = "plaudit_recent_failed_low_ratio", "plaudit_scorer_recent_failed_low_ratio"


@pytest.mark.parametrize("samples", [16, 64])
def test_three_percent_that_fail_at_random_are_no_more_than_chance(samples: int) -> None:
    window, random, alarms = RecentWindow(has_steps=True), Random(samples), 0
    low = RecentLow(window, LEAST_SAMPLES)
    for number in range(1000):
        bad = sum(random.random() < 0.03 for _ in range(samples))
        for count, of_part in ((samples // 2, 0), (samples - samples // 2, bad)):
            low.add(float(of_part), count, window.add(count, 660.0 * number))
        window.close_step(samples)
        alarms += (low.share or 0.0) > THRESHOLDS["failedShare"]
    assert alarms <= 1


@pytest.mark.parametrize(("samples", "bad", "steps"), [(16, 3, 4), (64, 10, 1), (64, 6, 8), (1024, 80, 1)])
def test_more_than_chance_is_seen_after_a_few_steps(samples: int, bad: int, steps: int) -> None:
    series, random = RunSeries(info=JOB), Random(5)
    for number in range(1, 9):
        step_of(series, number, 0, samples, random)
    for number in range(9, 9 + steps):
        step_of(series, number, bad, samples, random)
    assert 0.05 < (get(series, LOW) or 0.0) <= bad / samples
    for number in range(20, 24):
        step_of(series, number, 0, samples, random)
    assert (get(series, LOW) or 0.0) < 0.05


@pytest.mark.parametrize("every", [1, 4])
def test_a_scorer_that_is_asked_for_one_sample_and_always_fails_is_seen_after_four_calls(every: int) -> None:
    series, random = RunSeries(info=JOB), Random(6)
    for number in range(1, 4 * every + 1):
        if number % every == 0:
            assert (get(series, SCORER_LOW, scorer="rare") or 0.0) < 0.2
            series.count_samples([sample(100.0 * number, bad=True, scorer="rare")])
        step_of(series, number, 0, 64, random)
    assert (get(series, SCORER_LOW, scorer="rare") or 0.0) > 0.2
    assert get(series, SCORER_LOW, scorer="judge") == 0.0
    for number in range(20, 22):
        series.count_samples([sample(100.0 * number, scorer="rare") for _ in range(8)])
        step_of(series, number, 0, 64, random)
    assert (get(series, SCORER_LOW, scorer="rare") or 0.0) < 0.2


def test_a_scorer_that_was_removed_has_no_share() -> None:
    series, service = RunSeries(info=JOB), RunSeries(info=SERVICE)
    for each, after in ((series, 64), (service, 5000)):
        each.count_samples([sample(2.0, bad=True, scorer="old") for _ in range(100)])
        each.count_step(StepRecord(1, 1, 0.0, 100.0, 64, 8, {}), records_missing=0)
        each.count_samples([sample(3.0) for _ in range(after)])
        assert get(each, "plaudit_scorer_recent_failed_ratio", scorer="old") is None
        assert get(each, "plaudit_limiter_recent_wait_seconds", judge="old") is None
        assert get(each, "plaudit_scorer_recent_failed_ratio", scorer="judge") == 0.0


@pytest.mark.parametrize("info", [JOB, SERVICE])
def test_a_scorer_that_no_reward_worker_has_any_more_has_no_share(info: RunInfo) -> None:
    """A quiet service takes days for the samples that would end its window."""
    series = RunSeries(info=info)
    series.count_samples([sample(2.0, bad=True, scorer="old") for _ in range(100)])
    workers = (WorkerRecord("reward-0", "reward", scorers={"judge": ScorerWork(0, 0.0)}),)
    series.show_snapshot(RunSnapshot(time=3.0, worker_records=()))
    assert get(series, "plaudit_scorer_recent_failed_ratio", scorer="old") == 1.0
    series.show_snapshot(RunSnapshot(time=4.0, worker_records=workers))
    assert get(series, "plaudit_scorer_recent_failed_ratio", scorer="old") is None
    assert get(series, "plaudit_limiter_recent_wait_seconds", judge="old") is None


def test_validation_changes_no_share_of_a_job() -> None:
    series = RunSeries(info=JOB)
    step_of(series, 1, 0, 64, Random(3))
    series.count_samples([sample(200.0, bad=True, split="validation") for _ in range(500)])
    assert [get(series, name, **labels) for name, labels in RATIOS] == [0.0, 0.0, 0.0]


def test_a_trainer_that_starts_again_knows_no_share_of_the_time_before() -> None:
    series = RunSeries(info=JOB)
    trainer = lambda started: (WorkerRecord("trainer-0", "trainer", started=started),)  # noqa: E731
    series.show_snapshot(RunSnapshot(time=10.0, worker_records=trainer(5.0)))
    step_of(series, 1, 64, 64, Random(4))
    series.show_snapshot(RunSnapshot(time=1000.0, worker_records=trainer(5.0)))
    assert get(series, "plaudit_recent_failed_ratio") == 1.0
    series.show_snapshot(RunSnapshot(time=2000.0, worker_records=trainer(1990.0)))
    assert [get(series, name, **labels) for name, labels in RATIOS] == [None, None, None]


def test_a_service_that_is_idle_or_repaired_forgets_the_night() -> None:
    series = RunSeries(info=SERVICE)
    night = [sample(1000.0 + at, bad=True, step=NO_STEP) for at in range(200)]
    series.count_samples(night)
    series.show_snapshot(RunSnapshot(time=1300.0))
    assert get(series, "plaudit_limiter_recent_wait_seconds", judge="judge") == 20.0
    series.show_snapshot(RunSnapshot(time=1200.0 + 1900.0))
    assert [get(series, name, **labels) for name, labels in RATIOS] == [None, None, None]
    assert get(series, "plaudit_limiter_recent_wait_seconds", judge="judge") is None
    series.count_samples([sample(4000.0, step=NO_STEP)])  # of the night nothing counts, however few have come since
    series.show_snapshot(RunSnapshot(time=4000.0))
    assert [get(series, name, **labels) for name, labels in (*RATIOS, (LOW, {}))] == [None] * 4
    assert get(series, SCORER_LOW, scorer="judge") == 0.0
    series.count_samples([sample(4000.0, step=NO_STEP) for _ in range(20)])
    assert [get(series, name, **labels) for name, labels in RATIOS] == [0.0, 0.0, 0.0]


def test_a_quiet_service_whose_samples_all_fail_is_seen() -> None:
    series = RunSeries(info=SERVICE)
    for number in range(60):
        bad = 20 <= number < 40
        series.count_samples([sample(1000.0 + 300.0 * number, bad=bad, step=NO_STEP)])
        assert ((get(series, LOW) or 0.0) > THRESHOLDS["failedShare"]) >= (number == 39)
    series.count_samples([sample(20000.0, step=NO_STEP) for _ in range(20)])
    assert get(series, LOW) == 0.0


def test_few_values_have_no_share() -> None:
    series = RunSeries(info=JOB)
    series.count_samples([sample(1.0, bad=True) for _ in range(19)])
    assert get(series, "plaudit_recent_failed_ratio") is None
    series.count_samples([sample(1.0)])
    assert get(series, "plaudit_recent_failed_ratio") == pytest.approx(0.95)


def test_counters_begin_at_0_and_never_fall() -> None:
    series = RunSeries(info=JOB)
    series.count_samples([sample(1.0)])
    assert get(series, "plaudit_score_seconds_count", scorer="judge", outcome="infra_error") == 0.0
    series.show_snapshot(RunSnapshot(judge_requests={("judge", "200"): 9}))
    assert get(series, "plaudit_judge_requests_total", judge="judge", status="429") == 0.0
    assert get(series, "plaudit_stage_seconds_count", stage="ready_queue") == 0.0
    series.count_step(StepRecord(1, 1, 0.0, 28.0, 32, 8, {"exposed_reward_s": 0.2}), records_missing=0)
    series.count_step(StepRecord(2, 1, 66.0, 60.0, 32, 8, {"exposed_reward_s": -1.0}), records_missing=0)
    assert get(series, "plaudit_step_seconds_sum") == 28.0
    assert get(series, "plaudit_step_exposed_reward_seconds_sum") == pytest.approx(0.2)
    assert get(series, "plaudit_last_step_seconds") == 0.0
