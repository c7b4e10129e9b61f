"""Prometheus accepts the series, and they count what happened."""

from __future__ import annotations

import shutil
import subprocess

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from plaudit_metrics.service.series.run import RunInfo, RunSeries
from plaudit_metrics.sources.snapshot import RunSnapshot, StreamDepth
from plaudit_metrics.statistics.columns import MOST_TOOLS
from plaudit_metrics.statistics.stages import BUCKETS, BatchHistogram
from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.records import (
    CallRecord,
    EngineStatus,
    SandboxRecord,
    SandboxWork,
    ScorerRecord,
    ScorerWork,
    StepRecord,
    TurnRecord,
    WorkerRecord,
)
from stage_records import build_group, build_sample


@pytest.fixture
def used() -> RunSeries:
    """Series after two samples, a group, a step and a look around."""
    series = RunSeries(latency_threshold_s=5.0, latency_target=0.95)
    judge = {"judge": ScorerRecord("scored", 0.5, limiter_s=1.0, call_s=2.0)}
    samples = [
        build_sample(index=0, generation=1.0, score=2.0, scorers=judge),
        build_sample(index=1, generation=1.0, score=9.0, scorers=judge, outcome="timeout"),
    ]
    record = build_group(samples, group_scorer=1.0)
    series.count_samples(samples)
    series.count_group(record, samples)
    series.count_step(step_record(3, 1, samples, groups=[record], opened=0.0, closed=20.0), records_missing=1)
    series.count_late(2)
    series.show_snapshot(
        RunSnapshot(
            streams={"samples": StreamDepth(4, 2, 7.5)},
            redeliveries={"samples": 3},
            duplicates={"samples": 1},
            dead_letters={"samples": 1},
            workers={("reward", "busy"): 2},
            worker_records=(WorkerRecord("reward-1", "reward", circuits_open=["strict"]),),
            judge_requests={("big", "200"): 40, ("big", "429"): 2},
            judge_tokens={("big", "prompt"): 900},
            cache_reads={("big", "hit"): 3},
            policy_version=7,
            policy_version_lag=1,
            memory_bytes=1000,
            memory_limit_bytes=4000,
        )
    )
    return series


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("plaudit_samples_total", {"outcome": "timeout"}, 1),
        ("plaudit_groups_total", {"outcome": "trained"}, 1),
        ("plaudit_stage_seconds_count", {"stage": "score"}, 2),
        ("plaudit_stage_seconds_sum", {"stage": "score"}, 11),
        ("plaudit_stage_seconds_bucket", {"stage": "score", "le": "2.5"}, 1),
        ("plaudit_stage_seconds_sum", {"stage": "group_wait"}, 7),
        ("plaudit_stage_seconds_count", {"stage": "group_scorer"}, 1),
        ("plaudit_score_seconds_count", {"scorer": "judge", "outcome": "scored"}, 2),
        ("plaudit_limiter_wait_seconds_sum", {"judge": "judge"}, 2),
        ("plaudit_reward_latency_total", {"split": "train"}, 2),
        ("plaudit_reward_latency_good_total", {"split": "train"}, 1),
        ("plaudit_reward_latency_target", {}, 0.95),
        ("plaudit_step", {}, 3),
        ("plaudit_step_last_closed_timestamp_seconds", {}, 20),
        ("plaudit_step_seconds_sum", {}, 20),
        ("plaudit_last_step_seconds", {}, 20),
        ("plaudit_last_step_masked_share", {}, 0.5),
        ("plaudit_redis_up", {}, 1),
        ("plaudit_records_missing_total", {}, 1),
        ("plaudit_records_late_total", {}, 2),
        ("plaudit_stream_undelivered", {"stream": "samples"}, 4),
        ("plaudit_stream_oldest_undelivered_seconds", {"stream": "samples"}, 7.5),
        ("plaudit_redeliveries_total", {"stream": "samples"}, 3),
        ("plaudit_workers", {"role": "reward", "state": "busy"}, 2),
        ("plaudit_judge_requests_total", {"judge": "big", "status": "429"}, 2),
        ("plaudit_judge_tokens_total", {"judge": "big", "kind": "prompt"}, 900),
        ("plaudit_score_cache_reads_total", {"scorer": "big", "result": "hit"}, 3),
        ("plaudit_judge_circuit_open", {"judge": "big"}, 0),
        ("plaudit_judge_circuit_open", {"judge": "strict"}, 1),
        ("plaudit_policy_version", {}, 7),
        ("plaudit_policy_version_lag", {}, 1),
        ("plaudit_redis_memory_limit_bytes", {}, 4000),
        ("plaudit_redis_aof_ok", {}, 1),
    ],
)
def test_each_series_has_the_expected_value(used: RunSeries, name: str, labels: dict[str, str], value: float) -> None:
    assert used.registry.get_sample_value(name, labels) == pytest.approx(value)


