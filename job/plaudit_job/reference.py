"""Write the reference of the RLJob into ``docs/rljob.md``, and build the JSON Schema of a job for editors.

Run as ``python -m plaudit_job.reference [--check]``. The page is written by hand but for the part between two markers.
That part and the schema follow from the models: names, types, ranges, defaults and the docstring of every field.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import NullableSchema, WithDefaultSchema

from plaudit_job.spec.reward_service import RewardService
from plaudit_job.spec.rljob import API_VERSION, TRAINING_SECTIONS, RLJob
from plaudit_job.spec.section import Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PAGE = Path(__file__).parents[2] / "docs" / "rljob.md"
BEGIN = "<!-- begin: written by python -m plaudit_job.reference -->"
END = "<!-- end -->"
_RANGE_SIGNS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
_NOT_SHOWN: tuple[Any, ...] = ("", [], {})


def main() -> int:
    """Write the page anew, or with ``--check`` report whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m plaudit_job.reference", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is out of date")
    parser.add_argument("--file", type=Path, default=PAGE, help="the page (default: docs/rljob.md)")
    arguments = parser.parse_args()
    before = arguments.file.read_text(encoding="utf-8")
    after = updated(before)
    if arguments.check and before != after:
        print(f"{arguments.file} is out of date: run make generate", file=sys.stderr)
        return 1
    if before != after:
        arguments.file.write_text(after, encoding="utf-8")
    return 0


def updated(page: str) -> str:
    """Return the page with the part between the markers written anew."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{tail}"


def reference() -> str:
    """Return a heading, the docstring and a table of fields for every section, in the order of first use."""
    schema = job_schema()
    sections = schema["$defs"]
    return "\n".join("\n".join(_section(name, part, sections)) for name, part in _sections(schema))


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every section once, under the name of the first field that holds it."""
    seen: set[str] = set()
    waiting = [("", schema)]
    while waiting:
        name, section = waiting.pop(0)
        yield name, section
        inner = []
        for field, described in section["properties"].items():
            reference_, suffix = _reference(described)
            if reference_ and reference_ not in seen:
                seen.add(reference_)
                inner.append((f"{name}.{field}{suffix}".lstrip("."), schema["$defs"][reference_]))
        waiting = inner + waiting


def _reference(described: dict[str, Any]) -> tuple[str, str]:
    """Return the section that a field holds, and ``[]`` when it holds a list of them."""
    if "$ref" in described:
        return described["$ref"].removeprefix("#/$defs/"), ""
    items = described.get("items", {})
    return (items["$ref"].removeprefix("#/$defs/"), "[]") if "$ref" in items else ("", "")


def _section(name: str, section: dict[str, Any], sections: dict[str, Any]) -> Iterator[str]:
    yield f"### {name or 'RLJob'}\n"
    yield f"{section['description']}\n"
    yield "| field | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    required = section.get("required", [])
    for field, described in section["properties"].items():
        mark = " ✎" if described.get("x-plaudit-mutable") else ""
        default = "required" if field in required else _default(described)
        meaning = described.get("description") or sections[_reference(described)[0]]["description"]
        cell = meaning.replace("|", "\\|")
        yield f"| `{field}`{mark} | {_type(described)} | {default} | {cell} |"
    yield ""


def _default(described: dict[str, Any]) -> str:
    default = described.get("default")
    if default is None or default in _NOT_SHOWN or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _type(described: dict[str, Any]) -> str:
    name, suffix = _reference(described)
    if name:
        return "list of sections" if suffix else "section"
    if "const" in described:
        return f"`{described['const']}`"
    if "enum" in described:
        return " · ".join(f"`{value}`" for value in described["enum"])
    if described.get("type") == "array":
        return f"list of {_type(described['items'])}"
    kind = described.get("type", "integer or string")
    if "minimum" in described and "maximum" in described:
        return f"{kind}, {described['minimum']:,} to {described['maximum']:,}"
    limits = [f"{sign} {described[key]:,}" for key, sign in _RANGE_SIGNS if key in described]
    return " ".join([kind, *limits])


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the YAML form; fields that may change in a run have ``x-plaudit-mutable``."""
    schema = _schema(RLJob)
    spec = schema["$defs"]["Spec"]
    spec["dependentRequired"] = {
        name: [other for other in TRAINING_SECTIONS if other != name] for name in ("rollout", "trainer")
    }
    return {"$schema": DIALECT, "$id": f"https://{API_VERSION}/rljob.schema.json", **schema}


def reward_service_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a RewardService, without marks: all but two of its sections may change."""
    schema = _schema(RewardService)
    for section in schema["$defs"].values():
        for field in section.get("properties", {}).values():
            field.pop("x-plaudit-mutable", None)
    return {"$schema": DIALECT, "$id": f"https://{API_VERSION}/rewardservice.schema.json", **schema}


def _schema(model: type[Section]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True, schema_generator=_WithoutNulls)
    models = {each.__name__: each for each in _sections_below(Section)}
    for name, section in (*schema["$defs"].items(), (model.__name__, schema)):
        if name in models:
            _describe(models[name], section)
        _tidy(section)
    return schema


def _sections_below(model: type[Section]) -> Iterator[type[Section]]:
    for each in model.__subclasses__():
        yield each
        yield from _sections_below(each)


def _describe(model: type[Section], section: dict[str, Any]) -> None:
    """Describe each field by its docstring.

    Pydantic's ``use_attribute_docstrings`` would read the sources at the start of every process.
    """
    texts = {name: text for each in reversed(model.__mro__) for name, text in _docstrings(each).items()}
    for name, field in model.model_fields.items():
        written = field.alias or name
        described = section["properties"][written]
        if name in texts and "description" not in described:
            section["properties"][written] = dict(sorted({**described, "description": texts[name]}.items()))


@functools.cache
def _docstrings(model: type) -> dict[str, str]:
    """Return the texts below the fields that a section declares itself."""
    if not issubclass(model, Section):
        return {}
    body = next(each.body for each in _classes(model.__module__) if each.name == model.__name__)
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@functools.cache
def _classes(module: str) -> list[ast.ClassDef]:
    return [each for each in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(each, ast.ClassDef)]


class _WithoutNulls(GenerateJsonSchema):
    """Let optional fields be left out, never be null: the API server refuses null where a number is wanted."""

    def nullable_schema(self, schema: NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def _tidy(section: dict[str, Any]) -> None:
    """Remove the titles that repeat the names, and the line breaks of docstrings."""
    for field in section.get("properties", {}).values():
        field.pop("title", None)
    for part in (section, *section.get("properties", {}).values()):
        if "description" in part:
            part["description"] = " ".join(part["description"].split()).replace("``", "`")


if __name__ == "__main__":
    raise SystemExit(main())
