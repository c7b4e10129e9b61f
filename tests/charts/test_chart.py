"""What the chart gives away and asks for. That it renders and installs is seen in tests/e2e_cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from plaudit_job.load import parse_job
from plaudit_operator.crd import custom_resource_definition, reward_service_definition

CHART = Path(__file__).parents[2] / "charts" / "plaudit"


def yaml(text: str) -> Any:
    return YAML(typ="safe").load(text)


def rules() -> list[dict[str, Any]]:
    text = (CHART / "templates" / "rbac.yaml").read_text()
    found = re.search(r'define "plaudit.rules" -}}\n(.*?){{- end }}', text, re.DOTALL)
    assert found
    return yaml(found[1])


def test_no_right_is_a_wildcard():
    assert "*" not in (CHART / "templates" / "rbac.yaml").read_text()


def test_secrets_may_only_be_made():
    verbs = [rule["verbs"] for rule in rules() if "secrets" in rule["resources"]]
    assert verbs == [["create"]]


def test_no_right_over_roles_nodes_or_pods_that_run_commands():
    resources = {resource for rule in rules() for resource in rule["resources"]}
    assert not resources & {"roles", "rolebindings", "clusterroles", "nodes", "pods/exec", "namespaces"}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml((CHART / "values.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found


def test_the_default_values_are_valid(values: dict[str, Any], schema: dict[str, Any]):
    jsonschema.validate(values, schema)


def test_every_value_is_in_the_schema_and_the_other_way_round(values: dict[str, Any], schema: dict[str, Any]):
    assert set(schema["properties"]) - {"global"} == set(values)
    for name, section in values.items():
        described = schema["properties"][name].get("properties")
        if described:
            assert set(described) == set(section), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": -1},
        {"replica": 1},
        {"images": {"operator": "", "worker": "w:1", "gpu": "g:1", "redis": "r:1"}},
        {"images": {"operator": "o:1"}},
        {"crds": {"install": "yes"}},
        {"workers": 0},
        {"monitoring": {"alerts": True}},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], schema: dict[str, Any]):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_every_value_has_a_comment():
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert sum(line.lstrip().startswith("#") for line in lines) > 20


def test_a_copy_of_the_charts_folder_is_whole():
    for path in ("rules/plaudit.yaml", "alerts/chart.yaml", "alerts/chart-grafana.yaml", "dashboards/operator.json"):
        assert (CHART / "files" / path).is_file(), path
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


def test_the_examples_for_artifact_hub_are_valid_jobs():
    annotations = yaml((CHART / "Chart.yaml").read_text())["annotations"]
    examples = yaml(annotations["artifacthub.io/crdsExamples"])
    assert [parse_job(example).metadata.name for example in examples] == ["scores", "gsm8k"]
    [definition] = yaml(annotations["artifacthub.io/crds"])
    generated = custom_resource_definition()
    assert definition["name"] == generated["metadata"]["name"]
    assert definition["version"] in [version["name"] for version in generated["spec"]["versions"]]


def pod_sections(schema: dict[str, Any], path: str = "") -> set[str]:
    """The paths of all sections ``pod`` below a part of a definition."""
    found = set()
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        found |= {here} if name == "pod" and "template" in part.get("properties", {}) else pod_sections(part, here)
    return found | (pod_sections(schema["items"], f"{path}[]") if "items" in schema else set())


@pytest.mark.parametrize("definition", [custom_resource_definition, reward_service_definition])
def test_the_policy_for_jobs_checks_every_pod_that_an_author_describes(definition: Callable[[], dict[str, Any]]):
    crd = definition()["spec"]
    spec = crd["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    policy = (CHART / "templates" / "job-policy.yaml").read_text()
    variable = " ".join(policy.split("- name: templates")[0].split())
    checked = set(re.findall(r"\[?,? ?\?object\.spec\.([\w.?]+)", variable))
    lists = re.findall(r"\+ object\.spec\.([\w.?]+)\.orValue\(\[\]\)\.filter.*?\.map\(\w, \w\.([\w.]+)\)", variable)
    checked |= {f"{path}[].{pod}" for path, pod in lists}
    assert pod_sections(spec) <= {path.replace("?", "") for path in checked}
    assert crd["names"]["plural"] in policy.split("resources: [")[1].split("]")[0].split(", ")
