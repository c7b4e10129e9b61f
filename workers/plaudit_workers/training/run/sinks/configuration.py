"""Flatten the job's specification for sinks that keep a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plaudit_workers.job.spec.rljob import RLJob

Configuration = Mapping[str, str | int | float | bool]

_LEFT_OUT = ("pod", "env")
"""Pods say nothing about training, and their variables may hold secrets."""


def configuration(job: RLJob) -> Configuration:
    """Return the settings of a job by path, such as ``algorithm.promptsPerStep``; unset ones are left out."""
    return dict(_flat("", job.model_dump(mode="json", by_alias=True)["spec"]))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            if name not in _LEFT_OUT:
                yield from _flat(f"{path}.{name}" if path else str(name), below)
    elif isinstance(value, list):
        for place, below in enumerate(value):
            yield from _flat(f"{path}.{place}", below)
    elif value is not None:
        yield path, value
