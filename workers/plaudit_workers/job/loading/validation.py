"""Validate a job's data and report every problem in one pass.

Pydantic stops at the first error inside a section. So each pass removes the broken fields from a copy, and the next
pass validates the rest. Rules about several fields then run on what is left; a rule that involves a broken field is
skipped, because it would report values that nobody wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from plaudit_workers.job.loading.field_errors import (
    Location,
    field_at,
    field_name,
    null_problem,
    problem_of,
    section_of,
)
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rules.fields import rule_problems
from plaudit_workers.job.spec.reward_service import document_model, job_of
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.section import choices

_ROUNDS = 20
"""Most passes; each finds every error that one pass of pydantic can see."""


@dataclass(frozen=True)
class Examination:
    """Hold the result of validating a job's data."""

    job: RLJob | None
    """The job; where there are problems, a job without the broken fields, for further checks. None: too broken."""
    problems: list[Problem]
    broken: tuple[str, ...] = ()
    """Written names of the fields that were removed from ``job``."""

    def concerning(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems of a further check that involve no broken field."""
        return [problem for problem in problems if not any(_touches(field, self.broken) for field in problem.fields)]


def validate(written: Mapping[str, Any]) -> tuple[RLJob, list[Problem]] | tuple[None, list[Problem]]:
    """Return the job, or every problem that keeps it from being one."""
    examination = examine(written)
    if examination.job is None or examination.problems:
        return None, examination.problems
    return examination.job, []


def examine(written: Mapping[str, Any]) -> Examination:
    """Validate fields first, then the rules about several fields."""
    data = copy.deepcopy(dict(written))
    root = document_model(data)
    problems = list(_take_out_nulls(data, root, ()))
    broken = [problem.field for problem in problems]
    for _ in range(_ROUNDS):
        try:
            job = job_of(root.model_validate(data, by_alias=True, by_name=False))
        except ValidationError as error:
            located = [(detail, _location(detail, data)) for detail in error.errors(include_url=False)]
            problems += [problem for problem in _described(located, root) if not _within(problem.field, broken)]
            broken += [_take_out(data, detail, location, root) for detail, location in located]
        else:
            examination = Examination(job, problems, tuple(broken))
            return replace(examination, problems=problems + examination.concerning(rule_problems(job.spec)))
    return Examination(None, problems, tuple(broken))


def _described(located: Sequence[tuple[ErrorDetails, Location]], root: type[BaseModel]) -> list[Problem]:
    """Return one problem for each field; pydantic reports one error for each type of a union."""
    by_location: dict[Location, list[ErrorDetails]] = {}
    for detail, location in located:
        by_location.setdefault(location, []).append(detail)
    return [problem_of(details, root, location) for location, details in by_location.items()]


def _location(detail: ErrorDetails, data: object) -> Location:
    """Return the location as written; pydantic adds the types of a union, or ``[key]`` for a key."""
    location: list[str | int] = []
    node = data
    for part in detail["loc"]:
        written = _holds(node, part)
        if written or (detail["type"] == "missing" and isinstance(node, dict)):
            location.append(part)
        if not written:
            break
        node = _inside(node, part)
    return tuple(location)


def _holds(node: object, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _take_out(data: dict[str, Any], detail: ErrorDetails, location: Location, root: type[BaseModel]) -> str:
    """Remove the broken part from ``data``, or add a stand-in for a missing one; return its written name.

    A broken entry removes its whole list, because the indices of the other entries must stay.
    """
    way = list(location)
    while isinstance(way[-1], int):
        way.pop()
    parent: Any = data
    for part in way[:-1]:
        parent = _inside(parent, part)
    if detail["type"] == "missing":
        parent[way[-1]] = _stand_in(field_at(root, tuple(way)))
    elif isinstance(parent, dict):
        parent.pop(way[-1], None)
    return field_name(way)


def _inside(node: Any, part: str | int) -> Any:
    """Return a part of plain data; an empty mapping where an earlier error removed it."""
    if isinstance(node, list):
        return node[int(part)]
    return node.get(part, {}) if isinstance(node, dict) else {}


def _stand_in(field: FieldInfo | None) -> Any:
    """Return a valid value for a required field, so that the other fields can be validated; it is never shown."""
    if field is None or get_origin(field.annotation) is dict:
        return {}
    if get_origin(field.annotation) is list:
        return [{}]
    if values := choices(field):
        return values[0]
    scalars: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: False}
    return scalars.get(field.annotation, {})


def _take_out_nulls(data: dict[str, Any], section: type[BaseModel], way: Location) -> Iterator[Problem]:
    """Remove and report null fields: the API server rejects null for numbers, so a job file rejects it everywhere."""
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    for key in [key for key in data if key in fields]:
        value, here = data[key], (*way, key)
        inner = section_of(fields[key].annotation)
        if value is None:
            del data[key]
            yield null_problem(here)
        elif inner and isinstance(value, dict):
            yield from _take_out_nulls(value, inner, here)
        elif inner and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _take_out_nulls(item, inner, (*here, index))


def _touches(field: str, broken: Sequence[str]) -> bool:
    return _within(field, broken) or any(_is_in(part, field) for part in broken)


def _within(field: str, broken: Sequence[str]) -> bool:
    return any(field == part or _is_in(field, part) for part in broken)


def _is_in(field: str, section: str) -> bool:
    return field.startswith((f"{section}.", f"{section}["))
