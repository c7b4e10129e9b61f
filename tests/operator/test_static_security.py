"""What must be true of the sources whatever they do: no pickle, no default password, restricted pods everywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel
from world import settled

from plaudit_job.spec.pod import PodSpec
from plaudit_job.spec.reward_service import RewardServiceSpec
from plaudit_job.spec.rljob import Spec
from plaudit_wire.redis import RedisAddress
from product_modules import modules

ROOT = Path(__file__).parents[2]
PARTS = ("job", "metrics", "model_server", "operator", "reward", "sandbox", "wire", "workers")
SOURCES = [module for module in modules().values() if module.shown.partition("/")[0] in PARTS]
TEMPLATES = sorted((ROOT / "charts" / "plaudit" / "templates").rglob("*.yaml"))


def test_all_parts_are_looked_at():
    assert len(SOURCES) > 200
    assert len(TEMPLATES) >= 5


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_pickled(part: str):
    for module in (each for each in SOURCES if each.shown.startswith(f"{part}/")):
        for node in ast.walk(module.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"} & set(names), module.shown
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=given):
                    assert {k.arg: ast.unparse(k.value) for k in given}.get("weights_only") == "True", module.shown


def test_there_is_no_default_password():
    assert RedisAddress("redis://host:6379/0").password == ""
    values = (ROOT / "charts" / "plaudit" / "values.yaml").read_text()
    assert "password" not in values.lower()
    found = []
    for _ in range(2):
        world = settled()
        found.append(world.cluster.of_kind("Secret")[0]["stringData"])
    before, after = found
    assert all(before[user] != after[user] for user in before if user not in ("users.acl", "keda-username"))


def pods(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the path of every ``pod`` section below ``spec``, as written in YAML; lists end with ``[]``."""
    for name, field in section.model_fields.items():
        below = f"{path}.{field.alias or name}"
        for each in (field.annotation, *get_args(field.annotation)):
            items = "[]" if get_origin(field.annotation) is list else ""
            if each is PodSpec:
                yield below
            elif isinstance(each, type) and issubclass(each, BaseModel):
                yield from pods(each, below + items)


def test_the_policy_for_jobs_checks_every_pod_section():
    policy = " ".join((ROOT / "charts/plaudit/templates/job-policy.yaml").read_text().split()).replace("?", "")
    found = sorted({*pods(Spec), *pods(RewardServiceSpec)})
    assert {".trainer.pod", ".reward.scorers[].model.pod", ".reward.scorers[].python.serve.pod"} <= set(found)
    for path in found:
        owner, of_list, below = path.rpartition("[]")
        if not of_list:
            assert f"object.spec{path}" in policy, path
        else:
            items = rf"object\.spec{re.escape(owner)}\.orValue\(\[\]\)"
            reads = rf"{items}\.filter\((\w), [^+]*\.map\(\1, \1{re.escape(below)}\)"
            assert re.search(reads, policy), path


def test_no_object_of_the_chart_is_a_secret():
    assert not any(re.search(r"^kind: Secret$", file.read_text(), re.MULTILINE) for file in TEMPLATES)


def test_every_container_of_the_chart_is_restricted():
    for file in TEMPLATES:
        text = file.read_text()
        containers = len(re.findall(r"^\s+image: ", text, re.MULTILINE))
        if "crd" in file.name or not containers:
            continue
        for needed in (
            "allowPrivilegeEscalation: false",
            "readOnlyRootFilesystem: true",
            "capabilities: {drop: [ALL]}",
            "runAsNonRoot: true",
            "seccompProfile: {type: RuntimeDefault}",
        ):
            assert text.count(needed) == containers, (file, needed)
