"""prometheus-operator and Prometheus take what the chart gives; an alert fires for a job whose judge is slow."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import pytest
from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML
from scoring_job import NAMESPACE, Measured, ScoringJob, judged

pytestmark = pytest.mark.timeout(1200)

RULES = ("rules/plaudit.yaml", "alerts/run.yaml", "alerts/operator.yaml")


def ask(cluster: Cluster, path: str) -> Any:
    """Return the response of Prometheus to a query."""
    service = "/api/v1/namespaces/monitoring/services/prometheus-operated:9090/proxy/api/v1/"
    done = cluster.kubectl("get", "--raw", service + path, check=False)
    return json.loads(done.stdout)["data"] if done.returncode == 0 else {}


def up(cluster: Cluster) -> dict[str, int]:
    """Return the number of healthy targets by monitor."""
    found = ask(cluster, f"query?query={quote('sum by (job) (up)')}").get("result", [])
    return {item["metric"]["job"]: int(item["value"][1]) for item in found}


def test_prometheus_loads_every_rule_and_finds_no_fault(monitored: Cluster):
    files = [YAML(typ="safe").load(ROOT / "metrics" / name) for name in RULES]
    wanted = {group["name"]: len(group["rules"]) for file in files for group in file["groups"]}

    def loaded() -> list[dict[str, Any]]:
        groups = [group for group in ask(monitored, "rules").get("groups", []) if group["name"] in wanted]
        evaluated = [rule["health"] != "unknown" for group in groups for rule in group["rules"]]
        return groups if len(groups) == len(wanted) and all(evaluated) else []

    groups = monitored.until("the rules", loaded, 240)
    assert {group["name"]: len(group["rules"]) for group in groups} == wanted
    assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []


def test_operators_are_scraped(monitored: Cluster):
    monitored.until("both operators", lambda: up(monitored).get("plaudit-operator") == 2, 120)


def test_an_alert_fires_for_a_job_whose_judge_is_slow(monitored: Cluster, measured: Measured):
    objective = {"rewardLatency": {"thresholdSeconds": 0.2, "target": 0.99}}
    with ScoringJob(monitored, "slow", metrics=objective) as job:
        query = f'plaudit_workers{{job_name="slow",namespace="{NAMESPACE}",run="{job.run}"}}'
        monitored.until("its metrics", lambda: ask(monitored, f"query?query={quote(query)}").get("result"), 120)
        firing = f'ALERTS{{alertname="RewardLatencyBurn",alertstate="firing",severity="critical",run="{job.run}"}}'
        began = time.monotonic()
        with job.load(judged("late", 100_000, 0.5)):
            monitored.until("the alert", lambda: ask(monitored, f"query?query={quote(firing)}").get("result"), 300)
        measured("Prometheus: RewardLatencyBurn after the first late sample", time.monotonic() - began)


def test_grafana_would_find_the_same_alerts(monitored: Cluster):
    by_hand = YAML(typ="safe").load(ROOT / "metrics" / "alerts" / "grafana-configmap.yaml")
    found = monitored.get("configmap", "plaudit-grafana-alerts", "plaudit")
    contents = [YAML(typ="safe").load(each["data"]["plaudit-alerts.yaml"]) for each in (found, by_hand)]
    assert contents[0] == contents[1]
    assert found["metadata"]["labels"].items() >= by_hand["metadata"]["labels"].items()
