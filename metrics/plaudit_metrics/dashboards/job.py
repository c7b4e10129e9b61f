"""``Plaudit / Job``: bottleneck, scorers, queue age and failures on the first screen; details of each part below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from plaudit_metrics.alerting.thresholds import THRESHOLDS as T
from plaudit_metrics.dashboards.panels import (
    BYTES,
    COUNT,
    OF_RUN,
    PER_SECOND,
    SECONDS,
    SHARE,
    bars,
    frame,
    lines,
    stat,
    with_run_variables,
)

_LAST_S = f"sum(plaudit_last_step_seconds{{{OF_RUN}}})"


def _rate(name: str, by: str = "", window: str = "$__rate_interval", where: str = "") -> str:
    """Return the rate of a counter, summed over all labels but ``by``."""
    return f"sum by ({by}) (rate({name}{{{OF_RUN}{where}}}[{window}]))"


def _newest(name: str, by: str = "", where: str = "") -> str:
    """Return a gauge, the largest over all labels but ``by``."""
    return f"max by ({by}) ({name}{{{OF_RUN}{where}}})"


def dashboard() -> Dashboard:
    """Return the dashboard."""
    board = with_run_variables(frame("plaudit-job", "Plaudit / Job", "What each step of a run waits for, and why"))
    for panel in _first_screen():
        board = board.with_panel(panel)
    rows: dict[str, Callable[[], Sequence[Any]]] = {
        "Reward": _reward,
        "Scorers": _scorers,
        "Steps and stages": _stages,
        "Generation and rollout engines": _generation,
        "Tools": _tools,
        "Judges and limits": _judges,
        "Policy": _policy,
        "Transport": _transport,
    }
    for title, panels in rows.items():
        board = board.with_row(Row(title))
        for panel in panels():
            board = board.with_panel(panel)
    return board


def _first_screen() -> Sequence[Any]:
    share = T["exposedShare"]
    exposed = f"sum(plaudit_last_step_exposed_reward_seconds{{{OF_RUN}}}) / {_LAST_S}"
    waits = f"sum by (cause) (plaudit_last_step_wait_seconds{{{OF_RUN}}}) / on() group_left () {_LAST_S}"
    trainer = f"1 - sum(plaudit_last_step_wait_seconds{{{OF_RUN}}}) / {_LAST_S}"
    failures = (
        f'sum by (scorer, outcome) (increase(plaudit_score_seconds_count{{{OF_RUN}, outcome!="scored"}}[$__range]))'
    )
    oldest = _newest("plaudit_stream_oldest_undelivered_seconds", where=', stream="samples"')
    return (
        stat("Newest step waiting for rewards", exposed, SHARE, warn=share / 2, bad=share),
        stat("Oldest unscored sample", oldest, SECONDS, warn=T["queueAgeSeconds"] / 4, bad=T["queueAgeSeconds"]),
        stat(
            "Samples without a score",
            _newest("plaudit_last_step_masked_share"),
            SHARE,
            warn=T["failedShare"] / 2,
            bad=T["failedShare"],
            about="Of the newest step.",
        ),
        stat("Newest step", _newest("plaudit_step"), COUNT),
        stat("Since the last step", f"time() - {_newest('plaudit_step_last_closed_timestamp_seconds')}", SECONDS),
        stat("Mean reward", f"avg(plaudit_reward_mean{{{OF_RUN}}})", COUNT, about="Of the newest step."),
        bars(
            "Bottleneck: where the newest step's time went",
            SHARE,
            (waits, "{{cause}}"),
            (trainer, "trainer"),
            about="Waits of the trainer by cause; the rest is its own work.",
        ),
        bars(
            "Scorers: p50 and p99 of a call in the newest step",
            SECONDS,
            (_newest("plaudit_last_step_scorer_seconds", "scorer, statistic"), "{{scorer}}: {{statistic}}"),
            about="Exact quantiles of the last attempts.",
        ),
        bars("Failed scores by scorer", COUNT, (failures, "{{scorer}}: {{outcome}}"), about="In the range of time."),
        lines(
            "Age of the oldest unread entry",
            SECONDS,
            (_newest("plaudit_stream_oldest_undelivered_seconds", "stream"), "{{stream}}"),
            about="Long ages of samples: too few reward workers.",
        ),
        lines(
            "Queue depth",
            COUNT,
            (_newest("plaudit_stream_undelivered", "stream"), "{{stream}}: waiting"),
            (_newest("plaudit_stream_in_flight", "stream"), "{{stream}}: in progress"),
        ),
        lines(
            "Samples by outcome",
            PER_SECOND,
            (f"{_rate('plaudit_samples_total', 'outcome')} > 0", "{{outcome}}"),
            stacked=True,
        ),
    )


def _reward() -> Sequence[Any]:
    mean, std = _newest("plaudit_reward_mean"), _newest("plaudit_reward_std")
    return (
        lines(
            "Reward",
            COUNT,
            (mean, "mean"),
            (f"{mean} - {std}", "mean - standard deviation"),
            (f"{mean} + {std}", "mean + standard deviation"),
            signed=True,
            about="Of the newest step; samples without a score are not zeros.",
        ),
        lines(
            "Values of the scorers",
            COUNT,
            (_newest("plaudit_last_step_scorer_value", "scorer"), "{{scorer}}"),
            signed=True,
            about="Mean of the newest step.",
        ),
        lines(
            "Groups that train nothing",
            SHARE,
            (_newest("plaudit_last_step_zero_variance_share"), "all rewards equal"),
            (_newest("plaudit_last_step_masked_share"), "samples without a score"),
        ),
    )


def _scorers() -> Sequence[Any]:
    failed = _rate("plaudit_score_seconds_count", "scorer, outcome", where=', outcome!="scored"')
    quantiles = [
        (f"histogram_quantile({q}, {_rate('plaudit_score_seconds_bucket', 'scorer, le')} > 0)", f"{{{{scorer}}}}: {q}")
        for q in (0.5, 0.99)
    ]
    return (
        lines("Duration of a call by scorer, p50 and p99", SECONDS, *quantiles, about="Estimated from buckets."),
        lines("Failed calls by scorer", PER_SECOND, (failed, "{{scorer}}: {{outcome}}")),
        lines(
            "Age of the oldest call by scorer",
            SECONDS,
            (_newest("plaudit_scorer_oldest_in_flight_seconds", "scorer"), "{{scorer}}"),
            about="Calls that have not ended are in no other figure.",
        ),
        lines("Calls in flight by scorer", COUNT, (_newest("plaudit_scorer_in_flight", "scorer"), "{{scorer}}")),
        lines(
            "Samples scored within the threshold",
            SHARE,
            (f"1 - {_newest('plaudit_recent_late_ratio')}", "newest 100 samples"),
            (_newest("plaudit_reward_latency_target"), "target"),
        ),
        lines("Workers", COUNT, (_newest("plaudit_workers", "role, state"), "{{role}}: {{state}}")),
    )


def _stages() -> Sequence[Any]:
    sums, counts = (_rate(f"plaudit_stage_seconds_{each}", "stage") for each in ("sum", "count"))
    slow = f"histogram_quantile(0.95, {_rate('plaudit_stage_seconds_bucket', 'stage, le')} > 0)"
    return (
        lines(
            "Step duration",
            SECONDS,
            (_newest("plaudit_last_step_seconds"), "step"),
            (_newest("plaudit_last_step_update_seconds"), "update"),
            (_newest("plaudit_last_step_exposed_reward_seconds"), "waiting for rewards"),
        ),
        lines(
            "Time since the last step",
            SECONDS,
            (f"time() - {_newest('plaudit_step_opened_timestamp_seconds')}", "open step"),
            (_newest("plaudit_recent_steps_max_seconds"), "longest of the newest steps"),
        ),
        lines(
            "Steps per hour",
            COUNT,
            (f"3600 / ({_newest('plaudit_last_step_seconds')} > 0)", "by the newest step"),
        ),
        lines("Stages of a sample, mean", SECONDS, (f"{sums} / ({counts} > 0)", "{{stage}}"), stacked=True),
        lines("Stages of a sample, p95", SECONDS, (slow, "{{stage}}")),
        lines("Groups", PER_SECOND, (_rate("plaudit_groups_total", "outcome"), "{{outcome}}")),
    )


def _generation() -> Sequence[Any]:
    lengths = [
        (f"histogram_quantile({q}, {_rate('plaudit_response_tokens_bucket', 'le')} > 0)", f"p{q * 100:g}")
        for q in (0.5, 0.99)
    ]
    return (
        lines(
            "Response tokens per second",
            COUNT,
            (_newest("plaudit_last_step_tokens_per_second"), "newest step"),
            (_rate("plaudit_response_tokens_sum"), "now"),
        ),
        lines("Response length", COUNT, *lengths),
        lines(
            "Truncated responses",
            SHARE,
            (_newest("plaudit_last_step_truncated_share"), "at the token limit"),
            about="Share of the newest step.",
        ),
        lines("Preemptions", PER_SECOND, (_rate("plaudit_preemptions_total"), "samples")),
        lines(
            "Requests in the engines",
            COUNT,
            (_newest("plaudit_engine_requests", "state"), "{{state}}"),
            about="Of all rollouts.",
        ),
        lines(
            "Key-value cache in use",
            SHARE,
            (_newest("plaudit_engine_kv_cache_ratio", "statistic"), "{{statistic}} of the rollouts"),
            about="Near 1 the engine preempts samples.",
        ),
        lines(
            "Time to the first token",
            SECONDS,
            (_newest("plaudit_engine_first_token_seconds", "statistic"), "{{statistic}} of the rollouts"),
            about="Mean of each rollout's newest 100 requests, waits in the engine's queue included.",
        ),
    )


def _tools() -> Sequence[Any]:
    return (
        lines(
            "Tool calls by outcome",
            PER_SECOND,
            (_rate("plaudit_tool_calls_total", "tool, outcome"), "{{tool}}: {{outcome}}"),
            about="error: the tool raised. killed: its process ended. refused: it was never run.",
        ),
        lines(
            "Failed share of the newest tool calls",
            SHARE,
            (_newest("plaudit_tool_recent_failed_ratio", "tool"), "{{tool}}"),
            about="Of the newest 100 calls that were run.",
        ),
        lines(
            "Duration of a tool call, p50 and p99 in the newest step",
            SECONDS,
            (_newest("plaudit_last_step_tool_seconds", "tool, statistic"), "{{tool}}: {{statistic}}"),
            about="Exact quantiles, the start of the tool's process included.",
        ),
        lines(
            "Seconds in tools per second, by tool",
            COUNT,
            (_rate("plaudit_tool_call_seconds_sum", "tool"), "{{tool}}"),
            about="Calls that run at the same time, on average.",
        ),
    )


def _judges() -> Sequence[Any]:
    return (
        lines(
            "Mean wait for a limit",
            SECONDS,
            (_newest("plaudit_limiter_recent_wait_seconds", "judge"), "{{judge}}"),
            about="Of the newest 100 calls.",
        ),
        lines(
            "Requests by status",
            PER_SECOND,
            (_rate("plaudit_judge_requests_total", "judge, status"), "{{judge}}: {{status}}"),
        ),
        lines(
            "Tokens per second, open circuit breakers",
            COUNT,
            (_rate("plaudit_judge_tokens_total", "judge, kind"), "{{judge}}: {{kind}}"),
            (_newest("plaudit_judge_circuit_open", "judge"), "{{judge}}: open"),
        ),
    )


def _policy() -> Sequence[Any]:
    return (
        lines(
            "Staleness",
            COUNT,
            (_newest("plaudit_sample_staleness", "statistic"), "{{statistic}}"),
            (_newest("plaudit_staleness_limit"), "limit"),
        ),
        lines(
            "Policy version",
            COUNT,
            (_newest("plaudit_policy_version"), "announced"),
            (_newest("plaudit_policy_version_lag"), "lag of the slowest rollout"),
        ),
        lines(
            "Samples generated with weights other than announced",
            SHARE,
            (_newest("plaudit_recent_logprob_mismatch_ratio"), "newest 100 samples"),
        ),
    )


def _transport() -> Sequence[Any]:
    def happened(name: str) -> str:
        return f"sum by (stream) (increase(plaudit_{name}_total{{{OF_RUN}}}[$__rate_interval]))"

    return (
        lines(
            "Redis",
            BYTES,
            (_newest("plaudit_redis_memory_bytes"), "used"),
            (_newest("plaudit_redis_memory_limit_bytes"), "limit"),
        ),
        lines(
            "Redeliveries, duplicates, dead letters",
            COUNT,
            (happened("redeliveries"), "{{stream}}: taken over"),
            (happened("duplicates"), "{{stream}}: duplicate"),
            (happened("dead_letters"), "{{stream}}: dead letter"),
        ),
        lines(
            "Metrics pipeline",
            COUNT,
            (f"sum(increase(plaudit_records_missing_total{{{OF_RUN}}}[$__rate_interval]))", "events lost"),
            (f"sum(increase(plaudit_records_late_total{{{OF_RUN}}}[$__rate_interval]))", "events late"),
            (_newest("plaudit_redis_aof_ok"), "Redis writes its file"),
            (_newest("plaudit_redis_up"), "Redis responds"),
        ),
    )
