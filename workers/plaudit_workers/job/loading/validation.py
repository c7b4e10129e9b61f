"""Validates a job's data so that one pass tells every problem.

Pydantic looks at what fields say together only when each of them is right by itself. So broken fields are told, taken
out, and the rest is looked at again; rules about a broken field are left out, for they would speak of values that
nobody wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from plaudit_workers.job.loading.field_errors import Location, field_at, field_name, null_problem, section_of, tell
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob

_ROUNDS = 20
"""At most; each round tells all that one pass of pydantic can see."""


def validate(written: Mapping[str, Any]) -> tuple[RLJob, list[Problem]] | tuple[None, list[Problem]]:
    """The job, or every problem that keeps it from being one."""
    data = copy.deepcopy(dict(written))
    problems = list(_take_out_nulls(data, RLJob, ()))
    broken = [problem.field for problem in problems]
    for _ in range(_ROUNDS):
        try:
            job = RLJob.model_validate(data, by_alias=True, by_name=False)
        except ValidationError as error:
            details = error.errors(include_url=False)
            if details[0]["type"] == "rules":
                return None, problems + _about_sound_fields(details[0]["ctx"]["problems"], broken)
            located = [(detail, _location(detail, data)) for detail in details]
            problems += [problem for problem in _told(located) if not _within(problem.field, broken)]
            broken += [_take_out(data, detail, location) for detail, location in located]
        else:
            return (None, problems) if problems else (job, [])
    return None, problems


def _told(located: Sequence[tuple[ErrorDetails, Location]]) -> list[Problem]:
    """One problem a field: where a value may be of several types, pydantic tells an error for each of them."""
    by_location: dict[Location, list[ErrorDetails]] = {}
    for detail, location in located:
        by_location.setdefault(location, []).append(detail)
    return [tell(details, RLJob, location) for location, details in by_location.items()]


def _location(detail: ErrorDetails, data: object) -> Location:
    """The written place of an error: pydantic adds the types of a union to it, or ``[key]`` for a key."""
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


def _take_out(data: dict[str, Any], detail: ErrorDetails, location: Location) -> str:
    """Removes the broken part from ``data``, or puts a stand-in where one is missing; returns its written name.

    Whole lists go, never single entries: the places of the others must stay.
    """
    way = list(location)
    while isinstance(way[-1], int):
        way.pop()
    parent: Any = data
    for part in way[:-1]:
        parent = _inside(parent, part)
    if detail["type"] == "missing":
        parent[way[-1]] = _stand_in(field_at(RLJob, tuple(way)))
    elif isinstance(parent, dict):
        parent.pop(way[-1], None)
    return field_name(way)


def _inside(node: Any, part: str | int) -> Any:
    """A part of plain data; an empty mapping where there is none (an error before this one took it out)."""
    if isinstance(node, list):
        return node[int(part)]
    return node.get(part, {}) if isinstance(node, dict) else {}


def _stand_in(field: FieldInfo | None) -> Any:
    """A value that a required field may have, to look at the other fields; it is never shown."""
    if field is None or get_origin(field.annotation) is dict:
        return {}
    if get_origin(field.annotation) is list:
        return [{}]
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)[0]
    scalars: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: False}
    return scalars.get(field.annotation, {})


def _take_out_nulls(data: dict[str, Any], section: type[BaseModel], way: Location) -> Iterator[Problem]:
    """Fields without a value: the API server refuses them where a number is wanted, so they are refused everywhere."""
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


def _about_sound_fields(problems: Sequence[Problem], broken: Sequence[str]) -> list[Problem]:
    return [problem for problem in problems if not any(_touches(field, broken) for field in problem.fields)]


def _touches(field: str, broken: Sequence[str]) -> bool:
    return _within(field, broken) or any(_is_in(part, field) for part in broken)


def _within(field: str, broken: Sequence[str]) -> bool:
    return any(field == part or _is_in(field, part) for part in broken)


def _is_in(field: str, section: str) -> bool:
    return field.startswith((f"{section}.", f"{section}["))
