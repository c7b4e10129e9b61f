"""Join event records to closed steps: a state machine without I/O.

Samples wait for the record of their group, groups for the record of their step; the step's record closes it. Records
may arrive in any order and more than once: a replay changes nothing. A record that arrives after its step has closed is
counted as late and discarded.

Memory is bounded: samples wait encoded, and when too many wait (their group's record was lost) the oldest groups are
discarded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

import msgspec

from plaudit_metrics.sources.kept_steps import ClosedStep, KeptSteps
from plaudit_metrics.sources.step_samples import EncodedSample, encode_sample
from plaudit_metrics.statistics.steps import step_statistics
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord

_CLOCK_SLACK_S = 1.0
"""A group belongs to a step that opened before the group closed; both stamps are from one clock, read in two calls."""
_CLOSED_GROUPS = 200_000
"""Ids of closed groups that are remembered, to recognise replays."""


class Arrival(Enum):
    """Name the relation of a record to those before it."""

    new = "new"
    replaced = "replaced"
    """The same sample with new content (group-scope scorers ran later); the newer one counts."""
    replayed = "replayed"
    late = "late"


class _WaitingGroup:
    """Hold a group whose step has not closed yet."""

    __slots__ = ("record", "samples")

    def __init__(self) -> None:
        self.samples: dict[int, EncodedSample] = {}
        self.record: GroupRecord | None = None


class Collector:
    """Join event records to closed steps, which ``kept`` receives.

    Args:
        waiting_limit: samples that may wait for their step.
    """

    def __init__(self, kept: KeptSteps, *, waiting_limit: int = 500_000) -> None:
        self.kept = kept
        self.late = 0
        """Records that arrived after their step had closed."""
        self._waiting_limit = waiting_limit
        self._waiting: dict[str, _WaitingGroup] = {}
        self._num_waiting = 0
        self._closed_groups: dict[str, int] = {}
        """Group id → bit mask of the indices that were counted in its step."""
        self._closed_steps: set[tuple[int, int]] = set()

    @property
    def num_waiting(self) -> int:
        """Return the number of samples whose step has not closed yet."""
        return self._num_waiting

    def add_sample(self, record: SampleRecord) -> Arrival:
        """Add a terminal sample."""
        counted = self._closed_groups.get(record.group)
        if counted is not None:
            return self._arrived_late(known=bool(counted >> record.index & 1))
        group = self._waiting.setdefault(record.group, _WaitingGroup())
        sample = encode_sample(record)
        before = group.samples.get(record.index)
        group.samples[record.index] = sample
        if before is not None:
            return Arrival.replayed if before == sample else Arrival.replaced
        self._num_waiting += 1
        while self._num_waiting > self._waiting_limit:
            oldest = next(iter(self._waiting))
            self._num_waiting -= len(self._waiting.pop(oldest).samples)
        return Arrival.new

    def add_group(self, record: GroupRecord) -> Arrival:
        """Add the record of a closed group."""
        if record.group in self._closed_groups:
            return self._arrived_late(known=True)
        group = self._waiting.setdefault(record.group, _WaitingGroup())
        if group.record is not None:
            return Arrival.replayed
        group.record = record
        return Arrival.new

    def add_step(self, record: StepRecord, *, again: bool = False) -> ClosedStep | None:
        """Close a step with all records that wait for it; return None for a replay.

        Args:
            again: True if an earlier start of the service has read it before.
        """
        if (record.step, record.incarnation) in self._closed_steps:
            return None
        self._closed_steps.add((record.step, record.incarnation))
        samples: list[EncodedSample] = []
        groups: list[GroupRecord] = []
        for of_group, waiting in self._take_groups(record):
            groups.append(of_group)
            samples += waiting.samples.values()
        return self.kept.put(_completed(record, samples, groups), samples, groups, again=again)

    def samples_of(self, group: str) -> list[SampleRecord]:
        """Return the samples of a group whose step has not closed yet."""
        waiting = self._waiting.get(group)
        return [sample.decode() for sample in waiting.samples.values()] if waiting is not None else []

    def newest_open(self, most: int) -> list[SampleRecord]:
        """Return the newest samples whose step has not closed yet, those of the newest group first."""
        waiting = (group.samples for group in reversed(self._waiting.values()))
        newest = (sample for samples in waiting for _, sample in sorted(samples.items()))
        return [sample.decode() for sample in itertools.islice(newest, most)]

    def _take_groups(self, step: StepRecord) -> list[tuple[GroupRecord, _WaitingGroup]]:
        """Remove the groups that the step closed; discard those of an earlier attempt at it, and of validation."""
        taken: list[tuple[GroupRecord, _WaitingGroup]] = []
        for name, waiting in list(self._waiting.items()):
            if waiting.record is None or waiting.record.step > step.step:
                continue
            del self._waiting[name]
            self._num_waiting -= len(waiting.samples)
            self._closed_groups[name] = sum(1 << index for index in waiting.samples)
            current = waiting.record.step == step.step and waiting.record.closed >= step.opened - _CLOCK_SLACK_S
            if current and waiting.record.split == "train":
                taken.append((waiting.record, waiting))
        while len(self._closed_groups) > _CLOSED_GROUPS:
            del self._closed_groups[next(iter(self._closed_groups))]
        return taken

    def _arrived_late(self, *, known: bool) -> Arrival:
        if known:
            return Arrival.replayed
        self.late += 1
        return Arrival.late


def _completed(record: StepRecord, samples: Sequence[EncodedSample], groups: Sequence[GroupRecord]) -> StepRecord:
    """Add figures that the trainer did not send, computed from the events; the trainer's own figures stand."""
    if "step_s" in record.statistics:
        return record  # all of them, from its own complete records
    decoded = [sample.decode() for sample in samples]
    computed = step_statistics(decoded, groups=groups, waits=record.waits, opened=record.opened, closed=record.closed)
    return msgspec.structs.replace(record, statistics=computed | record.statistics)
