"""The dictionary of a step."""

from __future__ import annotations

import math
import sys

import msgspec
import numpy as np
import pytest

from builders import make_sample_record
from plaudit_metrics.statistics.columns import ColumnCollector, SampleColumns
from plaudit_metrics.statistics.steps import slowest_samples, step_record, step_statistics
from plaudit_wire.records import (
    CallOutcome,
    CallRecord,
    GroupRecord,
    SandboxRecord,
    ScorerRecord,
    ScoringRecord,
    Stamps,
    TurnRecord,
    WaitRecord,
)
from stage_records import build_group, build_sample


def test_rewards_are_averaged_over_scored_samples_only() -> None:
    samples = [
        build_sample(index=0, value=1.0),
        build_sample(index=1, value=0.0),
        build_sample(index=2, outcome="timeout"),
        build_sample(index=3, outcome="poison"),
    ]
    statistics = step_statistics(samples, opened=0.0, closed=5.0)
    assert statistics["reward/mean"] == 0.5
    assert statistics["reward/std"] == 0.5
    assert statistics["reward_pipeline/masked_share"] == 0.5
    assert statistics["reward_pipeline/outcome/timeout"] == 1
    assert statistics["reward_pipeline/outcome/scored"] == 2
    assert statistics["reward_pipeline/dead"] == 1


def test_a_step_in_which_everything_failed_has_no_mean_reward() -> None:
    statistics = step_statistics([build_sample(outcome="timeout")], opened=0.0, closed=5.0)
    assert "reward/mean" not in statistics
    assert statistics["reward_pipeline/masked_share"] == 1.0


SIGNS = {"a": 1.0, "b": -1.0}


@pytest.mark.parametrize("values", [[1.0, 1.0], [1.0, 0.5], [1.0, -1.0]])
def test_rewards_near_the_largest_float_leave_out_what_they_have_no_figure_of(values: list[float]) -> None:
    samples = [
        build_sample(
            index=index,
            value=sys.float_info.max * value,
            scorers={name: ScorerRecord("scored", sys.float_info.max * value * sign) for name, sign in SIGNS.items()},
        )
        for index, value in enumerate(values)
    ]
    statistics = step_statistics(samples, groups=[build_group(samples, num_scored=2)], opened=0.0, closed=5.0)
    assert statistics["reward/max"] == sys.float_info.max
    assert all(math.isfinite(value) for value in statistics.values())


def test_an_empty_step_has_its_length_and_no_nan() -> None:
    statistics = step_statistics([], opened=3.0, closed=5.0, update_s=0.5, trainer_version=1)
    assert statistics["step_s"] == 2.0
    assert statistics["update_s"] == 0.5
    assert all(math.isfinite(value) for value in statistics.values())


def test_a_sample_that_was_never_generated_does_not_spoil_the_figures() -> None:
    lost = make_sample_record(Stamps(admitted=1_000_000.0, committed=1_000_900.0), ScoringRecord("given_up"), index=1)
    statistics = step_statistics(
        [build_sample(index=0, generation=2.0, score=1.0), lost], opened=0.0, closed=5.0, trainer_version=3
    )
    assert statistics["timing_s/agent_loop/generate_sequences/max"] == 2.0
    assert statistics["reward_pipeline/outcome/given_up"] == 1
    assert statistics["reward_pipeline/staleness/max"] == 0
    assert all(math.isfinite(value) for value in statistics.values())


def test_turns_and_tool_calls_are_counted_as_verl_counts_them() -> None:
    def turn(first: int, *calls: tuple[str, CallOutcome, float]) -> TurnRecord:
        records = [CallRecord(tool, outcome, 0.0, call_s) for tool, outcome, call_s in calls]
        return TurnRecord(first, 3, 0.0, 0.5, calls=records)

    parallel = [turn(0, ("search", "ok", 1.0), ("search", "timeout", 3.0)), turn(9, ("", "refused", 0.0)), turn(20)]
    plain = [turn(0, ("search", "ok", 2.0)), turn(9)]
    samples = [build_sample(index=0), build_sample(index=1), build_sample(index=2)]
    for number, turns in enumerate([parallel, plain]):
        generation = msgspec.structs.replace(samples[number].generation, turns=turns)
        samples[number] = msgspec.structs.replace(samples[number], generation=generation)
    statistics = step_statistics(samples, opened=0.0, closed=5.0)
    assert [statistics[f"num_turns/{name}"] for name in ("min", "max", "mean")] == [4, 6, 5]
    assert [statistics[f"tool_call_counts/{name}"] for name in ("min", "max", "mean")] == [1, 3, 2]
    tool = "reward_pipeline/tool"
    assert (statistics[f"{tool}/search/call_s/max"], statistics[f"{tool}/search/call_s/p50"]) == (3.0, 2.0)
    counts = {key: value for key, value in statistics.items() if key.startswith(tool) and "/outcome/" in key}
    assert counts == {
        f"{tool}/search/outcome/ok": 2,
        f"{tool}/search/outcome/timeout": 1,
        f"{tool}/unknown/outcome/refused": 1,
    }
    assert not any(
        "turns" in key or "tool_call" in key
        for key in step_statistics(samples[2:], opened=0.0, closed=5.0)
        if not key.startswith("timing_s")
    )


