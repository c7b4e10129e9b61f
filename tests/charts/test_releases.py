"""Two releases of the chart in one namespace: each watches other namespaces, and neither takes the other's objects."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

CHART = Path(__file__).parents[2] / "charts" / "plaudit"


@pytest.fixture(scope="module")
def releases(path_with_cluster: str) -> list[list[dict[str, Any]]]:
    """The objects of two releases; the second finds the definitions of the first."""
    helm = shutil.which("helm", path=path_with_cluster)
    if helm is None:
        pytest.skip("helm is not installed, nor built for the test cluster (make cluster-up)")
    switches = "crds.install=false,monitoring.monitors=true,monitoring.rules=true,replicas=2"
    return [
        objects(
            helm,
            "template",
            release,
            CHART,
            "--namespace",
            "plaudit",
            "--set",
            f"{switches},watchNamespaces={{{team}}}",
        )
        for release, team in (("blue", "team-a"), ("green", "team-b"))
    ]


def objects(helm: str, *arguments: str | Path) -> list[dict[str, Any]]:
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, check=True)
    return [item for item in YAML(typ="safe").load_all(done.stdout) if item]


def lease_of(release: list[dict[str, Any]]) -> str:
    (deployment,) = (item for item in release if item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    name: str = next(variable["value"] for variable in container["env"] if variable["name"] == "PLAUDIT_LEASE")
    return name


def test_two_releases_in_one_namespace_have_no_object_in_common(releases: list[list[dict[str, Any]]]):
    blue, green = (
        {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in release}
        for release in releases
    )
    assert blue
    assert not blue & green


def test_each_release_has_a_lease_of_its_own_and_may_use_no_other(releases: list[list[dict[str, Any]]]):
    assert lease_of(releases[0]) != lease_of(releases[1])
    for release in releases:
        roles = [item for item in release if item["kind"] == "Role"]
        rules = [rule for role in roles for rule in role["rules"] if rule["resources"] == ["leases"]]
        assert [rule["resourceNames"] for rule in rules if "create" not in rule["verbs"]] == [[lease_of(release)]]


VALUES = """
plaudit:
  enabled: true
  images: {operator: o:1, worker: w:1, gpu: g:1, redis: r:1, pullSecret: registry}
  imagePullSecrets: [mirror, {name: other}]
  nameOverride: rl
  podLabels: {sidecar.istio.io/inject: "false"}
  commonLabels: {team: platform}
  serviceAccount: {annotations: {eks.amazonaws.com/role-arn: role}}
  monitoring: {monitors: true, rules: true, dashboards: true, grafanaAlerts: true}
"""
PARENT = """
apiVersion: v2
name: platform
version: 1.0.0
dependencies: [{name: plaudit, version: 0.1.0, condition: plaudit.enabled}]
"""


@pytest.mark.long
def test_a_copy_of_the_chart_in_an_umbrella_takes_the_usual_values(helm: str, tmp_path: Path):
    shutil.copytree(CHART, tmp_path / "charts" / "plaudit", symlinks=True)
    (tmp_path / "Chart.yaml").write_text(PARENT)
    (tmp_path / "values.yaml").write_text(VALUES)
    found = objects(helm, "template", "up", tmp_path, "--namespace", "plaudit")
    by_kind = {item["kind"]: item for item in found}
    pod = by_kind["Deployment"]["spec"]["template"]
    assert by_kind["Deployment"]["metadata"]["name"] == by_kind["ServiceAccount"]["metadata"]["name"] == "rl"
    assert pod["spec"]["imagePullSecrets"] == [{"name": name} for name in ("registry", "mirror", "other")]
    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert by_kind["ServiceAccount"]["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "role"}
    plain = [item for item in found if "helm.sh/hook" not in item["metadata"].get("annotations", {})]
    assert {item["metadata"]["labels"]["team"] for item in plain} == {"platform"}
    assert {"PrometheusRule", "ConfigMap"} <= set(by_kind)
    off = objects(helm, "template", "up", tmp_path, "--set", "plaudit.enabled=false")
    assert off == []


@pytest.mark.parametrize(
    ("release", "namespace"), [("1st", "2024"), ("plaudit.v2", "0x10"), ("7", "true"), (f"9{'a' * 52}", "plaudit")]
)
def test_objects_have_good_names_whatever_release_and_namespace_are_called(helm: str, release: str, namespace: str):
    found = objects(helm, "template", release, CHART, "--namespace", namespace, "--set", "monitoring.monitors=true")
    for metadata in (item["metadata"] for item in found):
        texts = [metadata["name"], metadata.get("namespace", namespace), *metadata.get("labels", {}).values()]
        assert {type(text) for text in texts} == {str}, metadata
    of_dns = [item["metadata"]["name"] for item in found if item["kind"] in ("Service", "RLJob")]
    assert len(of_dns) == 2
    assert all(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 50 for name in of_dns), of_dns


@pytest.mark.parametrize("section", ["images", "monitoring", "crds", "networkPolicies"])
def test_a_section_that_is_set_to_null_is_named(helm: str, section: str):
    command = [helm, "template", "up", CHART, "--set", f"{section}=null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"missing property '{section}'" in done.stderr


def test_every_container_of_helm_test_has_cpu_and_memory(helm: str):
    found = objects(helm, "template", "up", CHART, "--show-only", "templates/tests/job.yaml")
    job, pod = (next(item for item in found if item["kind"] == kind) for kind in ("RLJob", "Pod"))
    spec = job["spec"]
    pods = [spec["reward"]["workers"]["pod"], spec["reward"]["gateway"]["pod"], spec["metrics"]["pod"]]
    pods += [spec["transport"]["managed"]["pod"], *pod["spec"]["containers"]]
    assert all({"cpu", "memory"} <= set(each["resources"]["limits"]) for each in pods)
