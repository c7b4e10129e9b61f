"""Compare the job of a resumed run with the job file: the fields that differ, and those that change what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plaudit_workers.job.loading.dump import job_data
from plaudit_workers.job.spec.rljob import RLJob

_FIXED = ("spec.seed", "spec.model", "spec.data")
"""A checkpoint continues one model on one order of prompts; anything else would be another run."""
_WITHOUT_MEANING = (
    "metadata",
    "spec.algorithm.steps",
    "spec.files",
    "spec.lifecycle",
    "spec.metrics",
    "spec.reward.networkPolicy",
    "spec.reward.workers",
    "spec.rollout.groups",
    "spec.rollout.pod",
    "spec.rollout.podsPerReplica",
    "spec.rollout.replicas",
    "spec.rollout.sleepDuringUpdates",
    "spec.scheduling",
    "spec.storage",
    "spec.trainer.activationOffload",
    "spec.trainer.checkpoint",
    "spec.trainer.cpuOffload",
    "spec.trainer.fsdpSize",
    "spec.trainer.pod",
    "spec.trainer.ranks",
    "spec.trainer.ranksPerPod",
    "spec.trainer.sequenceParallelSize",
    "spec.trainer.sinks",
    "spec.transport",
)
"""How much there is of what, where it runs and what is recorded. Every other field may change what is learned."""


@dataclass(frozen=True)
class FieldChange:
    """Hold a field that differs; ``None`` stands for an absent one."""

    field: str
    before: Any
    after: Any

    @property
    def refused(self) -> bool:
        """Return True for a field that a resumed run must not change."""
        return _within(self.field, _FIXED)

    @property
    def changes_meaning(self) -> bool:
        """Return True when the run may learn something else from here on."""
        return not _within(self.field, _WITHOUT_MEANING)

    def __str__(self) -> str:
        """Return ``spec.algorithm.samplesPerPrompt: 8 → 4``."""
        return f"{self.field}: {_shown(self.before)} → {_shown(self.after)}"


def job_changes(before: RLJob, after: RLJob) -> list[FieldChange]:
    """Return the fields in which two jobs differ, in the order of the job file."""
    old, new = dict(_leaves(job_data(before))), dict(_leaves(job_data(after)))
    fields = [*old, *(field for field in new if field not in old)]
    return [FieldChange(field, old.get(field), new.get(field)) for field in fields if old.get(field) != new.get(field)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _within(field: str, sections: tuple[str, ...]) -> bool:
    return any(field == section or field.startswith((f"{section}.", f"{section}[")) for section in sections)


def _shown(value: Any) -> str:
    return "(absent)" if value is None else str(value)
