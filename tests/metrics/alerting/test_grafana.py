"""Grafana's rules are what its own types accept, and say the same as Prometheus's (test_alerts runs both)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import Rule

from plaudit_metrics.monitoring.alerts import ALERTS
from plaudit_metrics.monitoring.rules import filled

FOLDER = Path(__file__).parents[3] / "metrics" / "alerts"
PROVISIONED: dict[str, Any] = yaml.safe_load((FOLDER / "grafana.yaml").read_text())
RULES: list[dict[str, Any]] = [rule for group in PROVISIONED["groups"] for rule in group["rules"]]


def test_every_alert_is_a_rule() -> None:
    titles = [rule["title"] for rule in RULES]
    assert [title.partition(" (")[0] for title in titles] == [alert.name for alert in ALERTS]
    assert len(set(titles)) == len(titles)  # Grafana wants them unique in a folder


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["title"])
def test_grafanas_types_round_trip(rule: dict[str, Any]) -> None:
    read = json.loads(json.dumps(Rule.from_json(rule), cls=JSONEncoder))
    assert {name: read[name] for name in rule} == rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["title"])
def test_a_rule_fires_for_each_series_that_its_query_returns(rule: dict[str, Any]) -> None:
    query, condition = rule["data"]
    assert rule["condition"] == condition["refId"]
    assert condition["model"]["expression"] == f"is_number(${query['refId']})"
    assert rule["noDataState"] == "OK"
    assert len(rule["uid"]) <= 40
    assert "run:" not in query["model"]["expr"]
    assert "$value " not in rule["annotations"]["summary"]


def test_only_recorded_series_make_a_difference_to_prometheus() -> None:
    expressions = [rule["data"][0]["model"]["expr"] for rule in RULES]
    for alert, expression in zip(ALERTS, expressions, strict=True):
        assert (expression == filled(alert.full_expression)) == ("run:" not in alert.full_expression)


def test_uids_are_unique() -> None:
    assert len({rule["uid"] for rule in RULES}) == len(RULES)


def test_the_config_map_holds_the_file_and_the_sidecars_label() -> None:
    config_map = yaml.safe_load((FOLDER / "grafana-configmap.yaml").read_text())
    assert config_map["metadata"]["labels"] == {"grafana_alert": "1"}
    (content,) = config_map["data"].values()
    assert yaml.safe_load(content) == PROVISIONED
