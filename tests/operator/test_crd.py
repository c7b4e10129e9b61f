"""The generated definition: structural, bounded, small. Cluster tests see that a real API server takes it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from plaudit_job.spec.rljob import Spec
from plaudit_job.spec.section import Section
from plaudit_operator.crd import DEFINITIONS, chart_template, custom_resource_definition
from plaudit_operator.crd_rules import with_defaults


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
    # It is written a second time, into an annotation of at most 262,144 bytes.
    assert len(json.dumps(custom_resource_definition())) < 230_000


def test_the_charts_template_holds_no_other_templates():
    text = chart_template()
    assert text.count("{{") == 5
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


def rules_in(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, node in nodes(schema):
        for rule in node.get("x-kubernetes-validations", []):
            yield path, rule["rule"]


def test_no_rule_repeats_a_default_of_the_models():
    source = inspect.getsource(sys.modules[with_defaults.__module__])
    written = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in written if re.search(r"\.orValue\([^{]", text)] == []
    assert sum(text.count(".orDefault()") for text in written) > 40


def test_every_default_in_a_rule_is_the_models_own():
    """The rules' roots are resolved here from the models, not from the JSON Schema that filled them in."""
    spec = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    seen = 0
    for path, rule in rules_in(spec):
        here = model_at(Spec, re.findall(r"\w+", path))
        roots = {"self": here, "oldSelf": here}
        for chain, variable in re.findall(r"\w+((?:\.\??\w+)+)\.(?:all|exists)\((\w+),", rule):
            roots[variable] = model_at(here, re.findall(r"\w+", chain))
        for root, chain, literal in re.findall(r"(\w+)((?:\.\??\w+)+)\.orValue\(([^)]*)\)", rule):
            *sections, name = re.findall(r"\w+", chain)
            model = model_at(roots[root], sections)
            [default] = [field.default for field in model.model_fields.values() if field.alias == name]
            assert json.loads(literal.replace("'", '"')) == default, f"{path}: {rule}"
            seen += 1
    assert seen > 40


def test_a_rule_that_asks_for_a_default_that_does_not_exist_is_refused():
    node = {"properties": {"steps": {"type": "integer"}, "flag": {"type": "boolean", "default": True}}}
    assert with_defaults("self.?flag.orDefault()", node, {}) == "self.?flag.orValue(true)"
    with pytest.raises(ValueError, match=r"steps has no default"):
        with_defaults("self.?steps.orDefault() > 1", node, {})
    with pytest.raises(ValueError, match="there is no field stepz"):
        with_defaults("self.?stepz.orDefault() > 1", node, {})


def model_at(model: type[Section], names: list[str]) -> type[Section]:
    """The section below a section, through optional ones and the items of lists."""
    for name in names:
        [field] = [field for field in model.model_fields.values() if field.alias == name]
        model = next(part for part in parts_of(field.annotation) if issubclass(part, Section))
    return model


def parts_of(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)