def test_times_of_machines_are_figures_of_the_step() -> None:
    tests = {"tests": ScorerRecord("scored", 1.0, limiter_s=3.0, extra={"verify_s": 7.0})}
    samples = [build_sample(index=number, generation=10.0, scorers=tests) for number in range(4)]
    for number in range(3):
        times = SandboxRecord(
            start_s=1.0 + number, claim_s=2.0, wait_s=0.5, exec_s=4.0 * number, num_commands=3, failed=number == 2
        )
        if number == 1:
            times = msgspec.structs.replace(times, cpus=4.0)
        generation = msgspec.structs.replace(samples[number].generation, sandbox=times)
        samples[number] = msgspec.structs.replace(samples[number], generation=generation)
    ended = build_group(samples, closed=1_000_042.0)
    figures = step_statistics(samples, groups=[ended], opened=0.0, closed=5.0)
    key = "reward_pipeline/sandbox"
    stages = {"claim": 2.0, "start": 2.0, "wait": 0.5, "exec": 4.0, "verify_wait": 3.0, "verify": 7.0}
    assert {stage: figures[f"{key}/{stage}_s/p50"] for stage in stages} == stages
    assert (figures[f"{key}/machines"], figures[f"{key}/failed"]) == (3, 1)
    held_s = 4 * (42 - 2) + (0 + 7) + (8 + 7)  # the second holds its CPUs to the end, the others for commands and tests
    assert figures[f"{key}/cpu_hours"] == pytest.approx(held_s / 3600)
    without = step_statistics(samples[3:], opened=0.0, closed=5.0)
    assert not [name for name in without if name.startswith(f"{key}/")]


@pytest.mark.parametrize(("name", "quantile"), [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)])
def test_quantiles_are_exact(name: str, quantile: float) -> None:
    seconds = np.random.default_rng(1).uniform(0, 40, 333)
    samples = [build_sample(index=index, score=float(value)) for index, value in enumerate(seconds)]
    statistics = step_statistics(samples, opened=0.0, closed=5.0)
    assert statistics[f"reward_pipeline/score_s/{name}"] == pytest.approx(
        float(np.quantile(seconds, quantile)), abs=1e-6
    )


def test_a_groups_own_waits_count_once_a_group() -> None:
    large = [build_sample("t-1-1.0", index) for index in range(9)]
    small = [build_sample("t-2-1.0", 0)]
    groups = [build_group(large, ready_queue=1.0), build_group(small, ready_queue=3.0)]
    statistics = step_statistics(large + small, groups=groups, opened=0.0, closed=5.0)
    assert statistics["reward_pipeline/ready_queue_s/mean"] == pytest.approx(2.0)


def test_each_scorer_has_figures_of_its_own() -> None:
    judge = [
        ScorerRecord("scored", 0.25, limiter_s=1.0, call_s=4.0),
        ScorerRecord("scored", 0.75, call_s=2.0),
        ScorerRecord("timeout", call_s=60.0),
    ]
    samples = [build_sample(index=index, scorers={"judge": record}) for index, record in enumerate(judge)]
    samples.append(build_sample(index=3, scorers={"rule": ScorerRecord("scored", 1.0)}))
    statistics = step_statistics(samples, opened=0.0, closed=5.0)
    assert statistics["reward_pipeline/scorer/judge/value/mean"] == 0.5
    assert statistics["reward_pipeline/scorer/judge/call_s/max"] == 60.0
    assert statistics["reward_pipeline/scorer/judge/outcome/timeout"] == 1
    assert statistics["reward_pipeline/scorer/rule/value/mean"] == 1.0


