"""The alerts as Grafana-managed rules: a provisioning file, and the same in a ConfigMap for Grafana's sidecar.

For clusters in which Grafana evaluates alerts. Recorded series are put in place of their names, so nothing needs to be
loaded into Prometheus. A rule fires for each series that its query returns, whatever the value (``== 0`` returns
zeros): its condition is ``is_number``.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grafana_foundation_sdk.builders.alerting import Query, Rule
from grafana_foundation_sdk.builders.expr import TypeMath
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from plaudit_metrics.alerting.alerts import ALERTS, Alert
from plaudit_metrics.alerting.recording import recording_rules
from plaudit_metrics.alerting.windows import AS_WRITTEN, Windows

DATA_SOURCE_UID = "prometheus"
"""What kube-prometheus-stack calls its own; change it in the file where yours is another."""
FOLDER = "Plaudit"
_EVALUATED_EVERY = "1m"
_EXPRESSIONS = DataSourceRef("__expr__", "__expr__")


def provisioning(windows: Windows = AS_WRITTEN) -> dict[str, Any]:
    """The content of a file in Grafana's ``provisioning/alerting``."""
    return {
        "apiVersion": 1,
        "groups": [
            {
                "orgId": 1,
                "name": f"plaudit.{where}",
                "folder": FOLDER,
                "interval": _EVALUATED_EVERY,
                "rules": [_file_form(grafana_rule(alert, windows)) for alert in ALERTS if alert.where == where],
            }
            for where in ("run", "operator")
        ],
    }


def config_map(content: str) -> dict[str, Any]:
    """The provisioning file as a ConfigMap that the sidecar of Grafana's chart finds by its label."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "plaudit-grafana-alerts", "labels": {"grafana_alert": "1"}},
        "data": {"plaudit-alerts.yaml": content},
    }


def grafana_rule(alert: Alert, windows: Windows = AS_WRITTEN) -> Rule:
    """One rule: query A, and B which is true for every series that A returns."""
    expression = windows.expression(_without_recorded_series(alert.expression))
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
        .annotations({**alert.rule(windows)["annotations"], "summary": _in_grafanas_words(alert.summary)})
    )


def _title(alert: Alert) -> str:
    """Titles are unique in a folder; an alert with two severities is two rules."""
    namesakes = [other for other in ALERTS if other.name == alert.name]
    return alert.name if len(namesakes) == 1 else f"{alert.name} ({alert.severity})"


def _without_recorded_series(expression: str) -> str:
    recorded = {rule["record"]: rule["expr"] for rule in recording_rules()["groups"][0]["rules"]}
    return re.sub(r"\brun:[\w:]+", lambda found: f"({recorded[found[0]]})", expression)


def _in_grafanas_words(summary: str) -> str:
    """In Prometheus's templates ``$value`` is the number; in Grafana's it is a text that describes all of them."""
    return summary.replace("$value", "$values.A.Value")


def _file_form(rule: Rule) -> dict[str, Any]:
    """The rule as the provisioning file has it, where folder, group and organization stand outside."""
    fields: dict[str, Any] = json.loads(json.dumps(rule.build(), cls=JSONEncoder))
    outside = {"folderUID", "ruleGroup", "orgID"}
    first = {name: fields[name] for name in ("uid", "title", "condition")}
    return first | {name: value for name, value in fields.items() if name not in outside}
