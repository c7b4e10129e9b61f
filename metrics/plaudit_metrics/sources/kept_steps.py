"""Keep the newest closed steps in bounded memory, the newest incarnation of each.

Each kept step has its record and its slowest samples. All samples (for the timeline) are kept for the newest steps
only, encoded, within a budget of bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import msgspec

from plaudit_metrics.sources.history import surviving
from plaudit_metrics.sources.step_samples import EncodedSample, EncodedStep, encoded_step
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord


class ClosedStep(msgspec.Struct, frozen=True):
    """Hold a closed step as the service knows it."""

    record: StepRecord
    records_missing: int = 0
    """Samples of the step whose events were lost; the figures are complete, since they are the trainer's.

    0 for a step that is read again after a restart: the start that first read it counted its losses, and events that
    were trimmed since then are not lost."""
    slowest: list[SampleRecord] = []
    groups: dict[str, GroupRecord] = {}
    """Records of the groups of ``slowest``."""


class KeptSteps:
    """Keep the newest ``limit`` closed steps.

    Args:
        slowest: number of slowest samples that are kept with a step.
        samples_bytes: memory for all samples of steps, encoded; the oldest go first, the newest step always stays.
    """

    def __init__(self, *, limit: int = 500, slowest: int = 100, samples_bytes: int = 64 << 20) -> None:
        self._limit = limit
        self._slowest = slowest
        self._samples_bytes = samples_bytes
        self._steps: dict[int, ClosedStep] = {}
        self._samples: dict[int, EncodedStep] = {}

    def restore(self, records: Iterable[StepRecord]) -> None:
        """Add the records of ``steps.jsonl``: steps that closed before this process started."""
        for record in records:
            self._put(ClosedStep(record))

    def put(
        self,
        record: StepRecord,
        samples: Sequence[EncodedSample],
        groups: Sequence[GroupRecord],
        *,
        again: bool = False,
    ) -> ClosedStep:
        """Keep a closed step with its samples; ``again`` if an earlier start of the service has read it before."""
        longest = heapq.nlargest(self._slowest, samples, key=lambda sample: sample.wall_s)
        slowest = [sample.decode() for sample in longest]
        wanted = {sample.group for sample in slowest}
        closed = ClosedStep(
            record,
            records_missing=0 if again else max(record.num_samples - len(samples), 0),
            slowest=slowest,
            groups={group.group: group for group in groups if group.group in wanted},
        )
        if self._put(closed):
            self._samples.pop(record.step, None)
            self._samples[record.step] = encoded_step(samples, groups)
            self._forget_samples()
        return closed

    def _put(self, closed: ClosedStep) -> bool:
        """Return True if the step is kept, False if a newer incarnation has rolled it back."""
        older = self._steps.get(closed.record.step)
        records = [step.record for step in self._steps.values()]
        if older is not None and older.record.incarnation == closed.record.incarnation:
            records.remove(older.record)
        known = {id(step.record): step for step in (*self._steps.values(), closed)}
        kept = surviving([*records, closed.record])[-self._limit :]
        self._steps = {record.step: known[id(record)] for record in kept}
        self._forget_samples()
        return any(record is closed.record for record in kept)

    def _forget_samples(self) -> None:
        for step in list(self._samples):
            if step not in self._steps:
                del self._samples[step]
        while len(self._samples) > 1 and sum(step.num_bytes for step in self._samples.values()) > self._samples_bytes:
            del self._samples[next(iter(self._samples))]

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, step: int) -> ClosedStep | None:
        """Return one step, or None if it never closed or is no longer kept."""
        return self._steps.get(step)

    def newest(self, count: int) -> list[ClosedStep]:
        """Return up to ``count`` of the newest steps, oldest first."""
        return list(self._steps.values())[-count:] if count > 0 else []

    def samples(self, step: int) -> EncodedStep | None:
        """Return every sample of a step, or None if they are no longer kept."""
        return self._samples.get(step)
