"""Resolve the relative paths of a job against the folder of the job file."""

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
    """Return the job's data with every path absolute.

    Args:
        written: a job as plain data with the names of the YAML form; unknown fields and wrong types stay as they are.
    """
    return _resolved(written, RLJob, folder.resolve())


def path_fields(section: type[BaseModel], name: str = "") -> Iterator[tuple[str, JobPath]]:
    """Yield every field below a section that is a path: its written name (``[]`` for lists) and its mark."""
    for python_name, field in section.model_fields.items():
        written = f"{name}.{field.alias or python_name}".lstrip(".")
        mark = _mark(field)
        if mark and mark.kind != "command":
            yield written, mark
        inner = section_of(field.annotation)
        if inner:
            is_list = "list" in str(field.annotation).lower().split("[")[0]
            yield from path_fields(inner, f"{written}[]" if is_list else written)


def is_hub_id(source: str) -> bool:
    """Return True for a hub id, False for a path (in a resolved job, every path is absolute)."""
    return not source.startswith(("/", ".", "~"))


def _mark(field: FieldInfo) -> JobPath | None:
    return next((mark for mark in field.metadata if isinstance(mark, JobPath)), None)


def _resolved(written: Mapping[str, Any], section: type[BaseModel], folder: Path) -> dict[str, Any]:
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    return {
        key: _resolved_value(value, fields[key], folder) if key in fields else value for key, value in written.items()
    }


def _resolved_value(value: Any, field: FieldInfo, folder: Path) -> Any:
    mark, inner = _mark(field), section_of(field.annotation)
    if mark and isinstance(value, str):
        return _absolute(value, mark, folder)
    if mark and mark.kind == "command" and isinstance(value, list):
        return _command(value, mark, folder)
    if inner and isinstance(value, Mapping):
        return _resolved(value, inner, folder)
    if inner and isinstance(value, list):
        return [_resolved(item, inner, folder) if isinstance(item, Mapping) else item for item in value]
    return value


def _command(written: list[Any], mark: JobPath, folder: Path) -> list[Any]:
    """Resolve a program with a slash in its name, and arguments that name a file beside the job file."""
    if not written:
        return written
    program, *arguments = written
    # Not pathlib: its is_file raises for what is too long for a name, such as the text of a program.
    is_file = [isinstance(each, str) and each != "" and os.path.isfile(folder / each) for each in arguments]
    return [
        _absolute(program, mark, folder) if "/" in str(program) else program,
        *(_absolute(each, mark, folder) if file else each for each, file in zip(arguments, is_file, strict=True)),
    ]


def _absolute(path: str, mark: JobPath, folder: Path) -> str:
    if not path:
        return path
    target = Path(os.path.normpath(folder / Path(path).expanduser()))
    if mark.kind == "source" and is_hub_id(path) and not os.path.exists(target):
        return path
    return str(target)
