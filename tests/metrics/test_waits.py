"""The trainer's waiting is split exactly, by the written rule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit_metrics.statistics.columns import SampleColumns
from plaudit_metrics.statistics.verdict import CAUSES, split_waits
from plaudit_wire.records import (
    GenerationRecord,
    GroupRecord,
    SampleRecord,
    SandboxRecord,
    ScoringRecord,
    Stamps,
    WaitRecord,
)
from stage_records import build_group, build_sample

MOMENTS = st.floats(0, 100)
MAYBE = st.none() | st.floats(0, 30)
MACHINE = st.none() | st.builds(SandboxRecord, start_s=st.floats(0, 30), claim_s=st.floats(0, 30))


@st.composite
def samples_of_groups(draw: st.DrawFn) -> tuple[list[SampleRecord], list[GroupRecord]]:
    """Up to four groups of up to three samples each, some with missing stamps."""
    samples: list[SampleRecord] = []
    groups: list[GroupRecord] = []
    for number in range(draw(st.integers(1, 4))):
        name, admitted = f"t-{number}-1.0", draw(MOMENTS)
        of_group: list[float] = []
        for index in range(draw(st.integers(1, 3))):
            moment = admitted
            stamps: dict[str, float | None] = {}
            for stamp in ("taken", "published", "score_first_taken", "score_taken"):
                step = draw(MAYBE)
                stamps[stamp] = None if step is None else (moment := moment + step)
            committed = moment + draw(st.floats(0, 30))
            of_group.append(committed)
            limiter_s = draw(st.floats(0, 40))
            samples.append(
                SampleRecord(
                    group=name,
                    index=index,
                    split="train",
                    step=1,
                    data_source="x",
                    stamps=Stamps(admitted=admitted, committed=committed, **stamps),
                    scoring=ScoringRecord("scored", 1.0, limiter_s=limiter_s),
                    generation=GenerationRecord(
                        *("r", 0.0, 1, 1, 1, 1), tool_s=draw(st.floats(0, 40)), sandbox=draw(MACHINE)
                    ),
                )
            )
        terminal = max(of_group)
        ready = terminal + draw(st.floats(0, 30))
        groups.append(
            GroupRecord(name, "train", 1, "trained", len(of_group), 1, admitted, ready, terminal=terminal, ready=ready)
        )
    return samples, groups


def cause_at(moment: float, samples: list[SampleRecord], groups: list[GroupRecord]) -> str:
    """The rule in words, for one instant: the earliest cause in which any awaited group still is."""
    present = {CAUSES.index(_cause_of_sample(sample, moment)) for sample in samples}
    for group in groups:
        assert group.ready is not None
        present.add(CAUSES.index("group_scorer" if moment < group.ready else "ready_queue"))
    return CAUSES[min(present)]


def _cause_of_sample(sample: SampleRecord, moment: float) -> str:
    stamps = sample.stamps
    assert stamps.committed is not None
    scored_from = next(t for t in (stamps.score_taken, stamps.committed) if t is not None)
    published = _published(sample)
    if moment < published:
        if moment < _tools_begin(sample, published):
            return "generation"
        return "sandboxes" if moment < _machine_is_there(sample, published) else "tools"
    if moment < scored_from:
        return "sample_queue"
    if moment < min(scored_from + sample.scoring.limiter_s, stamps.committed):
        return "limiter"
    return "score" if moment < stamps.committed else "ready_queue"


def _published(sample: SampleRecord) -> float:
    """A missing point in time equals the next one."""
    stamps = sample.stamps
    points = (stamps.published, stamps.score_first_taken, stamps.score_taken, stamps.committed)
    return next(point for point in points if point is not None)


def _tools_begin(sample: SampleRecord, published: float) -> float:
    """Seconds in tools lie at the end of a sample's time in the rollout."""
    taken = published if sample.stamps.taken is None else sample.stamps.taken
    return max(published - (sample.generation.tool_s if sample.generation else 0.0), taken)


def _machine_is_there(sample: SampleRecord, published: float) -> float:
    """The wait for a machine comes before the other seconds in tools."""
    machine = sample.generation.sandbox if sample.generation else None
    return min(_tools_begin(sample, published) + (machine.waited_s if machine else 0.0), published)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(samples_of_groups(), MOMENTS, st.floats(0, 200), st.data())
