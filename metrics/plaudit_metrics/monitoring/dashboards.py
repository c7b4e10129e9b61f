"""The Grafana dashboards and Grafana-managed alerts, built with Grafana's own builders and committed in ``metrics``.

Here are ``Plaudit / Fleet`` (all runs that Prometheus scrapes, compared) and ``Plaudit / Operator`` (leadership,
backlog and conditions of the RLJobs).

The alerts are for clusters in which Grafana evaluates them: a provisioning file, and the same in a ConfigMap for
Grafana's sidecar. Expressions of recorded series replace their names, so Prometheus needs no rules. A rule fires for
each series that its query returns, whatever the value (``== 0`` returns zeros): its condition is ``is_number``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders.alerting import Query, Rule
from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.expr import TypeMath
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from plaudit_metrics.monitoring.alerts import ALERTS, recording_rules
from plaudit_metrics.monitoring.job_dashboard import job_dashboard
from plaudit_metrics.monitoring.panels import (
    BYTES,
    COUNT,
    OF_RUN,
    OLDEST_SAMPLE,
    PER_SECOND,
    SECONDS,
    SHARE,
    Bars,
    Lines,
    Stat,
    frame,
    panel_id,
    to_job,
    with_panels,
    with_run_variables,
)
from plaudit_metrics.monitoring.rules import AS_WRITTEN, Alert, Windows
from plaudit_metrics.monitoring.rules import THRESHOLDS as T

DATA_SOURCE_UID = "prometheus"
"""The uid in kube-prometheus-stack; edit the file where yours differs."""
FOLDER = "Plaudit"
_EVALUATED_EVERY = "1m"
_EXPRESSIONS = DataSourceRef("__expr__", "__expr__")


def _fleet_dashboard() -> Dashboard:
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
        Stat("Runs", COUNT, "Runs whose metrics service Prometheus scrapes.").of(
            f"count(plaudit_run_info{{{OF_RUN}}})"
        ),
        Stat("Processes", COUNT, "Live processes of these runs, of all roles.").of(f"sum(plaudit_workers{{{OF_RUN}}})"),
        Stat("Samples per second", PER_SECOND, "Samples of all these runs that ended, in the range of time.").of(
            f"sum(rate(plaudit_samples_total{{{OF_RUN}}}[$__range]))"
        ),
        Stat(
            "Step time waiting for rewards",
            SHARE,
            "Share of the step time of these runs in which trainers waited for rewards, in the range of time.",
            warn=share / 2,
            bad=share,
        ).of(exposed),
        Stat(
            "Samples without a score",
            SHARE,
            "Share of the samples of these runs, in the range of time.",
            warn=T["failedShare"] / 2,
            bad=T["failedShare"],
        ).of(failed),
        Stat(
            "Longest time without a step",
            SECONDS,
            "Age of the oldest open step of these runs.",
            bad=T["stalledSeconds"],
        ).of(
            f"max(plaudit_redis_last_seen_timestamp_seconds{{{OF_RUN}}}"
            f" - plaudit_step_opened_timestamp_seconds{{{OF_RUN}}})"
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
        Bars(
            "Step time waiting for rewards by run",
            SHARE,
            "Share of each run's step time in which its trainer waited for rewards, in the range of time.",
            most=1,
        ).of((exposed, "{{run}}")),
        Bars("Samples without a score by run", SHARE, "Share of each run's samples, in the range of time.", most=1).of(
            (failed, "{{run}}")
        ),
        Bars("Redis memory", BYTES, "Memory in use by each run's Redis.").of((memory, "{{run}}")),
        Bars("GPU-hours", COUNT, "Hours times GPUs that each run held in the range of time, by the operator.").of(
            (spent, "{{run}}")
        ),
        Bars(
            "GPU-hours by namespace",
            COUNT,
            "Hours times GPUs that the runs of each namespace held in the range of time, by the operator.",
        ).of((by_team, "{{namespace}}")),
        Bars(
            "GPU-hours that trainers waited for rewards",
            COUNT,
            "Hours times GPUs of trainers that waited for rewards in the range of time.",
        ).of((waited, "{{run}}")),
    )


def _rates() -> Sequence[Any]:
    oldest = f"max by (run) ({OLDEST_SAMPLE})"
    since = (
        f"max by (run) (plaudit_redis_last_seen_timestamp_seconds{{{OF_RUN}}}"
        f" - plaudit_step_opened_timestamp_seconds{{{OF_RUN}}})"
    )
    samples = f"sum by (run) (rate(plaudit_samples_total{{{OF_RUN}}}[$__rate_interval]))"
    steps = f"3600 / max by (run) (plaudit_last_step_seconds{{{OF_RUN}}} > 0)"
    reward = f"max by (run) (plaudit_reward_mean{{{OF_RUN}}})"
    busy = f'sum by (run) (plaudit_workers{{{OF_RUN}, role="reward", state="busy"}})'
    return (
        Lines(
            "Oldest unscored sample",
            SECONDS,
            "Age of each run's oldest finished sample without a score, in the queue or in work.",
        ).of((oldest, "{{run}}")),
        Lines("Time since the last step", SECONDS, "Age of each run's open step.").of((since, "{{run}}")),
        Lines("Samples per second by run", PER_SECOND, "Samples of each run that ended.").of((samples, "{{run}}")),
        Lines("Steps per hour", COUNT, "By the length of the newest step.").of((steps, "{{run}}")),
        Lines(
            "Mean reward", COUNT, "Of each run's newest step; samples without a score are not zeros.", signed=True
        ).of((reward, "{{run}}")),
        Lines("Busy reward workers", COUNT, "Reward workers of each run that score a sample.").of((busy, "{{run}}")),
    )


def _operator_dashboard() -> Dashboard:
    board = frame("plaudit-operator", "Plaudit / Operator", "The cluster's operator and its RLJobs")
    stats = (
        Stat("Leaders", COUNT, "Operator pods that lead. It must be 1.").of("sum(plaudit_operator_leader)"),
        Stat("RLJobs", COUNT, "Jobs that the operator knows.").of(
            "count(max by (namespace, name) (plaudit_rljob_info))"
        ),
        Stat("Waiting to be reconciled", COUNT, "Jobs in the queue of the leader.", bad=T["operatorQueueDepth"]).of(
            "max(plaudit_operator_queue_depth)"
        ),
        Stat(
            "Age of the newest cluster event",
            SECONDS,
            "Seconds since the operator received an event of any watch.",
            bad=T["operatorEventAgeSeconds"],
        ).of("max(plaudit_operator_watch_last_event_age_seconds)"),
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
        Bars("RLJobs by true condition", COUNT, "Jobs for which a condition is True.").of((conditions, "{{type}}")),
        Lines("Reconciliations", PER_SECOND, "Per second, by result.").of((rates, "{{result}}")),
        Lines("Mean duration of a reconciliation", SECONDS, "Seconds of a reconciliation, by result.").of(
            (means, "{{result}}")
        ),
        Lines("Queue", COUNT, "Jobs that wait to be reconciled, over time.").of(
            ("max(plaudit_operator_queue_depth)", "waiting")
        ),
        Lines(
            "Age of the last event by kind",
            SECONDS,
            "Since the watch of each kind received an event. Kinds that rarely change have long ages.",
        ).of(("max by (kind) (plaudit_operator_watch_last_event_age_seconds)", "{{kind}}")),
        Lines("RLJobs by phase", COUNT, "Jobs in each phase, over time.").of((phases, "{{phase}}")),
    )
    return with_panels(board, [*(panel.span(6) for panel in stats), *over_time])


DASHBOARDS: dict[str, Dashboard] = {
    "job": job_dashboard(),
    "fleet": _fleet_dashboard(),
    "operator": _operator_dashboard(),
}
"""File name without ending → dashboard."""


def provisioning(values: Mapping[str, float] | None = T) -> dict[str, Any]:
    """Return the content of a file in Grafana's ``provisioning/alerting``; see ``Alert.rule`` for ``values``."""
    return {
        "apiVersion": 1,
        "groups": [
            {
                "orgId": 1,
                "name": f"plaudit.{where}",
                "folder": FOLDER,
                "interval": _EVALUATED_EVERY,
                "rules": [_file_form(grafana_rule(alert, values=values)) for alert in ALERTS if alert.where == where],
            }
            for where in ("run", "operator")
        ],
    }


