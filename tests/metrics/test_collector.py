"""The collector joins records in any order, any number of times, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit_metrics.sources.steps import Arrival, ClosedStep, Collector, KeptSteps
from plaudit_metrics.sources.stream import EventRecord
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord
from stage_records import build_group, build_sample

Build = Callable[..., Any]


@pytest.fixture(scope="session")
def run() -> Callable[..., list[EventRecord]]:
    """``run(steps)``: the records of a run of so many steps of 2 groups of 3, in their natural order."""

    def records(steps: int, *, incarnation: int = 1, first: int = 1) -> list[EventRecord]:
        every: list[EventRecord] = []
        for step in range(first, first + steps):
            opened = 1_000_000.0 + 100 * step
            for number in range(2):
                name = f"t-{2 * step + number}-{incarnation}.0"
                samples = [
                    build_sample(name, index, admitted=opened, generation=5.0, score=index + step, step=step)
                    for index in range(3)
                ]
                every += samples
                every.append(build_group(samples, closed=opened + 50))
            every.append(
                StepRecord(step, incarnation, opened, opened + 60, 6, 2, {"reward/mean": 0.5}, verdict="reward")
            )
        return every

    return records


def feed(collector: Collector, records: list[EventRecord]) -> list[Arrival | ClosedStep | None]:
    return [_feed_one(collector, record) for record in records]


def _feed_one(collector: Collector, record: EventRecord) -> Arrival | ClosedStep | None:
    match record:
        case SampleRecord():
            return collector.add_sample(record)
        case GroupRecord():
            return collector.add_group(record)
        case StepRecord():
            return collector.add_step(record)


def figures(kept: KeptSteps) -> list[tuple[int, int, int, dict[str, float]]]:
    return [
        (step.record.step, step.record.incarnation, step.records_missing, step.record.statistics)
        for step in kept.newest(500)
    ]


def test_a_step_closes_with_all_its_samples(run: Build) -> None:
    kept = KeptSteps()
    collector = Collector(kept)
    feed(collector, run(1))
    (step,) = kept.newest(10)
    assert step.records_missing == 0
    assert step.record.statistics["reward_pipeline/outcome/scored"] == 6
    assert [sample.index for sample in step.slowest][:2] == [2, 2]
    assert collector.num_waiting == 0


def test_the_trainers_own_figures_stand(run: Build) -> None:
    kept = KeptSteps()
    feed(Collector(kept), run(1))
    assert kept.newest(1)[0].record.statistics["reward/mean"] == 0.5  # the events alone would say 1.0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_replays_and_reorderings_before_the_step_change_nothing(run: Build, data: st.DataObject) -> None:
    in_order, disturbed = KeptSteps(), KeptSteps()
    records = run(3)
    feed(Collector(in_order), records)

    collector = Collector(disturbed)
    seen: list[EventRecord] = []
    start = 0
    for end in [number + 1 for number, record in enumerate(records) if isinstance(record, StepRecord)]:
        of_step = data.draw(st.permutations(records[start : end - 1]))
        repeated = data.draw(st.lists(st.sampled_from(seen + of_step), max_size=10))
        feed(collector, of_step + repeated + [records[end - 1]])
        seen += records[start:end]
        start = end
    feed(collector, data.draw(st.lists(st.sampled_from(records), max_size=20)))
    assert [each[:3] for each in figures(disturbed)] == [each[:3] for each in figures(in_order)]
    for mine, theirs in zip(figures(disturbed), figures(in_order), strict=True):
        assert mine[3] == pytest.approx(theirs[3])
    assert collector.late == 0
    assert collector.num_waiting == 0


def test_a_whole_run_again_is_nothing_new(run: Build) -> None:
    collector = Collector(KeptSteps())
    feed(collector, run(2))
    assert set(feed(collector, run(2))) == {Arrival.replayed, None}


def test_a_record_that_comes_after_its_step_is_counted_as_late_and_not_mixed_in(run: Build) -> None:
    kept = KeptSteps()
    collector = Collector(kept)
    lost, *rest = run(1)
    feed(collector, rest)
    before = figures(kept)
    assert collector.add_sample(lost) is Arrival.late
    assert collector.late == 1
    assert figures(kept) == before
    assert kept.newest(1)[0].records_missing == 1


def test_a_sample_that_changes_before_its_step_counts_with_its_newer_content() -> None:
    kept = KeptSteps()
    collector = Collector(kept)
    assert collector.add_sample(build_sample(value=0.0)) is Arrival.new
    assert collector.add_sample(build_sample(value=0.75)) is Arrival.replaced
    collector.add_group(build_group([build_sample()]))
    collector.add_step(StepRecord(1, 1, build_sample().stamps.admitted, 2_000_000.0, 1, 1, {}))
    assert kept.newest(1)[0].record.statistics["reward/mean"] == 0.75


def test_a_step_done_again_after_a_resume_replaces_the_old_one_and_removes_later_steps(run: Build) -> None:
    kept = KeptSteps()
    collector = Collector(kept)
    feed(collector, run(4))
    feed(collector, run(1, incarnation=2, first=3))
    assert [each[:2] for each in figures(kept)] == [(1, 1), (2, 1), (3, 2)]
    feed(collector, run(4))
    assert [each[:2] for each in figures(kept)] == [(1, 1), (2, 1), (3, 2)]


def test_groups_of_a_step_that_a_crash_left_open_are_not_mixed_into_its_second_try(run: Build) -> None:
    kept = KeptSteps()
    collector = Collector(kept)
    stale = build_sample("t-99-1.0", admitted=1_000_000.0, step=1)
    feed(collector, [stale, build_group([stale], closed=1_000_010.0)])
    feed(collector, run(1, incarnation=2))
    assert kept.newest(1)[0].record.statistics["reward_pipeline/outcome/scored"] == 6


def test_validation_is_not_mixed_into_the_steps_figures(run: Build) -> None:
    kept = KeptSteps()
    collector = Collector(kept)
    validated = build_sample("v-0-1.0", admitted=1_000_100.0, split="validation")
    feed(collector, [validated, build_group([validated], end="evaluated", closed=1_000_140.0), *run(1)])
    assert kept.newest(1)[0].record.statistics["reward_pipeline/outcome/scored"] == 6
    assert collector.num_waiting == 0


def test_samples_whose_group_never_closes_are_forgotten_when_too_many_wait() -> None:
    collector = Collector(KeptSteps(), waiting_limit=10)
    feed(collector, [build_sample(f"t-{number}-1.0", index) for number in range(20) for index in range(4)])
    assert 0 < collector.num_waiting <= 10
    newest = collector.newest_open(80)
    assert [record.group for record in newest[:4]] == ["t-19-1.0"] * 4
    assert len(newest) == collector.num_waiting


def test_only_so_many_steps_are_kept_and_samples_within_their_budget(run: Build) -> None:
    kept = KeptSteps(limit=5, slowest=2, samples_bytes=4_000)
    feed(Collector(kept), run(12))
    assert [each[0] for each in figures(kept)] == [8, 9, 10, 11, 12]
    assert all(len(step.slowest) == 2 for step in kept.newest(5))
    held = [step for step in range(1, 13) if kept.samples(step) is not None]
    assert held[-1] == 12
    assert len(held) < 5


def test_restored_steps_are_known_and_their_events_add_the_slowest_samples(run: Build) -> None:
    records = run(2)
    kept = KeptSteps()
    kept.restore([record for record in records if isinstance(record, StepRecord)])
    assert [step.slowest for step in kept.newest(5)] == [[], []]
    feed(Collector(kept), records)
    assert [len(step.slowest) for step in kept.newest(5)] == [6, 6]


def test_a_waiting_sample_costs_less_than_a_kilobyte() -> None:
    collector = Collector(KeptSteps())
    samples = [build_sample(f"t-{number // 8}-1.0", number % 8) for number in range(4_000)]
    tracemalloc.start()
    feed(collector, samples)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(samples) < 1_000
