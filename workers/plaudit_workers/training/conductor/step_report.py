"""Collect the samples, groups, waits and figures of a step while it is open. Called by the conductor."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord, WaitRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.training.run.joined_figures import join_mini_batches


@dataclass
class StepReport:
    """Hold the record of a step in progress."""

    step: int
    opened: float
    """Server's clock."""
    samples: list[SampleRecord] = field(default_factory=list)
    records: list[GroupRecord] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    """The figures of each update."""
    update_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    """Further figures of the step."""
    begun_by: int = 0
    """The incarnation that stored the first groups of the step, if it was interrupted in its middle; else 0."""
    ended: list[tuple[Group, GroupRecord]] = field(default_factory=list)
    """Groups to store: all that ended, validation included."""

    def add(self, groups: Sequence[Group], records: Sequence[GroupRecord]) -> None:
        """Add training groups that ended in this step."""
        for group in groups:
            self.samples += sample_records(group, self.step)
        self.records += records
        self.ended += zip(groups, records, strict=True)

    def record(self, incarnation: int, trainer_version: int, closed: float) -> StepRecord:
        """Return the record of the whole step.

        Args:
            trainer_version: number of the version that the step's first update started from.
            closed: server's clock.
        """
        ends = [record.end for record in self.records]
        extra = {
            "timing_s/step": closed - self.opened,
            "timing_s/update_actor": self.update_s,
            "training/mini_batches": float(len(self.updates)),
            "training/groups": float(ends.count("trained")),
            "training/dropped": float(ends.count("dropped")),
        }
        return step_record(
            self.step,
            incarnation,
            self.samples,
            groups=self.records,
            waits=self.waits,
            opened=self.opened,
            closed=closed,
            update_s=self.update_s,
            trainer_version=trainer_version,
            extra=join_mini_batches(self.updates) | extra | self.figures,
        )

    def snapshot(self) -> str:
        """Return everything but ``ended`` as text, for a checkpoint in the middle of a step."""
        return base64.b64encode(msgspec.msgpack.encode(replace(self, ended=[]))).decode()

    @classmethod
    def restored(cls, snapshot: str, begun_by: int) -> StepReport:
        """Return the report of a ``snapshot``, which that incarnation took."""
        return replace(msgspec.msgpack.decode(base64.b64decode(snapshot), type=cls), begun_by=begun_by)


def sample_records(group: Group, step: int) -> list[SampleRecord]:
    """Return the terminal samples of a group."""
    return [
        SampleRecord(
            group=group.id,
            index=sample.index,
            split=group.prompt.split,
            step=step,
            data_source=group.prompt.data_source,
            stamps=sample.stamps,
            scoring=sample.scoring,
            generation=sample.body.generation if sample.body else None,
            deliveries=sample.deliveries,
        )
        for sample in group.samples
        if sample.scoring is not None
    ]
