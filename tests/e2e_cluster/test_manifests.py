"""The chart's manifests against a real API server, for each combination of its main switches."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import chart
import pytest
from real_cluster import ROOT, Cluster

NAMESPACE = "manifests"
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "namespaced": ({}, {"watchNamespace": NAMESPACE, "crds": {"install": False}}),
    "policies": ({}, {"networkPolicies": {"enabled": False}, "replicas": 1, "runAsUser": None}),
    "monitoring": ({}, {"monitoring": {"monitors": True, "rules": True, "dashboards": True}}),
    "external": (
        {},
        {
            "test": {"transport": {"url": "rediss://redis.example:6379/0"}},
            "watchNamespaces": [NAMESPACE, "default"],
            "logLevel": "debug",
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
            "extraVolumeMounts": [{"name": "authority", "mountPath": "/etc/authority"}],
            "probes": {"liveness": {"periodSeconds": 30}},
            "jobDefaults": {"namespaces": {"team-a": {"labels": {"team": "a"}}}},
        },
    ),
}
COMBINATIONS = list(itertools.product((0, 1), repeat=len(SWITCHES)))


@pytest.fixture(scope="module")
def restricted(definition: Cluster) -> Cluster:
    """A namespace in which whatever Pod Security restricted would refuse is warned of."""
    definition.kubectl("create", "namespace", NAMESPACE, check=False)
    label = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("warn", "enforce")]
    definition.kubectl("label", "namespace", NAMESPACE, *label, "--overwrite")
    return definition


@pytest.fixture(scope="module")
def monitoring(restricted: Cluster) -> Cluster:
    """Also prometheus-operator's definitions, from its Go module."""
    if not restricted.own:
        pytest.skip("installs definitions of others")
    go = shutil.which("go")
    assert go, "there is no `go` on PATH: prometheus-operator's definitions come from its Go module"
    sources = ROOT / "tests" / "cluster" / "controllers" / "prometheus-operator"
    version = next(
        line.split()[2] for line in (sources / "go.mod").read_text().splitlines() if "/prometheus-operator v" in line
    )
    download = [go, "mod", "download", "-json", f"github.com/prometheus-operator/prometheus-operator@{version}"]
    folder = Path(json.loads(subprocess.run(download, capture_output=True, check=True).stdout)["Dir"])
    for kind in ("servicemonitors", "podmonitors", "prometheusrules"):
        path = folder / "example" / "prometheus-operator-crd" / f"monitoring.coreos.com_{kind}.yaml"
        restricted.kubectl("apply", "--server-side", "-f", str(path))
        # A definition without any status yet is an error to `kubectl wait`.
        restricted.until(f"discovery of {kind}", partial(_is_served, restricted, kind))
    return restricted


def _is_served(cluster: Cluster, kind: str) -> bool:
    return cluster.kubectl("get", f"{kind}.monitoring.coreos.com", check=False).returncode == 0


_TAKEN: set[str] = set()
"""Manifests that the API server has taken: what other switches leave as it was is not sent a second time."""


def rendered(cluster: Cluster, **values: Any) -> list[str]:
    """Return the chart's manifests."""
    return chart.template(cluster, release="other", namespace=NAMESPACE, **values).split("\n---\n")


def dry_run(cluster: Cluster, manifests: list[str]) -> subprocess.CompletedProcess[str]:
    """Apply manifests as a server-side dry run."""
    options = ["--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict"]
    return cluster.kubectl("apply", *options, "-f", "-", text="\n---\n".join(manifests), check=False)


@pytest.mark.parametrize("on", [c for c in COMBINATIONS if not c[2]], ids=str)
def test_each_combination_is_taken_without_a_warning(restricted: Cluster, on: tuple[int, ...]):
    _taken(restricted, on)


def _taken(cluster: Cluster, on: tuple[int, ...]) -> None:
    values: dict[str, Any] = {}
    for chosen, switch in zip(on, SWITCHES.values(), strict=True):
        values |= switch[chosen]
    manifests = rendered(cluster, **values)
    for kind, name in (("RLJob", "other-test"), ("Deployment", "other-operator")):
        assert any(re.search(rf"^kind: {kind}\nmetadata:\n  name: {name}$", each, re.MULTILINE) for each in manifests)
    if further := [each for each in manifests if each not in _TAKEN]:
        done = dry_run(cluster, further)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        _TAKEN.update(further)


def test_missing_definitions_of_monitors_are_named(restricted: Cluster):
    if not restricted.own:
        pytest.skip("the definitions may be there")
    done = dry_run(restricted, rendered(restricted, **SWITCHES["monitoring"][1]))
    assert 'no matches for kind "ServiceMonitor"' in done.stderr
    assert not dry_run(restricted, rendered(restricted, **SWITCHES["monitoring"][0])).returncode


@pytest.mark.parametrize("on", [c for c in COMBINATIONS if c[2]], ids=str)
def test_each_combination_with_monitors_is_taken(monitoring: Cluster, on: tuple[int, ...]):
    _taken(monitoring, on)


def test_helm_lint_passes(cluster: Cluster):
    assert "0 chart(s) failed" in cluster.run("helm", "lint", "--strict", str(chart.CHART)).stdout


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"replicas": "two"},
        {"images": {"worker": ""}},
        {"monitoring": {"monitors": "yes"}},
        {"networkPolicies": {"enabled": None, "other": 1}},
        {"runAsUser": -1},
        {"workers": 0},
        {"test": {"timeoutSeconds": 1}},
    ],
    ids=str,
)
def test_helm_refuses_wrong_values(cluster: Cluster, wrong: dict[str, Any]):
    done = cluster.run("helm", "template", "x", str(chart.CHART), "--values", "-", text=json.dumps(wrong), check=False)
    assert done.returncode != 0
    assert "schema" in done.stderr
