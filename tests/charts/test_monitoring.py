"""What the chart gives to Prometheus and Grafana is what metrics/ holds. That they take it: tests/e2e_controllers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "plaudit"
TEMPLATE = CHART / "templates" / "monitoring.yaml"


def yaml(text: str) -> Any:
    return YAML(typ="safe").load(text)


def metrics_file(name: str) -> Any:
    return yaml((ROOT / "metrics" / name).read_text())


@pytest.fixture(scope="module")
def helm(path_with_cluster: str) -> str:
    program = shutil.which("helm", path=path_with_cluster)
    if program is None:
        pytest.skip("helm is not installed, nor built for the test cluster (make cluster-up)")
    return program


@pytest.fixture(scope="module")
def everything(helm: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Every object of monitoring, by kind and name."""
    switches = [f"monitoring.{name}=true" for name in ("monitors", "rules", "grafanaAlerts", "dashboards")]
    options = ["--set", ",".join(switches), "--set", "monitoring.labels.release=prometheus"]
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
    assert len(paths) >= 4
    for path in paths:
        assert (CHART / path).is_file(), path


def test_grafanas_alerts_of_the_chart_and_those_to_be_applied_by_hand_are_the_same_generated_text():
    by_hand = metrics_file("alerts/grafana-configmap.yaml")["data"]["plaudit-alerts.yaml"]
    assert (CHART / "files" / "alerts" / "grafana.yaml").read_text() == by_hand


def test_the_rule_holds_every_group_of_metrics(everything: dict[tuple[str, str], dict[str, Any]]):
    files = ("rules/plaudit.yaml", "alerts/run.yaml", "alerts/operator.yaml")
    groups = [group for name in files for group in metrics_file(name)["groups"]]
    assert everything["PrometheusRule", "plaudit"]["spec"]["groups"] == groups


def test_grafanas_sidecar_finds_alerts_and_dashboards(everything: dict[tuple[str, str], dict[str, Any]]):
    by_hand = metrics_file("alerts/grafana-configmap.yaml")
    alerts = everything["ConfigMap", "plaudit-grafana-alerts"]
    assert alerts["data"] == by_hand["data"]
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


def test_nothing_of_it_is_made_unless_asked_for(helm: str):
    done = subprocess.run([helm, "template", "plaudit", CHART], capture_output=True, text=True, check=True)
    kinds = {item["kind"] for item in YAML(typ="safe").load_all(done.stdout) if item}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert "grafana_alert" not in done.stdout
