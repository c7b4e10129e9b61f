"""A sample's stages are a partition of its wall time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import make_generation, make_sample_record
from plaudit_metrics.statistics.columns import SampleColumns
from plaudit_metrics.statistics.stages import (
    GROUP_STAGES,
    SAMPLE_STAGES,
    group_stage_seconds,
    sample_stage_seconds,
    stages_of,
)
from plaudit_wire.records import SampleRecord, SandboxRecord, ScoringRecord, Stamps
from stage_records import build_group, build_sample

SECONDS = st.floats(0, 500)
STAMP = st.none() | st.floats(1_700_000_000, 1_700_001_000)


@st.composite
def any_sample(draw: st.DrawFn) -> SampleRecord:
    """A record with arbitrary, even contradictory, stamps and durations."""
    admitted = draw(st.floats(1_700_000_000, 1_700_000_500))
    generated = draw(st.booleans())
    return make_sample_record(
        stamps=Stamps(
            admitted=admitted,
            taken=draw(STAMP),
            published=draw(STAMP),
            score_first_taken=draw(STAMP),
            score_taken=draw(STAMP),
            committed=admitted + draw(SECONDS),
        ),
        scoring=ScoringRecord("scored", 1.0, limiter_s=draw(SECONDS), retry_s=draw(SECONDS), call_s=draw(SECONDS)),
        generation=make_generation(
            generate_s=0.0,
            tool_s=draw(SECONDS),
            engine_queue_s=draw(SECONDS),
            sandbox=draw(st.none() | st.builds(SandboxRecord, start_s=SECONDS, claim_s=SECONDS, wait_s=SECONDS)),
        )
        if generated
        else None,
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_sample())
def test_the_stages_add_up_to_the_wall_time_within_5_ms(record: SampleRecord) -> None:
    seconds = sample_stage_seconds(SampleColumns.from_records([record]))
    assert set(seconds) == set(SAMPLE_STAGES)
    assert all(of_stage[0] >= 0 for of_stage in seconds.values())
    assert record.stamps.committed is not None
    wall_s = record.stamps.committed - record.stamps.admitted
    assert sum(float(of_stage[0]) for of_stage in seconds.values()) == pytest.approx(wall_s, abs=0.005)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({stage: st.floats(0, 100) for stage in SAMPLE_STAGES}))
def test_each_stage_is_measured_to_within_5_ms(truth: dict[str, float]) -> None:
    seconds = sample_stage_seconds(SampleColumns.from_records([build_sample(**truth)]))
    assert {stage: float(of_stage[0]) for stage, of_stage in seconds.items()} == pytest.approx(truth, abs=0.005)


def test_the_groups_stages_follow_until_the_trainer_takes_it() -> None:
    samples = [build_sample(index=0, score=1.0), build_sample(index=1, score=4.0)]
    record = build_group(samples, group_scorer=2.0, ready_queue=0.5)
    seconds = group_stage_seconds(SampleColumns.from_records(samples), {record.group: record})
    assert {stage: of_stage.tolist() for stage, of_stage in seconds.items()} == {
        "group_wait": [3.0, 0.0],
        "group_scorer": [2.0, 2.0],
        "ready_queue": [0.5, 0.5],
    }
    wall_s = (record.taken or 0.0) - samples[0].stamps.admitted
    assert sum(stages_of(samples[0], record).values()) == pytest.approx(wall_s, abs=0.005)


def test_an_unpublished_sample_spent_its_time_in_generation() -> None:
    given_up = make_sample_record(Stamps(admitted=100.0, taken=103.0, committed=160.0), ScoringRecord("given_up"))
    assert stages_of(given_up) == {"rollout_queue": 3.0, "generation": 57.0}


def test_a_sample_that_no_reward_worker_committed_spent_its_time_in_the_queue() -> None:
    given_up = make_sample_record(
        Stamps(admitted=100.0, taken=100.0, published=110.0, committed=160.0),
        ScoringRecord("given_up"),
        generation=make_generation(generate_s=10.0),
    )
    assert stages_of(given_up) == {"generation": 10.0, "sample_queue": 50.0}


def test_unknown_groups_leave_the_group_stages_undefined() -> None:
    seconds = group_stage_seconds(SampleColumns.from_records([build_sample()]), {})
    assert set(seconds) == set(GROUP_STAGES)
    assert all(of_stage[0] != of_stage[0] for of_stage in seconds.values())
