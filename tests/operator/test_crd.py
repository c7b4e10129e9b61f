"""The generated definition: structural, bounded, small. Cluster tests see that a real API server takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from plaudit_operator.crd.definition import DEFINITIONS, chart_template, custom_resource_definition


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


@pytest.fixture(scope="module", params=list(DEFINITIONS))
def root(request: pytest.FixtureRequest) -> dict[str, Any]:
    schema: dict[str, Any] = DEFINITIONS[request.param]()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_every_text_list_and_mapping_is_bounded(root: dict[str, Any]):
    for path, node in nodes(root["properties"]["spec"]):
        kind = node.get("type")
        if kind == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if kind == "array":
            assert "maxItems" in node, path
        if kind == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_the_schema_uses_only_keywords_of_structural_schemas(root: dict[str, Any]):
    text = json.dumps(root)
    for word in ("$ref", "$defs", '"const"', '"null"', "x-plaudit", '"title"'):
        assert word not in text, word


def test_every_field_has_a_description(root: dict[str, Any]):
    for path, node in nodes(root["properties"]["spec"]):
        assert node.get("description") or path.endswith("[]"), path


def test_it_is_small_enough_for_kubectl_apply():
    assert len(json.dumps(custom_resource_definition())) < 200_000


def test_the_charts_template_holds_no_other_templates():
    text = chart_template()
    assert text.count("{{") == 4
    assert "{{- if .Values.crds.install }}" in text


def test_a_text_that_helm_would_take_for_a_template_is_refused_with_the_name_of_its_field():
    definition = custom_resource_definition()
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    root["properties"]["spec"]["properties"]["reward"]["properties"]["scorers"]["items"]["description"] = "{{ name }}"
    with pytest.raises(ValueError, match=re.escape("spec.reward.scorers[]: ")):
        chart_template(definition)


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_kubectl_get_all_does_not_list_them(kind: str):
    assert "categories" not in DEFINITIONS[kind]()["spec"]["names"]
