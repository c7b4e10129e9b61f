"""Merge edits into a running job: the admitted spec with the mutable fields of the new one."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from plaudit_workers.job.loading.field_errors import section_of
from plaudit_workers.job.spec.rljob import Spec
from plaudit_workers.job.spec.section import Mutable

Data = Mapping[str, Any]


def overlaid(admitted: Data, current: Data) -> dict[str, Any]:
    """Return the ``spec`` that was admitted, with the mutable fields of the ``spec`` as it is now."""
    if _whole(admitted) and "rollout" in admitted:
        sizes = ("replicas", "groups")
        fixed = {key: value for key, value in admitted["rollout"].items() if key in sizes}
        rollout = {key: value for key, value in (current.get("rollout") or {}).items() if key not in sizes}
        current = {**current, "rollout": rollout | fixed}
    return _overlaid(admitted, current, Spec)


def _whole(admitted: Data) -> bool:
    """Return True if rollouts belong to a gang, whose size is fixed."""
    scheduling = admitted.get("scheduling") or {}
    return bool(scheduling.get("queueName")) or scheduling.get("gang", "none") != "none"


@functools.cache
def mutable_fields() -> tuple[str, ...]:
    """Return the paths under ``spec`` of the fields that may change, and of all fields below them."""
    return tuple(_paths(Spec, "", below=False))


def _paths(section: type[BaseModel], path: str, *, below: bool) -> Iterator[str]:
    for name, field in _fields(section).items():
        here, mutable = f"{path}.{name}".lstrip("."), below or _mutable(field)
        if mutable:
            yield here
        if inner := _inner_section(section, name):
            yield from _paths(inner, here, below=mutable)


def known_to(fields: Collection[str], spec: Data) -> dict[str, Any]:
    """Return a spec without the mutable fields that another version did not know.

    Args:
        fields: the ``mutable_fields`` of that version.
        spec: as that version resolved it, with the mutable fields of an edit.
    """
    known: dict[str, Any] = _known_to(fields, spec, Spec, "")
    return known


def _known_to(fields: Collection[str], data: Any, section: type[BaseModel], path: str) -> Any:
    if isinstance(data, list):
        return [_known_to(fields, item, section, path) for item in data]
    if not isinstance(data, Mapping):
        return data
    result = {}
    for name, value in data.items():
        here = f"{path}.{name}".lstrip(".")
        if here in mutable_fields() and here not in fields:
            continue
        inner = _inner_section(section, name) if name in _fields(section) else None
        result[name] = _known_to(fields, value, inner, here) if inner else value
    return result


def frozen_changes(admitted: Data, current: Data) -> list[str]:
    """Return the immutable fields that differ, as written: ``spec.model.source``.

    The API server refuses most such changes already; it does not look into opaque fields. Fields that this version does
    not know do not count: after a rollback of the definition, the API server removes those of the newer version.
    """
    return _changes(_known(overlaid(admitted, current), Spec), _known(current, Spec), "spec")


def _known(data: Any, section: type[BaseModel]) -> Any:
    """Return the part of a section, or of a list of them, that this version knows."""
    if isinstance(data, list):
        return [_known(item, section) for item in data]
    if not isinstance(data, Mapping):
        return data
    known = {name: value for name, value in data.items() if name in _fields(section)}
    inner = {name: _inner_section(section, name) for name in known}
    return {name: _known(value, within) if (within := inner[name]) else value for name, value in known.items()}


def _overlaid(admitted: Data, current: Data, section: type[BaseModel]) -> dict[str, Any]:
    fields = _fields(section)
    result = {name: value for name, value in admitted.items() if name not in fields}  # of another version
    for name, field in fields.items():
        source = current if _mutable(field) else admitted
        inner = _inner_section(section, name)
        if not _mutable(field) and inner and _holds_mutable(inner):
            value = _inner(admitted.get(name), current.get(name), inner)
        else:
            value = source.get(name)
        if value is not None:
            result[name] = value
    return result


def _inner(admitted: Any, current: Any, section: type[BaseModel]) -> Any:
    if isinstance(admitted, list):
        by_name: dict[str, Data] = {item.get("name", ""): item for item in current or []}
        return [_overlaid(item, by_name.get(item.get("name", "")) or item, section) for item in admitted]
    if admitted is None and current is None:
        return None
    return _overlaid(admitted or {}, current or {}, section) or (None if admitted is None else {})


def _changes(wanted: Any, current: Any, field: str) -> list[str]:
    if isinstance(wanted, Mapping) and isinstance(current, Mapping):
        keys = [*wanted, *(key for key in current if key not in wanted)]
        return [change for key in keys for change in _changes(wanted.get(key), current.get(key), f"{field}.{key}")]
    both_empty = wanted in (None, {}, []) and current in (None, {}, [])
    return [] if wanted == current or both_empty else [field]


@functools.cache
def _fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


@functools.cache
def _inner_section(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    return section_of(_fields(section)[name].annotation)


def _mutable(field: FieldInfo) -> bool:
    return any(isinstance(mark, Mutable) for mark in field.metadata)


@functools.cache
def _holds_mutable(section: type[BaseModel]) -> bool:
    for field in section.model_fields.values():
        inner = section_of(field.annotation)
        if _mutable(field) or (inner is not None and _holds_mutable(inner)):
            return True
    return False
