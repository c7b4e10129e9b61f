"""The JSON Schema of a job, for editors: names, types, ranges, defaults and the docstring of every field."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import NullableSchema, WithDefaultSchema

from plaudit_workers.job.spec.reward_service import RewardService
from plaudit_workers.job.spec.rljob import API_VERSION, TRAINING_SECTIONS, RLJob
from plaudit_workers.job.spec.section import Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"


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
    for section in schema["$defs"].values():
        _tidy(section)
    _tidy(schema)
    return schema


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
