"""The alerts as Grafana-managed rules: a provisioning file, and the same in a ConfigMap for Grafana's sidecar.

For clusters in which Grafana evaluates alerts. Expressions of recorded series replace their names, so Prometheus needs
no rules. A rule fires for each series that its query returns, whatever the value (``== 0`` returns zeros): its
condition is ``is_number``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders.alerting import Query, Rule
from grafana_foundation_sdk.builders.expr import TypeMath
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from plaudit_metrics.monitoring.alerts import ALERTS, recording_rules
from plaudit_metrics.monitoring.panels import panel_id
from plaudit_metrics.monitoring.rules import AS_WRITTEN, THRESHOLDS, Alert, Windows

DATA_SOURCE_UID = "prometheus"
"""The uid in kube-prometheus-stack; edit the file where yours differs."""
FOLDER = "Plaudit"
_EVALUATED_EVERY = "1m"
_EXPRESSIONS = DataSourceRef("__expr__", "__expr__")


def provisioning(values: Mapping[str, float] | None = THRESHOLDS) -> dict[str, Any]:
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


def grafana_rule(alert: Alert, windows: Windows = AS_WRITTEN, values: Mapping[str, float] | None = THRESHOLDS) -> Rule:
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