def test_a_redis_that_does_not_respond_is_shown_as_down_until_it_does(used: RunSeries) -> None:
    used.show_redis_down()
    assert used.registry.get_sample_value("plaudit_redis_up") == 0
    for name in ("plaudit_redis_aof_ok", "plaudit_redis_memory_bytes", "plaudit_policy_version"):
        assert used.registry.get_sample_value(name) is None
    used.show_snapshot(RunSnapshot(time=1234.5))
    assert used.registry.get_sample_value("plaudit_redis_up") == 1
    assert used.registry.get_sample_value("plaudit_redis_last_seen_timestamp_seconds") == 1234.5


def test_a_restored_step_has_its_last_step_gauges(used: RunSeries) -> None:
    restored = RunSeries()
    restored.restore_steps([StepRecord(9, 1, 10.0, 310.0, 1, 1, {"exposed_reward_s": 60.0, "wait/score_s": 50.0})])
    value = restored.registry.get_sample_value
    assert value("plaudit_last_step_seconds") == 300
    assert value("plaudit_last_step_exposed_reward_seconds") == 60
    assert value("plaudit_last_step_wait_seconds", {"cause": "score"}) == 50
    assert value("plaudit_step_seconds_count") == 0


def test_figures_of_a_step_are_absent_until_one_has_closed() -> None:
    exposed = {family.name for family in RunSeries().registry.collect() for sample in family.samples}
    assert not exposed & {
        "plaudit_step",
        "plaudit_last_step_seconds",
        "plaudit_reward_mean",
        "plaudit_sample_staleness",
    }


def test_the_figures_of_auditors_and_of_watched_scorers_are_gauges() -> None:
    series, bounds = RunSeries(), ("value", "reward", "gap", "agreement")
    single = {"groups": 40.0, "failed": 2.0, "waiting": 1.0}
    figures = {f"audit/honest/{name}{end}": 0.5 for name in bounds for end in ("", "_low", "_high")}
    figures |= {f"audit/honest/{name}": value for name, value in single.items()} | {"drift/judge/value": 0.25}
    figures |= {"audit/honest/diverges": 0.004, "audit/honest/diverges/a/code": 0.004, "audit/honest/diverges/b": 0.5}
    series.restore_steps([StepRecord(1, 1, 0.0, 1.0, 4, 1, figures)])
    read = series.registry.get_sample_value
    for name in bounds:
        for statistic in ("mean", "low", "high"):
            assert read(f"plaudit_audit_{name}", {"scorer": "honest", "statistic": statistic}) == 0.5
    names = ("groups", "failed_samples", "waiting_groups")
    assert [read(f"plaudit_audit_{name}", {"scorer": "honest"}) for name in names] == [*single.values()]
    assert read("plaudit_scorer_drift", {"scorer": "judge", "statistic": "mean"}) == 0.25
    probability = "plaudit_audit_divergence_probability"
    assert read(probability, {"scorer": "honest", "data_source": "a/code"}) == 0.004
    series.restore_steps([StepRecord(2, 1, 1.0, 2.0, 4, 1, figures | {"audit/honest/diverges": 0.001})])
    assert read(probability, {"scorer": "honest", "data_source": ""}) == 0.001  # all sources together
    assert read(probability, {"scorer": "honest", "data_source": "a/code"}) is None


def test_the_open_step_began_at_the_newest_close_or_at_the_trainers_start_if_that_is_later() -> None:
    series = RunSeries()
    series.restore_steps([StepRecord(9, 1, 10.0, 310.0, 1, 1, {})])
    assert series.registry.get_sample_value("plaudit_step_opened_timestamp_seconds") == 310
    resumed = WorkerRecord("trainer-0", "trainer", started=900.0)
    series.show_snapshot(RunSnapshot(worker_records=(resumed,), workers={("trainer", "idle"): 1}))
    series.show_snapshot(RunSnapshot())
    assert series.registry.get_sample_value("plaudit_step_opened_timestamp_seconds") == 900


