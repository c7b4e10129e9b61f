"""What the chart gives to Prometheus and Grafana is what metrics/ holds. That they take it: tests/e2e_controllers."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from plaudit_metrics.monitoring.alerts import ALERTS
from plaudit_metrics.monitoring.rules import THRESHOLDS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "plaudit"
TEMPLATE = CHART / "templates" / "monitoring.yaml"


def yaml(text: str) -> Any:
    return YAML(typ="safe").load(text)


def metrics_file(name: str) -> Any:
    return yaml((ROOT / "metrics" / name).read_text())


@pytest.fixture(scope="module")
def everything(helm: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Every object of monitoring, by kind and name."""
    switches = [f"monitoring.{name}=true" for name in ("monitors", "rules", "grafanaAlerts", "dashboards")]
    return rendered(helm, ",".join(switches), "monitoring.labels.release=prometheus")


def rendered(helm: str, *values: str) -> dict[tuple[str, str], dict[str, Any]]:
    options = [word for value in values for word in ("--set-json" if "{" in value else "--set", value)]
    done = subprocess.run(
        [helm, "template", "plaudit", CHART, *options, "-s", "templates/monitoring.yaml"],
        capture_output=True,
        text=True,
        check=True,
    )
    objects = [item for item in YAML(typ="safe").load_all(done.stdout) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


def test_every_file_that_the_template_reads_is_there():
    paths = re.findall(r'"(files/[^"*]+)"', TEMPLATE.read_text())
    assert len(paths) >= 3
    for path in paths:
        assert (CHART / path).is_file(), path


def test_values_have_the_thresholds_of_the_alerts_and_accept_no_others():
    given = yaml((CHART / "values.yaml").read_text())["monitoring"]["alerts"]["thresholds"]
    assert given == THRESHOLDS
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["monitoring"]["properties"]["alerts"]
    assert set(schema["properties"]["thresholds"]["properties"]) == set(THRESHOLDS)


def test_values_change_thresholds_severities_durations_and_the_runbook_and_leave_alerts_out(helm: str):
    wanted = {
        "thresholds": {"exposedShare": 0.5},
        "severities": {"critical": "page", "ScorerSlow": "info"},
        "for": {"NoReadyRollout": "3m", "warning": "20m"},
        "keepFiringFor": {"critical": "1m"},
        "runbookUrl": "https://wiki/runbook",
        "disabled": ["RewardsUniform"],
    }
    found = rendered(
        helm,
        "monitoring.rules=true,monitoring.grafanaAlerts=true",
        f"monitoring.alerts={json.dumps(wanted)}",
    )
    groups = found["PrometheusRule", "plaudit"]["spec"]["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    assert "> 0.5" in rules["RewardStarvesTrainer"]["expr"]
    assert rules["RedisDown"]["labels"] == {"severity": "page"}
    assert rules["ScorerSlow"]["labels"] == {"severity": "info"}
    durations = {name: (rule["for"], rule.get("keep_firing_for")) for name, rule in rules.items()}
    assert durations["NoReadyRollout"] == ("3m", "1m")
    assert durations["NoTrainer"] == ("5m", "1m")
    assert durations["ScorerSlow"] == ("20m", "10m")
    assert durations["RLJobFailed"] == ("0m", None)
    assert rules["RedisDown"]["annotations"]["runbook_url"] == "https://wiki/runbook#redisdown"
    assert "RewardsUniform" not in rules
    content = yaml(found["ConfigMap", "plaudit-grafana-alerts"]["data"]["plaudit-alerts.yaml"])
    titles = {rule["title"]: rule for group in content["groups"] for rule in group["rules"]}
    assert "RewardsUniform" not in titles
    assert titles["RewardLatencyBurn (critical)"]["labels"]["severity"] == "page"
    assert (titles["NoReadyRollout"]["for"], titles["ScorerSlow"]["for"]) == ("3m", "20m")
    assert "<" not in "".join(re.findall(r"<[a-zA-Z]+>", str(rules) + str(titles)))


@pytest.mark.parametrize(("role", "port"), [("model", "model"), ("gateway", "health")])
def test_reward_models_and_gateways_are_scraped_where_policies_let_prometheus_in(helm: str, role: str, port: str):
    name = ("PodMonitor", f"plaudit-{role}s")
    assert name not in rendered(helm, "monitoring.monitors=true")
    found = rendered(helm, "monitoring.monitors=true,networkPolicies.monitoringNamespace=monitoring")[name]
    assert found["spec"]["selector"]["matchLabels"]["plaudit.dev/role"] == role
    assert [each["port"] for each in found["spec"]["podMetricsEndpoints"]] == [port]
    watched = rendered(helm, "monitoring.monitors=true,networkPolicies.enabled=false,watchNamespaces[0]=a")[name]
    assert watched["spec"]["namespaceSelector"] == {"matchNames": ["a"]}
    assert name in rendered(helm, "monitoring.monitors=true,networkPolicies.enabled=false")


def test_the_example_for_alertmanager_names_alerts_that_exist():
    rules = metrics_file("alerts/alertmanager.yaml")["inhibit_rules"]
    matchers = [matcher for rule in rules for side in ("source", "target") for matcher in rule[f"{side}_matchers"]]
    named = {name for text in matchers if text.startswith("alertname") for name in re.findall(r"[A-Z]\w+", text)}
    assert named <= {alert.name for alert in ALERTS}


def test_series_of_a_run_do_not_depend_on_its_metrics_pod(everything: dict[tuple[str, str], dict[str, Any]]):
    (endpoint,) = everything["PodMonitor", "plaudit-jobs"]["spec"]["podMetricsEndpoints"]
    assert {"regex": "pod|container|endpoint", "action": "labeldrop"} in endpoint["relabelings"]
    assert "instance" in {each.get("targetLabel") for each in endpoint["relabelings"]}
    (operator,) = everything["ServiceMonitor", "plaudit-operator"]["spec"]["endpoints"]
    assert operator["honorLabels"] is True


def test_the_rule_holds_every_group_of_metrics(everything: dict[tuple[str, str], dict[str, Any]]):
    files = ("rules/plaudit.yaml", "alerts/run.yaml", "alerts/operator.yaml")
    groups = [group for name in files for group in metrics_file(name)["groups"]]
    assert everything["PrometheusRule", "plaudit"]["spec"]["groups"] == groups


def test_grafanas_sidecar_finds_alerts_and_dashboards(everything: dict[tuple[str, str], dict[str, Any]]):
    by_hand = metrics_file("alerts/grafana-configmap.yaml")
    alerts = everything["ConfigMap", "plaudit-grafana-alerts"]
    (content,) = by_hand["data"].values()
    assert yaml(alerts["data"]["plaudit-alerts.yaml"]) == yaml(content)
    assert alerts["metadata"]["labels"].items() >= by_hand["metadata"]["labels"].items()
    dashboards = sorted((ROOT / "metrics" / "dashboards").glob("*.json"))
    for path in dashboards:
        found = everything["ConfigMap", f"plaudit-dashboard-{path.stem}"]
        assert found["data"] == {path.name: path.read_text()}
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_finds_monitors_and_rules_by_the_labels_that_are_asked_for(
    everything: dict[tuple[str, str], dict[str, Any]],
):
    asked = [
        item for (kind, _), item in everything.items() if kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    ]
    assert len(asked) == 3
    assert all(item["metadata"]["labels"]["release"] == "prometheus" for item in asked)


def test_no_monitoring_object_is_created_by_default(helm: str):
    done = subprocess.run([helm, "template", "plaudit", CHART], capture_output=True, text=True, check=True)
    kinds = {item["kind"] for item in YAML(typ="safe").load_all(done.stdout) if item}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert "grafana_alert" not in done.stdout


def test_panels_link_to_the_page_that_the_value_names(helm: str):
    def links(*values: str) -> set[str]:
        found = rendered(helm, "monitoring.dashboards=true", *values)["ConfigMap", "plaudit-dashboard-job"]
        panels = json.loads(found["data"]["job.json"])["panels"]
        return {link["url"] for panel in panels for link in panel.get("links") or []}

    assert "${page:raw}/#/" in links()
    address = "https://${run}.plaudit.example"
    assert links(f"monitoring.pageUrl={json.dumps(address)}") == {
        f"{address}/#/",
        f"{address}/#/samples?outcome=failed",
    }
    with pytest.raises(subprocess.CalledProcessError):
        links("monitoring.pageUrl=plaudit.example")