def test_the_split_equals_the_rule_applied_to_every_instant(
    drawn: tuple[list[SampleRecord], list[GroupRecord]], start: float, length: float, data: st.DataObject
) -> None:
    samples, groups = drawn
    awaited = data.draw(st.lists(st.sampled_from([group.group for group in groups]), min_size=1, unique=True))
    wait = WaitRecord(start, start + length, awaited)
    split = split_waits(SampleColumns.from_records(samples), groups, [wait])

    own_samples = [sample for sample in samples if sample.group in awaited]
    own_groups = [group for group in groups if group.group in awaited]
    expected = dict.fromkeys(CAUSES, 0.0)
    borders = sorted({wait.start, wait.end, *_all_borders(own_samples, own_groups, wait)})
    for left, right in itertools.pairwise(borders):
        expected[cause_at((left + right) / 2, own_samples, own_groups)] += right - left
    assert split.cause_s == pytest.approx(expected, abs=1e-6)
    assert sum(split.cause_s.values()) == pytest.approx(split.total_s, abs=1e-9)
    assert split.exposed_reward_s == pytest.approx(
        split.total_s - sum(split.cause_s[cause] for cause in ("generation", "sandboxes", "tools")), abs=1e-9
    )
    assert 0 <= split.straggler_s <= split.total_s + 1e-9


def _all_borders(samples: list[SampleRecord], groups: list[GroupRecord], wait: WaitRecord) -> list[float]:
    points = [group.ready for group in groups]
    for sample in samples:
        stamps = sample.stamps
        points += [begin(sample, _published(sample)) for begin in (_tools_begin, _machine_is_there)]
        points += [stamps.published, stamps.score_first_taken, stamps.score_taken, stamps.committed]
        points.append((stamps.score_taken or 0.0) + sample.scoring.limiter_s)
    return [point for point in points if point is not None and wait.start < point < wait.end]


def test_a_wait_for_nothing_that_is_known_is_generation() -> None:
    split = split_waits(SampleColumns.from_records([]), [], [WaitRecord(10.0, 14.0, ["t-9-1.0"])])
    assert split.cause_s["generation"] == split.total_s == 4.0
    assert split.exposed_reward_s == 0.0


def test_retries_and_the_commit_count_as_score() -> None:
    of_group = [
        build_sample(admitted=0.0, generation=1.0, sample_queue=2.0, limiter=3.0, retry=4.0, score=5.0, commit=6.0)
    ]
    record = build_group(of_group, group_scorer=7.0, ready_queue=8.0)
    split = split_waits(SampleColumns.from_records(of_group), [record], [WaitRecord(0.0, 36.0, [record.group])])
    assert split.cause_s == {
        "generation": 1.0,
        "sandboxes": 0.0,
        "tools": 0.0,
        "sample_queue": 2.0,
        "limiter": 3.0,
        "score": 15.0,
        "group_scorer": 7.0,
        "ready_queue": 8.0,
        "pause": 0.0,
    }


def test_groups_that_were_not_awaited_do_not_count() -> None:
    awaited = [build_sample("t-1-1.0", admitted=0.0, generation=1.0, score=2.0)]
    other = [build_sample("t-2-1.0", admitted=0.0, generation=50.0)]
    split = split_waits(
        SampleColumns.from_records(awaited + other),
        [build_group(awaited), build_group(other)],
        [WaitRecord(0.0, 3.0, ["t-1-1.0"])],
    )
    assert split.cause_s["generation"] == 1.0
    assert split.cause_s["score"] == 2.0


def test_a_group_whose_samples_are_unknown_is_judged_by_its_record() -> None:
    record = GroupRecord("t-1-1.0", "train", 1, "trained", 2, 2, admitted=0.0, closed=9.0, terminal=4.0, ready=6.0)
    split = split_waits(SampleColumns.from_records([]), [record], [WaitRecord(0.0, 7.0, ["t-1-1.0"])])
    assert split.cause_s["generation"] == 4.0
    assert split.cause_s["group_scorer"] == 2.0
    assert split.cause_s["ready_queue"] == 1.0


def test_the_last_of_many_samples_holds_the_rest_of_the_wait() -> None:
    of_group = [build_sample(index=index, admitted=0.0, score=1.0 + index) for index in range(4)]
    of_group.append(build_sample(index=4, admitted=0.0, score=20.0))
    split = split_waits(
        SampleColumns.from_records(of_group), [build_group(of_group)], [WaitRecord(0.0, 20.0, [of_group[0].group])]
    )
    assert split.straggler_s == 16.0


def test_of_three_samples_none_is_a_straggler() -> None:
    of_group = [
        build_sample(index=index, admitted=0.0, score=seconds) for index, seconds in enumerate((1.0, 1.0, 20.0))
    ]
    split = split_waits(
        SampleColumns.from_records(of_group), [build_group(of_group)], [WaitRecord(0.0, 20.0, [of_group[0].group])]
    )
    assert split.straggler_s == 0.0