def test_a_sample_that_fails_fast_is_not_in_time_and_validation_does_not_count_as_training() -> None:
    series = RunSeries(latency_threshold_s=5.0)
    failed = [build_sample(f"t-{n}", outcome="data_error", score=0.1) for n in range(30)]
    series.count_samples([*failed, *(build_sample(f"v-{n}", score=9.0, split="validation") for n in range(50))])
    value = series.registry.get_sample_value
    assert value("plaudit_recent_late_ratio") == 1
    assert value("plaudit_recent_failed_ratio") == pytest.approx(30 / 80)
    assert value("plaudit_reward_latency_good_total", {"split": "train"}) == 0
    assert value("plaudit_reward_latency_total", {"split": "validation"}) == 50


def test_a_restart_restores_the_shares_of_the_newest_samples_without_counting_them() -> None:
    series = RunSeries(latency_threshold_s=5.0)
    series.count_samples([build_sample(f"t-{n}", score=9.0) for n in range(30)], count=False)
    assert series.registry.get_sample_value("plaudit_recent_late_ratio") == 1
    assert series.registry.get_sample_value("plaudit_samples_total", {"outcome": "scored"}) == 0


def test_a_counter_that_steps_back_in_redis_does_not_look_reset() -> None:
    series = RunSeries()
    for count in (100, 99, 102):
        series.show_snapshot(RunSnapshot(streams={"samples": StreamDepth()}, redeliveries={"samples": count}))
    assert series.registry.get_sample_value("plaudit_redeliveries_total", {"stream": "samples"}) == 103


def test_a_scorers_oldest_call_is_that_of_any_worker() -> None:
    workers = tuple(WorkerRecord(f"reward-{n}", "reward", scorers={"judge": ScorerWork(2, 30.0 * n)}) for n in range(3))
    series = RunSeries()
    series.show_snapshot(RunSnapshot(worker_records=workers))
    labels = {"scorer": "judge"}
    assert series.registry.get_sample_value("plaudit_scorer_oldest_in_flight_seconds", labels) == 60
    assert series.registry.get_sample_value("plaudit_scorer_in_flight", labels) == 6


def test_a_role_without_a_process_is_zero_where_the_job_needs_it() -> None:
    training, service = RunSeries(info=RunInfo("a", "on-policy", 0)), RunSeries(info=RunInfo("a", "service"))
    for series in (training, service):
        series.show_snapshot(RunSnapshot())
    labels = {"role": "trainer", "state": "busy"}
    assert training.registry.get_sample_value("plaudit_workers", labels) == 0
    assert service.registry.get_sample_value("plaudit_workers", labels) is None


def test_workers_that_are_gone_are_no_longer_shown(used: RunSeries) -> None:
    used.show_snapshot(RunSnapshot(workers={("rollout", "idle"): 1}))
    assert used.registry.get_sample_value("plaudit_workers", {"role": "reward", "state": "busy"}) is None
    assert used.registry.get_sample_value("plaudit_workers", {"role": "rollout", "state": "idle"}) == 1


def test_promtool_finds_nothing_to_complain_about(used: RunSeries) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=generate_latest(used.registry), capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0, 400), max_size=50))
def test_a_batch_counts_like_one_value_at_a_time(values: list[float]) -> None:
    batches, singles = CollectorRegistry(), CollectorRegistry()
    ours = BatchHistogram("seconds", "Seconds", ["stage"], batches)
    theirs = Histogram("seconds", "Seconds", ["stage"], registry=singles, buckets=BUCKETS)
    for part in (values[::2], values[1::2]):
        ours.observe(np.array(part), "score")
    for value in values:
        theirs.labels("score").observe(value)
    for bound in [*(str(float(bucket)) for bucket in BUCKETS), "+Inf"]:
        labels = {"stage": "score", "le": bound}
        expected = singles.get_sample_value("seconds_bucket", labels) if values else None
        assert batches.get_sample_value("seconds_bucket", labels) == expected


def test_nothing_that_never_happened_is_observed() -> None:
    registry = CollectorRegistry()
    histogram = BatchHistogram("seconds", "Seconds", ["stage"], registry)
    histogram.observe(np.array([np.nan, 1.0, np.nan]), "score")
    assert registry.get_sample_value("seconds_count", {"stage": "score"}) == 1