def config_map(content: str) -> dict[str, Any]:
    """Return the provisioning file as a ConfigMap, with the label for the sidecar of Grafana's chart."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "plaudit-grafana-alerts", "labels": {"grafana_alert": "1"}},
        "data": {"plaudit-alerts.yaml": content},
    }


def grafana_rule(alert: Alert, windows: Windows = AS_WRITTEN, values: Mapping[str, float] | None = T) -> Rule:
    """Return one rule: query A, and B, which is true for every series that A returns."""
    prometheus_rule = alert.rule(windows, values)
    recorded = {rule["record"]: rule["expr"] for rule in recording_rules(windows)["groups"][0]["rules"]}
    expression = re.sub(r"\brun:[\w:]+", lambda found: f"({recorded[found[0]]})", prometheus_rule["expr"])
    # In Prometheus's templates $value is the number, in Grafana's a text about all values.
    texts = prometheus_rule["annotations"].items()
    annotations = {name: text.replace("$value", "$values.A.Value") for name, text in texts}
    if alert.panel:
        annotations |= {"__dashboardUid__": "plaudit-job", "__panelId__": str(panel_id(alert.panel))}
    query = Dataquery().expr(expression).instant().ref_id("A").datasource(DataSourceRef("prometheus", DATA_SOURCE_UID))
    fires = TypeMath().expression("is_number($A)").ref_id("B").datasource(_EXPRESSIONS)
    return (
        Rule(_title(alert))
        .uid(f"plaudit-{alert.name}-{alert.severity}".lower())
        .folder_uid(FOLDER.lower())
        .rule_group(f"plaudit.{alert.where}")
        .condition("B")
        .with_query(
            Query("A").datasource_uid(DATA_SOURCE_UID).relative_time_range(RelativeTimeRange(600, 0)).model(query)
        )
        .with_query(Query("B").datasource_uid("__expr__").relative_time_range(RelativeTimeRange(0, 0)).model(fires))
        .no_data_state("OK")
        .exec_err_state("Error")
        .for_val(windows.duration(alert.held))
        .labels({"severity": alert.severity})
        .annotations(annotations)
    )


def _title(alert: Alert) -> str:
    """Return a title that is unique in its folder: an alert with two severities is two rules."""
    namesakes = [other for other in ALERTS if other.name == alert.name]
    return alert.name if len(namesakes) == 1 else f"{alert.name} ({alert.severity})"


def _file_form(rule: Rule) -> dict[str, Any]:
    """Return the rule as in a provisioning file, where folder, group and organization are outside of it."""
    fields: dict[str, Any] = json.loads(json.dumps(rule.build(), cls=JSONEncoder))
    outside = {"folderUID", "ruleGroup", "orgID"}
    first = {name: fields[name] for name in ("uid", "title", "condition")}
    return first | {name: value for name, value in fields.items() if name not in outside}
