"""``Plaudit / Fleet``: compare all runs that Prometheus scrapes."""

from __future__ import annotations

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


def dashboard() -> Dashboard:
    """Return the dashboard."""
    board = frame("plaudit-fleet", "Plaudit / Fleet", "All runs: time waiting for rewards, queue age, stalled steps")
    return _rates(_shares(_totals(with_run_variables(board))))


def _totals(board: Dashboard) -> Dashboard:
    exposed = (
        f"sum(rate(plaudit_step_exposed_reward_seconds_sum{{{OF_RUN}}}[$__range]))"
        f" / sum(rate(plaudit_step_seconds_sum{{{OF_RUN}}}[$__range]))"
    )
    failed = (
        f'sum(increase(plaudit_samples_total{{{OF_RUN}, outcome!="scored"}}[$__range]))'
        f" / sum(increase(plaudit_samples_total{{{OF_RUN}}}[$__range]))"
    )
    share = T["exposedShare"]
    panels = (
        stat("Runs", f"count(plaudit_run_info{{{OF_RUN}}})", COUNT),
        stat("Processes", f"sum(plaudit_workers{{{OF_RUN}}})", COUNT),
        stat("Samples per second", f"sum(rate(plaudit_samples_total{{{OF_RUN}}}[$__range]))", PER_SECOND),
        stat("Step time waiting for rewards", exposed, SHARE, warn=share / 2, bad=share),
        stat("Samples without a score", failed, SHARE, warn=T["failedShare"] / 2, bad=T["failedShare"]),
        stat(
            "Longest time without a step",
            f"max(time() - plaudit_step_opened_timestamp_seconds{{{OF_RUN}}})",
            SECONDS,
            bad=T["stalledSeconds"],
        ),
    )
    for panel in panels:
        board = board.with_panel(panel)
    return board


def _shares(board: Dashboard) -> Dashboard:
    exposed = (
        f"sum by (run) (rate(plaudit_step_exposed_reward_seconds_sum{{{OF_RUN}}}[$__range]))"
        f" / sum by (run) (rate(plaudit_step_seconds_sum{{{OF_RUN}}}[$__range]))"
    )
    failed = (
        f'sum by (run) (rate(plaudit_samples_total{{{OF_RUN}, outcome!="scored"}}[$__range]))'
        f" / sum by (run) (rate(plaudit_samples_total{{{OF_RUN}}}[$__range]))"
    )
    # Every replica of the operator reports the same jobs.
    spent = (
        f"sum by (run) (max by (run, role) (increase(plaudit_rljob_gpu_seconds_total{{{OF_RUN}}}[$__range]))) / 3600"
    )
    by_team = (  # a team has a namespace
        "sum by (namespace) (max by (namespace, run, role)"
        f" (increase(plaudit_rljob_gpu_seconds_total{{{OF_RUN}}}[$__range]))) / 3600"
    )
    waited = f"max by (run) (increase(plaudit_rljob_exposed_reward_gpu_seconds_total{{{OF_RUN}}}[$__range])) / 3600"
    memory = f"max by (run) (plaudit_redis_memory_bytes{{{OF_RUN}}})"
    return (
        board.with_panel(bars("Step time waiting for rewards", SHARE, (exposed, "{{run}}"), most=1))
        .with_panel(bars("Samples without a score", SHARE, (failed, "{{run}}"), most=1))
        .with_panel(bars("Redis memory", BYTES, (memory, "{{run}}")))
        .with_panel(bars("GPU-hours", COUNT, (spent, "{{run}}")))
        .with_panel(bars("GPU-hours by namespace", COUNT, (by_team, "{{namespace}}")))
        .with_panel(bars("GPU-hours that trainers waited for rewards", COUNT, (waited, "{{run}}")))
    )


def _rates(board: Dashboard) -> Dashboard:
    oldest = f'max by (run) (plaudit_stream_oldest_undelivered_seconds{{{OF_RUN}, stream="samples"}})'
    since = f"time() - max by (run) (plaudit_step_opened_timestamp_seconds{{{OF_RUN}}})"
    samples = f"sum by (run) (rate(plaudit_samples_total{{{OF_RUN}}}[$__rate_interval]))"
    steps = f"3600 / max by (run) (plaudit_last_step_seconds{{{OF_RUN}}} > 0)"
    reward = f"max by (run) (plaudit_reward_mean{{{OF_RUN}}})"
    busy = f'sum by (run) (plaudit_workers{{{OF_RUN}, role="reward", state="busy"}})'
    return (
        board.with_row(Row("Over time"))
        .with_panel(lines("Oldest unscored sample", SECONDS, (oldest, "{{run}}")))
        .with_panel(lines("Time since the last step", SECONDS, (since, "{{run}}")))
        .with_panel(lines("Samples per second", PER_SECOND, (samples, "{{run}}")))
        .with_panel(lines("Steps per hour", COUNT, (steps, "{{run}}"), about="By the length of the newest step."))
        .with_panel(lines("Mean reward", COUNT, (reward, "{{run}}"), signed=True))
        .with_panel(lines("Busy reward workers", COUNT, (busy, "{{run}}")))
    )
