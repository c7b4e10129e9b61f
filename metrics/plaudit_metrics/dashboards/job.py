"""``Plaudit / Job``: bottleneck, scorers, queue age and failures on the first screen; stages and transport below."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from plaudit_metrics.alerting.thresholds import LOGPROB_DIFFERENCE
from plaudit_metrics.alerting.thresholds import THRESHOLDS as T
from plaudit_metrics.dashboards.panels import (
    BYTES,
    COUNT,
    OF_RUN,
    PER_SECOND,
    POINT_IN_TIME,
    SECONDS,
    SHARE,
    bars,
    frame,
    lines,
    run_variable,
    stat,
)

_STEP_RATE = f"sum(rate(plaudit_step_seconds_sum{{{OF_RUN}}}[$__range]))"


def dashboard() -> Dashboard:
    """Return the dashboard."""
    board = frame("plaudit-job", "Plaudit / Job", "What each step of a run waits for, and why").with_variable(
        run_variable()
    )
    for row in (_first_screen, _stages, _judges, _policy, _transport):
        board = row(board)
    return board


def _first_screen(board: Dashboard) -> Dashboard:
    exposed = f"sum(rate(plaudit_step_exposed_reward_seconds_sum{{{OF_RUN}}}[$__range])) / {_STEP_RATE}"
    failed = (
        f'sum(increase(plaudit_samples_total{{{OF_RUN}, outcome!="scored"}}[$__range]))'
        f" / sum(increase(plaudit_samples_total{{{OF_RUN}}}[$__range]))"
    )
    share = T["exposedShare"]
    stats = (
        stat("Step time waiting for rewards", exposed, SHARE, warn=share / 2, bad=share),
        stat(
            "Oldest unscored sample",
            f'max(plaudit_stream_oldest_undelivered_seconds{{{OF_RUN}, stream="samples"}})',
            SECONDS,
            warn=T["queueAgeSeconds"] / 4,
            bad=T["queueAgeSeconds"],
        ),
        stat("Samples without a score", failed, SHARE, warn=T["failedShare"] / 2, bad=T["failedShare"]),
        stat("Newest step", f"max(plaudit_step{{{OF_RUN}}})", COUNT),
        stat(
            "Last step closed",
            f"1000 * max(plaudit_step_last_closed_timestamp_seconds{{{OF_RUN}}})",
            POINT_IN_TIME,
        ),
        stat("Mean reward", f"avg(plaudit_reward_mean{{{OF_RUN}}})", COUNT),
    )
    for panel in stats:
        board = board.with_panel(panel)
    waits = f"sum by (cause) (rate(plaudit_step_wait_seconds_sum{{{OF_RUN}}}[$__range])) / on() group_left {_STEP_RATE}"
    trainer = f"1 - sum(rate(plaudit_step_wait_seconds_sum{{{OF_RUN}}}[$__range])) / {_STEP_RATE}"
    calls = (
        f"sum by (scorer) (rate(plaudit_score_seconds_sum{{{OF_RUN}}}[$__range]))"
        f" / sum by (scorer) (rate(plaudit_score_seconds_count{{{OF_RUN}}}[$__range]))"
    )
    failures = (
        f'sum by (scorer, outcome) (increase(plaudit_score_seconds_count{{{OF_RUN}, outcome!="scored"}}[$__range]))'
    )
    return (
        board.with_panel(
            bars(
                "Bottleneck: where the steps' time went",
                SHARE,
                (waits, "{{cause}}"),
                (trainer, "trainer"),
            )
        )
        .with_panel(bars("Scorers: mean seconds of a call", SECONDS, (calls, "{{scorer}}")))
        .with_panel(bars("Failed scores by scorer", COUNT, (failures, "{{scorer}}: {{outcome}}")))
        .with_panel(
            lines(
                "Age of the oldest unread entry",
                SECONDS,
                (f"max by (stream) (plaudit_stream_oldest_undelivered_seconds{{{OF_RUN}}})", "{{stream}}"),
            )
        )
        .with_panel(
            lines(
                "Queue depth",
                COUNT,
                (f"sum by (stream) (plaudit_stream_undelivered{{{OF_RUN}}})", "{{stream}}: waiting"),
                (f"sum by (stream) (plaudit_stream_in_flight{{{OF_RUN}}})", "{{stream}}: in progress"),
            )
        )
        .with_panel(
            lines(
                "Samples by outcome",
                PER_SECOND,
                (f"sum by (outcome) (rate(plaudit_samples_total{{{OF_RUN}}}[$__rate_interval])) > 0", "{{outcome}}"),
                stacked=True,
            )
        )
    )


def _stages(board: Dashboard) -> Dashboard:
    means = (
        f"sum by (stage) (rate(plaudit_stage_seconds_sum{{{OF_RUN}}}[$__rate_interval]))"
        f" / sum by (stage) (rate(plaudit_stage_seconds_count{{{OF_RUN}}}[$__rate_interval]) > 0)"
    )
    slow = (
        "histogram_quantile(0.95, sum by (stage, le)"
        f" (rate(plaudit_stage_seconds_bucket{{{OF_RUN}}}[$__rate_interval])) > 0)"
    )
    good = (
        f"sum(rate(plaudit_reward_latency_good_total{{{OF_RUN}}}[$__rate_interval]))"
        f" / sum(rate(plaudit_reward_latency_total{{{OF_RUN}}}[$__rate_interval]))"
    )
    steps = (
        f"sum(rate(plaudit_step_seconds_sum{{{OF_RUN}}}[$__rate_interval]))"
        f" / sum(rate(plaudit_step_seconds_count{{{OF_RUN}}}[$__rate_interval]))"
    )
    return (
        board.with_row(Row("Stages"))
        .with_panel(lines("Stages of a sample, mean", SECONDS, (means, "{{stage}}"), stacked=True))
        .with_panel(lines("Stages of a sample, p95", SECONDS, (slow, "{{stage}}")))
        .with_panel(
            lines(
                "Samples scored within the threshold",
                SHARE,
                (good, "share"),
                (f"max(plaudit_reward_latency_target{{{OF_RUN}}})", "target"),
            )
        )
        .with_panel(lines("Step duration", SECONDS, (steps, "step")))
        .with_panel(
            lines("Workers", COUNT, (f"sum by (role, state) (plaudit_workers{{{OF_RUN}}})", "{{role}}: {{state}}"))
        )
        .with_panel(
            lines(
                "Groups",
                PER_SECOND,
                (f"sum by (outcome) (rate(plaudit_groups_total{{{OF_RUN}}}[$__rate_interval]))", "{{outcome}}"),
            )
        )
    )


def _judges(board: Dashboard) -> Dashboard:
    waits = (
        f"sum by (judge) (rate(plaudit_limiter_wait_seconds_sum{{{OF_RUN}}}[$__rate_interval]))"
        f" / sum by (judge) (rate(plaudit_limiter_wait_seconds_count{{{OF_RUN}}}[$__rate_interval]))"
    )
    requests = f"sum by (judge, status) (rate(plaudit_judge_requests_total{{{OF_RUN}}}[$__rate_interval]))"
    tokens = f"sum by (judge, kind) (rate(plaudit_judge_tokens_total{{{OF_RUN}}}[$__rate_interval]))"
    circuits = f"max by (judge) (plaudit_judge_circuit_open{{{OF_RUN}}})"
    return (
        board.with_row(Row("Judges and limits"))
        .with_panel(lines("Mean wait for a limit", SECONDS, (waits, "{{judge}}")))
        .with_panel(lines("Requests by status", PER_SECOND, (requests, "{{judge}}: {{status}}")))
        .with_panel(
            lines(
                "Tokens per second, open circuit breakers",
                COUNT,
                (tokens, "{{judge}}: {{kind}}"),
                (circuits, "{{judge}}: open"),
            )
        )
    )


def _policy(board: Dashboard) -> Dashboard:
    differing = (
        f'1 - sum(rate(plaudit_logprob_mismatch_bucket{{{OF_RUN}, le="{LOGPROB_DIFFERENCE}"}}[$__rate_interval]))'
        f" / sum(rate(plaudit_logprob_mismatch_count{{{OF_RUN}}}[$__rate_interval]))"
    )
    return (
        board.with_row(Row("Policy"))
        .with_panel(
            lines("Staleness", COUNT, (f"max by (statistic) (plaudit_sample_staleness{{{OF_RUN}}})", "{{statistic}}"))
        )
        .with_panel(
            lines(
                "Policy version",
                COUNT,
                (f"max(plaudit_policy_version{{{OF_RUN}}})", "announced"),
                (f"max(plaudit_policy_version_lag{{{OF_RUN}}})", "lag of the slowest rollout"),
            )
        )
        .with_panel(lines("Samples generated with weights other than announced", SHARE, (differing, "share")))
    )


def _transport(board: Dashboard) -> Dashboard:
    def happened(name: str) -> str:
        return f"sum by (stream) (increase(plaudit_{name}_total{{{OF_RUN}}}[$__rate_interval]))"

    return (
        board.with_row(Row("Transport"))
        .with_panel(
            lines(
                "Redis",
                BYTES,
                (f"sum(plaudit_redis_memory_bytes{{{OF_RUN}}})", "used"),
                (f"sum(plaudit_redis_memory_limit_bytes{{{OF_RUN}}})", "limit"),
            )
        )
        .with_panel(
            lines(
                "Redeliveries, duplicates, dead letters",
                COUNT,
                (happened("redeliveries"), "{{stream}}: taken over"),
                (happened("duplicates"), "{{stream}}: duplicate"),
                (happened("dead_letters"), "{{stream}}: dead letter"),
            )
        )
        .with_panel(
            lines(
                "Metrics pipeline",
                COUNT,
                (f"sum(increase(plaudit_records_missing_total{{{OF_RUN}}}[$__rate_interval]))", "events lost"),
                (f"sum(increase(plaudit_records_late_total{{{OF_RUN}}}[$__rate_interval]))", "events late"),
                (f"min(plaudit_redis_aof_ok{{{OF_RUN}}})", "Redis writes its file"),
            )
        )
    )
