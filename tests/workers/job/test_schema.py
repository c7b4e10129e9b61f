"""The JSON Schema and the reference page say what the models say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from plaudit_job import reference
from plaudit_job.reference import job_schema
from small_job import changed

MUTABLE = {
    "spec.suspend",
    "spec.lifecycle",
    "spec.rollout.groups.replicas",
    "spec.rollout.replicas",
    "spec.reward.gateway.replicas",
    "spec.reward.workers.replicas",
    "spec.reward.workers.autoscaling",
    "spec.reward.scorers.limits",
    "spec.metrics.rewardLatency",
}


def fields(section: dict[str, Any], sections: dict[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of the schema, by its path."""
    for field, described in section.get("properties", {}).items():
        here = f"{name}.{field}".lstrip(".")
        yield here, described
        inner = (described.get("$ref") or described.get("items", {}).get("$ref", "")).removeprefix("#/$defs/")
        if inner:
            yield from fields(sections[inner], sections, here)


def all_fields() -> list[tuple[str, dict[str, Any]]]:
    schema = job_schema()
    return list(fields(schema, schema["$defs"]))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_field_and_every_section_is_described() -> None:
    assert [name for name, described in all_fields() if not described.get("description")] == []
    assert [name for name, section in job_schema()["$defs"].items() if not section.get("description")] == []


def test_a_default_that_is_not_empty_is_explained() -> None:
    bare = [
        name
        for name, described in all_fields()
        if isinstance(default := described.get("default"), bool | int | float | str)
        and default != ""
        and "Default" not in described["description"]
    ]
    assert bare == []


def test_exactly_the_designed_fields_may_change_while_a_job_runs() -> None:
    assert {name for name, described in all_fields() if described.get("x-plaudit-mutable")} == MUTABLE


def test_no_field_may_be_null() -> None:
    assert "null" not in str(job_schema())


def test_editors_accept_valid_jobs_and_refuse_others(validator: jsonschema.Draft202012Validator) -> None:
    assert validator.is_valid(changed({}))
    assert validator.is_valid(changed({"trainer.pod": {"resources": {"limits": {"cpu": 2, "memory": "4Gi"}}}}))
    for bad in (
        {"algorithm.steps": 0},
        {"algorithm.stepz": 1},
        {"algorithm.order": "soon"},
        {"reward.retry": 1},
        {"trainer": None},
        {"data.validation": {"path": "v", "everySteps": "often"}},
    ):
        assert not validator.is_valid(changed(bad)), bad


def test_examples_are_valid_by_the_schema(validator: jsonschema.Draft202012Validator) -> None:
    jobs = sorted((Path(__file__).parents[3] / "examples").glob("*/job.yaml"))
    assert len(jobs) >= 3
    for job in jobs:
        validator.validate(yaml.safe_load(job.read_text()))


def test_the_reference_page_is_up_to_date() -> None:
    page = reference.PAGE.read_text()
    assert reference.updated(page) == page


def test_the_reference_names_every_field() -> None:
    page = reference.reference()
    names = {name.rsplit(".", 1)[-1] for name, _ in all_fields()}
    assert [name for name in sorted(names) if f"| `{name}`" not in page] == []


def test_an_outdated_page_is_reported_and_then_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{reference.BEGIN}\nold\n{reference.END}\nafter\n")
    for arguments, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr("sys.argv", ["reference", "--file", str(page), *arguments])
        assert reference.main() == code
    assert "is out of date: run make generate" in capsys.readouterr().err
    assert page.read_text().startswith("# A page\n")
    assert page.read_text().endswith("\nafter\n")
