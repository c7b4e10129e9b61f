"""The Grafana dashboards, built with Grafana's own builders and committed in ``metrics/dashboards``.

Here are ``Plaudit / Fleet`` (all runs that Prometheus scrapes, compared) and ``Plaudit / Operator`` (leadership,
backlog and conditions of the RLJobs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from plaudit_metrics.monitoring.job_dashboard import job_dashboard
from plaudit_metrics.monitoring.panels import (
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
    to_job,
    with_panels,
    with_run_variables,
)
from plaudit_metrics.monitoring.rules import THRESHOLDS as T


def fleet_dashboard() -> Dashboard:
    """Return the dashboard."""
    board = frame("plaudit-fleet", "Plaudit / Fleet", "All runs: time waiting for rewards, queue age, stalled steps")
    board = _totals(with_run_variables(board))
    board = with_panels(board, map(_linked, _shares()))
    return with_panels(board.with_row(Row("Over time")), map(_linked, _rates()))


def _linked(panel: Any) -> Any:
    """Add the link to a run's dashboard where each series is one run's."""
    of_runs = {target.legend_format for target in panel.build().targets} == {"{{run}}"}
    return panel.data_links([to_job()]) if of_runs else panel


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
        stat(
            "Runs",
            f"count(plaudit_run_info{{{OF_RUN}}})",
            COUNT,
            about="Runs whose metrics service Prometheus scrapes.",
        ),
        stat(
            "Processes", f"sum(plaudit_workers{{{OF_RUN}}})", COUNT, about="Live processes of these runs, of all roles."
        ),
        stat(
            "Samples per second",
            f"sum(rate(plaudit_samples_total{{{OF_RUN}}}[$__range]))",
            PER_SECOND,
            about="Samples of all these runs that ended, in the range of time.",
        ),
        stat(
            "Step time waiting for rewards",
            exposed,
            SHARE,
            warn=share / 2,
            bad=share,
            about="Share of the step time of these runs in which trainers waited for rewards, in the range of time.",
        ),
        stat(
            "Samples without a score",
            failed,
            SHARE,
            warn=T["failedShare"] / 2,
            bad=T["failedShare"],
            about="Share of the samples of these runs, in the range of time.",
        ),
        stat(
            "Longest time without a step",
            f"max(time() - plaudit_step_opened_timestamp_seconds{{{OF_RUN}}})",
            SECONDS,
            bad=T["stalledSeconds"],
            about="Age of the oldest open step of these runs.",
        ),
    )
    return with_panels(board, panels)


def _shares() -> Sequence[Any]:
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
        bars(
            "Step time waiting for rewards by run",
            SHARE,
            (exposed, "{{run}}"),
            most=1,
            about="Share of each run's step time in which its trainer waited for rewards, in the range of time.",
        ),
        bars(
            "Samples without a score by run",
            SHARE,
            (failed, "{{run}}"),
            most=1,
            about="Share of each run's samples, in the range of time.",
        ),
        bars("Redis memory", BYTES, (memory, "{{run}}"), about="Memory in use by each run's Redis."),
        bars(
            "GPU-hours",
            COUNT,
            (spent, "{{run}}"),
            about="Hours times GPUs that each run held in the range of time, by the operator.",
        ),
        bars(
            "GPU-hours by namespace",
            COUNT,
            (by_team, "{{namespace}}"),
            about="Hours times GPUs that the runs of each namespace held in the range of time, by the operator.",
        ),
        bars(
            "GPU-hours that trainers waited for rewards",
            COUNT,
            (waited, "{{run}}"),
            about="Hours times GPUs of trainers that waited for rewards in the range of time.",
        ),
    )


def _rates() -> Sequence[Any]:
    oldest = f'max by (run) (plaudit_stream_oldest_undelivered_seconds{{{OF_RUN}, stream="samples"}})'
    since = f"time() - max by (run) (plaudit_step_opened_timestamp_seconds{{{OF_RUN}}})"
    samples = f"sum by (run) (rate(plaudit_samples_total{{{OF_RUN}}}[$__rate_interval]))"
    steps = f"3600 / max by (run) (plaudit_last_step_seconds{{{OF_RUN}}} > 0)"
    reward = f"max by (run) (plaudit_reward_mean{{{OF_RUN}}})"
    busy = f'sum by (run) (plaudit_workers{{{OF_RUN}, role="reward", state="busy"}})'
    return (
        lines(
            "Oldest unscored sample",
            SECONDS,
            (oldest, "{{run}}"),
            about="Age of each run's oldest finished sample that no reward worker has taken.",
        ),
        lines("Time since the last step", SECONDS, (since, "{{run}}"), about="Age of each run's open step."),
        lines("Samples per second by run", PER_SECOND, (samples, "{{run}}"), about="Samples of each run that ended."),
        lines("Steps per hour", COUNT, (steps, "{{run}}"), about="By the length of the newest step."),
        lines(
            "Mean reward",
            COUNT,
            (reward, "{{run}}"),
            signed=True,
            about="Of each run's newest step; samples without a score are not zeros.",
        ),
        lines("Busy reward workers", COUNT, (busy, "{{run}}"), about="Reward workers of each run that score a sample."),
    )


def operator_dashboard() -> Dashboard:
    """Return the dashboard."""
    board = frame("plaudit-operator", "Plaudit / Operator", "The cluster's operator and its RLJobs")
    stats = (
        stat("Leaders", "sum(plaudit_operator_leader)", COUNT, about="Operator pods that lead. It must be 1."),
        stat(
            "RLJobs",
            "count(max by (namespace, name) (plaudit_rljob_info))",
            COUNT,
            about="Jobs that the operator knows.",
        ),
        stat(
            "Waiting to be reconciled",
            "max(plaudit_operator_queue_depth)",
            COUNT,
            bad=T["operatorQueueDepth"],
            about="Jobs in the queue of the leader.",
        ),
        stat(
            "Age of the newest cluster event",
            "max(plaudit_operator_watch_last_event_age_seconds)",
            SECONDS,
            bad=T["operatorEventAgeSeconds"],
            about="Seconds since the operator received an event of any watch.",
        ),
    )
    means = (
        "sum by (result) (rate(plaudit_operator_reconcile_seconds_sum[$__rate_interval]))"
        " / sum by (result) (rate(plaudit_operator_reconcile_seconds_count[$__rate_interval]) > 0)"
    )
    rates = "sum by (result) (rate(plaudit_operator_reconcile_seconds_count[$__rate_interval]))"
    # Each operator pod reports every job.
    conditions = 'count by (type) (max by (namespace, name, type) (plaudit_rljob_condition{status="True"}))'
    phases = "count by (phase) (max by (namespace, name, phase) (plaudit_rljob_info))"
    over_time = (
        bars("RLJobs by true condition", COUNT, (conditions, "{{type}}"), about="Jobs for which a condition is True."),
        lines("Reconciliations", PER_SECOND, (rates, "{{result}}"), about="Per second, by result."),
        lines(
            "Mean duration of a reconciliation",
            SECONDS,
            (means, "{{result}}"),
            about="Seconds of a reconciliation, by result.",
        ),
        lines(
            "Queue",
            COUNT,
            ("max(plaudit_operator_queue_depth)", "waiting"),
            about="Jobs that wait to be reconciled, over time.",
        ),
        lines(
            "Age of the last event by kind",
            SECONDS,
            ("max by (kind) (plaudit_operator_watch_last_event_age_seconds)", "{{kind}}"),
            about="Since the watch of each kind received an event. Kinds that rarely change have long ages.",
        ),
        lines("RLJobs by phase", COUNT, (phases, "{{phase}}"), about="Jobs in each phase, over time."),
    )
    return with_panels(board, [*(panel.span(6) for panel in stats), *over_time])


DASHBOARDS: dict[str, Dashboard] = {
    "job": job_dashboard(),
    "fleet": fleet_dashboard(),
    "operator": operator_dashboard(),
}
"""File name without ending → dashboard."""