def test_numeric_extras_of_a_scorer_are_figures_and_texts_are_not() -> None:
    extras: list[dict[str, float | str]] = [{"acc": 1.0, "pred": "12"}, {"acc": 0.0}, {"pred": "7"}, {"acc": math.inf}]
    samples = [
        build_sample(index=i, scorers={"mine": ScorerRecord("scored", 1.0, extra=e)}) for i, e in enumerate(extras)
    ]
    statistics = step_statistics(samples, opened=0.0, closed=5.0)
    key = "reward_pipeline/scorer/mine/extra/acc"
    assert [statistics[f"{key}/{figure}"] for figure in ("mean", "min", "max")] == [0.5, 0.0, 1.0]
    assert not [key for key in statistics if "pred" in key]


def test_the_number_of_extras_with_figures_is_bounded() -> None:
    extra: dict[str, float | str] = {f"figure-{number}": 1.0 for number in range(100)}
    samples = [build_sample(scorers={"mine": ScorerRecord("scored", 1.0, extra=extra)})]
    statistics = step_statistics(samples, opened=0.0, closed=5.0)
    assert len([key for key in statistics if "/extra/" in key]) == 3 * 16


def test_columns_hold_every_sample_however_many_come() -> None:
    samples = [
        build_sample(f"t-{index % 7}-1.0", index, score=float(index), deliveries=1 + index % 3) for index in range(1000)
    ]
    columns = SampleColumns.from_records(samples)
    assert columns.call_s.tolist() == [float(index) for index in range(1000)]
    assert columns.deliveries.tolist() == [1 + index % 3 for index in range(1000)]
    assert [columns.groups[code] for code in columns.group] == [each.group for each in samples]


def test_columns_may_be_read_while_samples_still_come() -> None:
    collector = ColumnCollector()
    for index in range(200):
        collector.add(build_sample(index=index, score=float(index)))
        assert collector.columns().call_s.tolist() == [float(each) for each in range(index + 1)]


def test_staleness_is_taken_over_trained_samples() -> None:
    trained = [build_sample("t-1-1.0", 0, version=5), build_sample("t-1-1.0", 1, version=6)]
    dropped = [build_sample("t-2-1.0", 0, version=1)]
    groups: list[GroupRecord] = [build_group(trained), build_group(dropped, end="dropped", reason="too_few_scored")]
    statistics = step_statistics(trained + dropped, groups=groups, opened=0.0, closed=5.0, trainer_version=6)
    assert statistics["reward_pipeline/staleness/max"] == 1
    assert statistics["reward_pipeline/staleness/mean"] == 0.5


def test_redeliveries_and_duplicates_are_counted() -> None:
    samples = [build_sample(index=0), build_sample(index=1, redelivery=20.0, deliveries=2)]
    statistics = step_statistics(samples, opened=0.0, closed=5.0, duplicates=3)
    assert statistics["reward_pipeline/redelivered"] == 1
    assert statistics["reward_pipeline/duplicates"] == 3
    assert statistics["reward_pipeline/redelivery_s/max"] == 20.0


def test_records_and_columns_give_the_same_figures() -> None:
    samples = [build_sample(f"t-{index % 3}-1.0", index, generation=index, score=index % 4) for index in range(30)]
    assert step_statistics(samples, opened=0.0, closed=5.0) == step_statistics(
        SampleColumns.from_records(samples), opened=0.0, closed=5.0
    )


def test_the_record_of_a_step_names_its_verdict_and_its_slowest_sample() -> None:
    samples = [
        build_sample("t-1-1.0", 0, admitted=10.0, generation=1.0),
        build_sample("t-1-1.0", 1, admitted=10.0, score=30.0),
    ]
    record = step_record(
        7,
        2,
        samples,
        groups=[build_group(samples)],
        waits=[WaitRecord(10.0, 40.0, ["t-1-1.0"])],
        opened=10.0,
        closed=42.0,
        extra={"loss": 0.25, "grad_norm": math.nan},
    )
    assert record.verdict == "reward"
    assert record.labels["reward_pipeline/slowest/group"] == "t-1-1.0"
    assert record.labels["reward_pipeline/slowest/worker"] == "reward-1"
    assert record.statistics["reward_pipeline/slowest/index"] == 1
    assert record.statistics["loss"] == 0.25
    assert "grad_norm" not in record.statistics
    assert (record.num_samples, record.num_groups) == (2, 1)


def test_the_slowest_samples_come_first() -> None:
    samples = [build_sample(index=index, score=seconds) for index, seconds in enumerate((1.0, 5.0, 3.0, 5.0))]
    assert [each.index for each in slowest_samples(samples, 3)] == [1, 3, 2]
