"""What pages name exists: jobs and parts of jobs; on Kubernetes also fields, values, reasons and rights."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pages
import pytest
from ruamel.yaml import YAML

from plaudit_job.checks import kubernetes_problems
from plaudit_job.load import parse_job
from plaudit_job.reference import job_schema
from plaudit_job.spec.rljob import Spec
from plaudit_operator.names import ConditionType, Reason

CHART = pages.ROOT / "charts" / "plaudit"
KUBERNETES = [pages.ROOT / "README.md", pages.ROOT / "docs" / "operator.md", *sorted(pages.KUBERNETES.glob("*.md"))]
if (CHART / "README.md").exists():
    KUBERNETES.append(CHART / "README.md")
_FIELDS = {field.alias or name for name, field in Spec.model_fields.items()}
_JOB: dict[str, Any] = {
    "model": {"source": "/plaudit/models/start"},
    "data": {"train": {"path": "/plaudit/data/train.parquet"}},
    "algorithm": {"steps": 100},
    "rollout": {},
    "reward": {"scorers": [{"name": "gsm8k", "kind": "rule", "rule": "gsm8k"}]},
    "trainer": {},
    "storage": {"claimName": "shared"},
}


def documents(page: Path) -> Iterator[dict[str, Any]]:
    for block in pages.blocks(page, "yaml"):
        yield from (document for document in YAML(typ="safe").load_all(block) if isinstance(document, dict))


def whole_jobs() -> list[Any]:
    found = [(page, job) for page in pages.PAGES for job in documents(page) if job.get("kind") == "RLJob"]
    return [pytest.param(page, job, id=f"{pages.name(page)}-{i}") for i, (page, job) in enumerate(found)]


@pytest.mark.parametrize(("page", "job"), whole_jobs())
def test_a_job_that_a_page_shows_is_valid(page: Path, job: dict[str, Any]):
    parsed = parse_job(job)
    if pages.KUBERNETES in page.parents:
        assert kubernetes_problems(parsed) == []


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_a_part_of_a_job_is_valid_in_a_job(page: Path):
    for document in documents(page):
        part = document.get("spec", document) if "kind" not in document else {}
        part = {"rollout": part} if "agent" in part else part
        if part and set(part) <= _FIELDS and "…" not in str(part):
            spec = _merged(_JOB, part)
            if {"mixture", "tasks", "split"} & spec["data"]["train"].keys():
                del spec["data"]["train"]["path"]
            parsed = parse_job(
                {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
            )
            assert page not in KUBERNETES or kubernetes_problems(parsed) == []


def _merged(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return {key: _merged(base.get(key), change.get(key, base.get(key))) for key in [*base, *change]}
    return change


def values() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load((CHART / "values.yaml").read_text())
    return found


@pytest.mark.parametrize("page", KUBERNETES, ids=pages.name)
def test_values_that_a_page_names_are_in_the_chart(page: Path):
    for command in pages.commands(page):
        if command.words[0] == "helm":
            for before, word in zip(command.words, command.words[1:], strict=False):
                if before == "--set":
                    assert _has(values(), word.partition("=")[0].split(".")), word
    sections = {name for name, value in values().items() if isinstance(value, dict) and name != "resources"}
    for words in pages.code(page):
        way = words.partition("=")[0].split(".")
        if way[0] in sections and len(way) > 1 and all(part.isidentifier() for part in way):
            assert _has(values(), way), words


def _has(node: Any, way: list[str]) -> bool:
    return not way or (
        isinstance(node, dict) and way[0] in node and (node[way[0]] == {} or _has(node[way[0]], way[1:]))
    )


@pytest.mark.parametrize("page", KUBERNETES, ids=pages.name)
def test_a_values_file_that_a_page_shows_is_valid(page: Path):
    schema = json.loads((CHART / "values.schema.json").read_text())
    for document in documents(page):
        if "kind" not in document and set(document) <= set(values()):
            jsonschema.validate(_merged(values(), document), schema)


@pytest.mark.parametrize("page", KUBERNETES, ids=pages.name)
def test_fields_that_a_page_names_are_in_a_job(page: Path):
    for words in pages.code(page):
        way = words.removeprefix("spec.").partition(":")[0].split(".")
        named = words.startswith("spec.") or (way[0] in _FIELDS and len(way) > 1)
        if named and way[0] not in values() and all(re.fullmatch(r"[a-zA-Z]+(\[\])?", part) for part in way):
            assert _field(way), words


_schema = functools.cache(job_schema)


def _field(way: list[str]) -> bool:
    schema = _schema()
    node: dict[str, Any] = schema["$defs"]["Spec"]
    for part in way:
        reference = node.get("$ref") or node.get("items", {}).get("$ref", "")
        if reference:
            node = schema["$defs"][reference.removeprefix("#/$defs/")]
        if "properties" not in node:
            return True  # opaque: Kubernetes' own fields
        found = node["properties"].get(part.removesuffix("[]"))
        if found is None:
            return False
        node = found
    return True


def _constants(kind: type) -> set[str]:
    return {value for name, value in vars(kind).items() if name.isupper()}


def _rows(page: Path) -> list[list[str]]:
    lines = (line for line in pages.text(page).splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_reason_has_a_row_and_every_row_a_reason():
    rows = [row for row in _rows(pages.KUBERNETES / "conditions.md") if row[0].startswith("`")]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row[0])}
    assert named == _constants(Reason) | _constants(ConditionType)
    assert all(len(cell) > 3 for row in rows for cell in row[1:])


def test_the_table_of_rights_is_the_charts():
    text = (CHART / "templates" / "rbac.yaml").read_text()
    found = re.search(r'define "plaudit.rules" -}}\n(.*?){{- end }}', text, re.DOTALL)
    assert found
    given = {
        (resource, verb)
        for rule in YAML(typ="safe").load(found[1])
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    told = set()
    for row in _rows(pages.KUBERNETES / "security.md"):
        if (
            len(row) == 3
            and re.match(r"(get|create|patch|update)\b", row[1])
            and re.fullmatch(r"`[a-z/]+`(, `[a-z/]+`)*", row[0])
        ):
            told |= {(resource, verb) for resource in re.findall(r"[a-z/]+", row[0]) for verb in row[1].split()}
    assert {(resource, verb) for resource, verb in told if resource != "leases"} == given
