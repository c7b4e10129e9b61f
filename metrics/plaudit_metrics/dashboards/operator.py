"""``Plaudit / Operator``: leadership, backlog and conditions of the RLJobs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from plaudit_metrics.alerting.thresholds import THRESHOLDS as T
from plaudit_metrics.dashboards.panels import COUNT, PER_SECOND, SECONDS, bars, frame, lines, stat


def dashboard() -> Dashboard:
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
    for panel in stats:
        board = board.with_panel(panel.span(6))
    means = (
        "sum by (result) (rate(plaudit_operator_reconcile_seconds_sum[$__rate_interval]))"
        " / sum by (result) (rate(plaudit_operator_reconcile_seconds_count[$__rate_interval]) > 0)"
    )
    rates = "sum by (result) (rate(plaudit_operator_reconcile_seconds_count[$__rate_interval]))"
    # Each operator pod reports every job.
    conditions = 'count by (type) (max by (namespace, name, type) (plaudit_rljob_condition{status="True"}))'
    phases = "count by (phase) (max by (namespace, name, phase) (plaudit_rljob_info))"
    return (
        board.with_panel(
            bars(
                "RLJobs by true condition", COUNT, (conditions, "{{type}}"), about="Jobs for which a condition is True."
            )
        )
        .with_panel(lines("Reconciliations", PER_SECOND, (rates, "{{result}}"), about="Per second, by result."))
        .with_panel(
            lines(
                "Mean duration of a reconciliation",
                SECONDS,
                (means, "{{result}}"),
                about="Seconds of a reconciliation, by result.",
            )
        )
        .with_panel(
            lines(
                "Queue",
                COUNT,
                ("max(plaudit_operator_queue_depth)", "waiting"),
                about="Jobs that wait to be reconciled, over time.",
            )
        )
        .with_panel(
            lines(
                "Age of the last event by kind",
                SECONDS,
                ("max by (kind) (plaudit_operator_watch_last_event_age_seconds)", "{{kind}}"),
                about="Since the watch of each kind received an event. Kinds that rarely change have long ages.",
            )
        )
        .with_panel(lines("RLJobs by phase", COUNT, (phases, "{{phase}}"), about="Jobs in each phase, over time."))
    )
