"""Paths in a job: relative ones are resolved against the job file's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from plaudit_workers.job.loading.field_errors import section_of
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.section import JobPath


def resolve_paths(written: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The job's data with every path absolute.

    Args:
        written: a valid job as plain data in YAML's names.
        folder: where the job file lies.
    """
    return _resolved(written, RLJob, folder.resolve())


def path_fields(section: type[BaseModel], name: str = "") -> Iterator[tuple[str, JobPath]]:
    """Every field of a section, and of the sections in it, that holds a path: written name (``[]`` for lists), mark."""
    for python_name, field in section.model_fields.items():
        written = f"{name}.{field.alias or python_name}".lstrip(".")
        mark = _mark(field)
        if mark:
            yield written, mark
        inner = section_of(field.annotation)
        if inner:
            is_list = "list" in str(field.annotation).lower().split("[")[0]
            yield from path_fields(inner, f"{written}[]" if is_list else written)


def is_hub_id(source: str) -> bool:
    """Whether a model's source is a hub id and no path (in a resolved job: every path is absolute)."""
    return not source.startswith(("/", ".", "~"))


def _mark(field: FieldInfo) -> JobPath | None:
    return next((mark for mark in field.metadata if isinstance(mark, JobPath)), None)


def _resolved(written: Mapping[str, Any], section: type[BaseModel], folder: Path) -> dict[str, Any]:
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    return {key: _resolved_value(value, fields[key], folder) for key, value in written.items()}


def _resolved_value(value: Any, field: FieldInfo, folder: Path) -> Any:
    mark, inner = _mark(field), section_of(field.annotation)
    if mark and isinstance(value, str):
        return _absolute(value, mark, folder)
    if inner and isinstance(value, Mapping):
        return _resolved(value, inner, folder)
    if inner and isinstance(value, list):
        return [_resolved(item, inner, folder) for item in value]
    return value


def _absolute(path: str, mark: JobPath, folder: Path) -> str:
    if not path:
        return path
    target = Path(os.path.normpath(folder / Path(path).expanduser()))
    if mark.kind == "source" and is_hub_id(path) and not target.exists():
        return path
    return str(target)