def test_calls_of_tools_are_counted_and_refused_ones_are_no_failures() -> None:
    calls = [CallRecord("search", outcome, 0.0, 2.0) for outcome in ("ok", "error", "refused", "refused")]
    made = [build_sample(index=index, turns=[TurnRecord(0, 4, 0.0, 1.0, calls=calls)]) for index in range(10)]
    series = RunSeries()
    series.count_samples(made)
    value = series.registry.get_sample_value
    assert value("plaudit_tool_calls_total", {"tool": "search", "outcome": "refused"}) == 20
    assert value("plaudit_tool_call_seconds_count", {"tool": "search"}) == 20
    assert value("plaudit_tool_recent_failed_ratio", {"tool": "search"}) == 0.5


def test_machines_are_counted_by_stage_and_result_and_absent_in_a_job_without() -> None:
    series, plain = RunSeries(), RunSeries()
    made = [build_sample(index=index, sandboxes=4.0) for index in range(30)]
    broken = msgspec.structs.replace(made[0].generation, sandbox=SandboxRecord(4.0, claim_s=1.0, failed=True))
    made += [msgspec.structs.replace(build_sample(index=index), generation=broken) for index in range(30, 40)]
    series.count_samples(made)
    value = series.registry.get_sample_value
    assert value("plaudit_sandbox_machines_total", {"result": "ok"}) == 30
    assert value("plaudit_sandbox_machines_total", {"result": "failed"}) == 10
    assert value("plaudit_sandbox_seconds_sum", {"stage": "start"}) == 160
    assert value("plaudit_sandbox_recent_failed_ratio") == 0.25
    plain.count_samples([build_sample(index=index) for index in range(30)])
    assert plain.registry.get_sample_value("plaudit_sandbox_machines_total", {"result": "ok"}) is None
    assert plain.registry.get_sample_value("plaudit_sandbox_recent_failed_ratio") is None


def test_machines_of_now_are_those_of_rollouts_and_what_the_trainer_sees_beyond() -> None:
    series = RunSeries()
    rollouts = [
        WorkerRecord(f"rollout-{number}", "rollout", sandboxes=SandboxWork(3, 1, 2 * number, 5.0 * number))
        for number in range(2)
    ]
    trainer = WorkerRecord("trainer-0", "trainer", sandboxes=SandboxWork(20))
    series.show_snapshot(RunSnapshot(time=1000.0, worker_records=(*rollouts, trainer)))
    value = series.registry.get_sample_value
    states = {"waiting": 2, "starting": 2, "in_use": 6, "left": 12}
    assert {state: value("plaudit_sandboxes", {"state": state}) for state in states} == states
    assert value("plaudit_sandbox_oldest_wait_seconds") == 5.0
    series.show_snapshot(RunSnapshot(time=1001.0, worker_records=(WorkerRecord("rollout-0", "rollout"),)))
    assert value("plaudit_sandboxes", {"state": "waiting"}) is None


def test_any_number_of_tools_becomes_few_series() -> None:
    calls = [CallRecord(f"tool-{number}", "ok", 0.0, 0.0) for number in range(200)]
    series = RunSeries()
    for index, call in enumerate(calls):
        series.count_samples([build_sample(index=index, turns=[TurnRecord(0, 4, 0.0, 1.0, calls=[call])])])
    counted = {
        each.labels["tool"]
        for family in series.registry.collect()
        if family.name == "plaudit_tool_calls"
        for each in family.samples
    }
    assert "unknown" in counted
    assert len(counted) == MOST_TOOLS + 1


def test_engines_of_several_rollouts_are_added_up_and_absent_without_one() -> None:
    series = RunSeries()
    engines = [EngineStatus(6, 2, 0.25, 0.5), EngineStatus(4, 0, 0.75, None)]
    records = [WorkerRecord(f"rollout-{number}", "rollout", engine=each) for number, each in enumerate(engines)]
    series.show_snapshot(RunSnapshot(worker_records=tuple(records)))
    value = series.registry.get_sample_value
    assert [value("plaudit_engine_requests", {"state": state}) for state in ("running", "waiting")] == [10, 2]
    for name, mean, largest in (("kv_cache_ratio", 0.5, 0.75), ("first_token_seconds", 0.5, 0.5)):
        assert value(f"plaudit_engine_{name}", {"statistic": "mean"}) == mean
        assert value(f"plaudit_engine_{name}", {"statistic": "max"}) == largest
    series.show_snapshot(RunSnapshot())
    assert value("plaudit_engine_requests", {"state": "running"}) is None
