"""Describe a gateway in OpenAPI: its routes by hand, the samples and results from their structs."""

from __future__ import annotations

from typing import Any

import msgspec

from plaudit_wire import VERSION
from plaudit_workers.service.callers import GroupAnswer, SampleAnswer
from plaudit_workers.service.lines import SampleInput

_ERRORS = {
    "400": "the body is not JSON",
    "401": "the token is missing or unknown",
    "409": "another sample was submitted under the id",
    "413": "too many samples or values, or a body of more than 64 MiB",
    "422": "a sample is invalid; the message names its field",
    "429": "too many samples of this token wait; Retry-After has the seconds",
    "503": "the service cannot be reached now; repeat with the same ids",
    "504": "not scored in time; scoring goes on, and the score waits for its id",
}


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    (sample, result, group), schemas = msgspec.json.schema_components(
        [SampleInput, SampleAnswer, GroupAnswer], ref_template="#/components/schemas/{name}"
    )
    samples = _object({"samples": _array(sample)})
    one_group = _object({"id": {"type": "string"}, "samples": _array(sample)})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Plaudit reward service",
            "version": VERSION,
            "description": "Scores samples. Ids make retries idempotent: the same id gets the same result.",
        },
        "security": [{"token": []}],
        "paths": {
            "/v1/score": {
                "post": _operation(
                    "Score samples; answers when they are scored",
                    {"oneOf": [sample, samples]},
                    {"oneOf": [result, _object({"results": _array(result)})]},
                    result,
                )
            },
            "/v1/groups": {
                "post": _operation(
                    "Score the samples of each group together",
                    {"oneOf": [one_group, _object({"groups": _array(one_group)})]},
                    {"oneOf": [group, _object({"groups": _array(group)})]},
                    group,
                )
            },
            "/v1/scores/{id}": {"get": _stored({"oneOf": [result, group]})},
            "/v1/service": {
                "get": {
                    "summary": "Scorers, version, limits and health",
                    "responses": {"200": _answer("the description", {"type": "object"})} | _errors("401"),
                }
            },
        },
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(summary: str, request: dict[str, Any], answer: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": answer}, "application/x-ndjson": {"schema": line}}
    return {
        "summary": summary,
        "parameters": [_seconds("timeout", "seconds to wait for results; then 504")],
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {"description": "results in the request's order, or a line each as they come", "content": content}
        }
        | _errors(*_ERRORS),
    }


def _stored(answer: dict[str, Any]) -> dict[str, Any]:
    path = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": "The result under an id",
        "parameters": [path, _seconds("wait", "seconds to wait for it")],
        "responses": {
            "200": _answer("the result", answer),
            "202": {"description": "it is in work"},
            **_errors("401"),
            "404": {"description": "the id is unknown, or its result was deleted: submit it again"},
        },
    }


def _seconds(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "number", "minimum": 0, "maximum": 3600}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {status: {"description": _ERRORS[status]} for status in statuses}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": ["samples"] if "samples" in properties else []}
