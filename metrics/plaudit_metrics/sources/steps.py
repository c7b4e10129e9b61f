"""Closed steps: ``steps.jsonl``, their samples in bounded memory, and how event records join to them.

Samples are kept encoded, one by one, from their arrival until the step is forgotten. Nothing converts all of them at
once: msgspec holds the interpreter while it encodes or decodes an object, for half a second with a step of 100,000
samples, and no thread and no request of the service would proceed.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from plaudit_wire.errors import EXIT_INTERRUPTED
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord, WaitRecord

FILE_NAME = "steps.jsonl"
_FIELDS = frozenset(StepRecord.__struct_fields__) - {"statistics", "labels"}


def append_step(path: Path, record: StepRecord) -> None:
    """Append one step to ``steps.jsonl``. Only the trainer appends.

    A step that was repeated after a resume is a second line with a higher incarnation. Raises ``OSError`` if the file
    cannot be written (no space, no permission).
    """
    append_line(path, encode_step(record))


def append_line(path: Path, content: bytes) -> None:
    """Append a line in one write, flushed to disk; end a last line that a crash cut short first. Raise ``OSError``."""
    line = content + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_steps(path: Path) -> list[StepRecord]:
    """Read the surviving steps, oldest first. A missing file holds none; a torn line is skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return surviving(record for line in lines if (record := decode_step(line)) is not None)


def surviving(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Return the newest incarnation of each step, at most one record for each, in the order of the steps.

    A new incarnation that resumes at step ``s`` rolls back everything from ``s`` on: those steps of older incarnations
    no longer count, even before the new one has reached them.
    """
    newest_first = sorted(records, key=lambda record: (-record.incarnation, record.step))
    kept: dict[int, StepRecord] = {}
    first_rolled_back = float("inf")
    incarnation: int | None = None
    for record in newest_first:
        if record.incarnation != incarnation:
            first_rolled_back = min(kept, default=first_rolled_back)
            incarnation = record.incarnation
        if record.step < first_rolled_back:
            kept[record.step] = record
    return [kept[step] for step in sorted(kept)]


ENDING_FILE = "ended.json"
VALIDATION_FIRST = 0
"""The number of the step that holds the validation before the first one; it trains nothing and has no length."""


class RunEnding(msgspec.Struct, frozen=True):
    """The end of a run: exit code, and the reason as a sentence unless all steps are done."""

    code: int
    message: str
    ended: float
    """Seconds since the epoch."""

    @property
    def words(self) -> str:
        """Return how the run ended in a few words: one that its user stopped has not failed."""
        if self.code == EXIT_INTERRUPTED:
            return "the run was stopped"
        return "the run failed" if self.code else "the run is done"


def write_ending(run_folder: Path, ending: RunEnding | None) -> None:
    """Record how a run ended; None: it begins, or goes on."""
    path = run_folder / ENDING_FILE
    if ending is None:
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(ending))
    unfinished.replace(path)


def read_ending(run_folder: Path) -> RunEnding | None:
    """Return how a run ended; None while it goes on, and for one that was killed."""
    try:
        return msgspec.json.decode((run_folder / ENDING_FILE).read_bytes(), type=RunEnding)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def flat_step(record: StepRecord) -> dict[str, Any]:
    """Return the step as a line of ``steps.jsonl`` has it: its own fields beside labels and figures by their keys."""
    fields = {
        name: msgspec.to_builtins(getattr(record, name)) for name in StepRecord.__struct_fields__ if name in _FIELDS
    }
    return fields | record.labels | dict(sorted(record.statistics.items()))


def encode_step(record: StepRecord) -> bytes:
    """Encode ``flat_step`` as one JSON object, without a line end."""
    return msgspec.json.encode(flat_step(record))


def decode_step(line: bytes) -> StepRecord | None:
    """Decode one line; return None for an incomplete record. Unknown texts are labels, unknown numbers figures."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        own = {name: fields.pop(name) for name in _FIELDS if name in fields}
        return StepRecord(
            **own | {"waits": msgspec.convert(own.get("waits", []), list[WaitRecord])},
            statistics={key: float(value) for key, value in fields.items() if isinstance(value, int | float)},
            labels={key: value for key, value in fields.items() if isinstance(value, str)},
        )
    except (msgspec.MsgspecError, TypeError):
        return None


class StepSamples(msgspec.Struct, frozen=True):
    """Hold every sample and group of one step."""

    samples: list[SampleRecord]
    groups: list[GroupRecord]


class EncodedSample(msgspec.Struct, frozen=True, gc=False):
    """Hold a sample while it waits for its step, and after it: few are ever decoded."""

    wall_s: float
    encoded: bytes

    def decode(self) -> SampleRecord:
        """Return the record."""
        return _decoder.decode(self.encoded)


class EncodedStep(msgspec.Struct, frozen=True):
    """Hold every sample and group of one step, the samples encoded."""

    samples: Sequence[EncodedSample]
    groups: Sequence[GroupRecord]
    num_bytes: int
    """Of the encoded samples."""

    def decode(self) -> Iterator[SampleRecord]:
        """Yield the samples; each is decoded when its turn comes."""
        return (sample.decode() for sample in self.samples)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SampleRecord)


def encode_sample(record: SampleRecord) -> EncodedSample:
    """Return the record as it is kept."""
    return EncodedSample(record.wall_s, _encoder.encode(record))


def encoded_step(samples: Sequence[EncodedSample], groups: Sequence[GroupRecord]) -> EncodedStep:
    """Return a closed step as it is kept."""
    return EncodedStep(samples, groups, sum(len(sample.encoded) for sample in samples))


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
    """Keep the newest ``limit`` closed steps, the newest incarnation of each, each with its ``slowest`` samples.

    All samples (for the timeline) are kept for the newest steps only: within ``samples_bytes`` of encoded samples, the
    oldest go first, and the newest step always stays.
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
    """Join event records to closed steps, which ``kept`` receives: a state machine without I/O.

    Samples wait for the record of their group, groups for the record of their step; the step's record closes it.
    Records may arrive in any order and more than once: a replay changes nothing. A record that arrives after its step
    has closed is counted as late and discarded. Memory is bounded: when more than ``waiting_limit`` samples wait (their
    group's record was lost) the oldest groups are discarded.
    """

    def __init__(self, kept: KeptSteps, *, waiting_limit: int = 500_000) -> None:
        self.kept = kept
        self.late = 0
        """Records that arrived after their step had closed."""
        self._waiting_limit = waiting_limit
        self._waiting: dict[str, _WaitingGroup] = {}
        self.num_waiting = 0
        """Samples whose step has not closed yet."""
        self._closed_groups: dict[str, int] = {}
        """Group id → bit mask of the indices that were counted in its step."""
        self._closed_steps: set[tuple[int, int]] = set()

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
        self.num_waiting += 1
        while self.num_waiting > self._waiting_limit:
            oldest = next(iter(self._waiting))
            self.num_waiting -= len(self._waiting.pop(oldest).samples)
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
        """Close a step with all records that wait for it; return None for a replay. ``again`` is as in ``put``."""
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
            self.num_waiting -= len(waiting.samples)
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
    from plaudit_metrics.statistics.steps import step_statistics  # needs numpy, which who only reads steps does without

    decoded = [sample.decode() for sample in samples]
    computed = step_statistics(decoded, groups=groups, waits=record.waits, opened=record.opened, closed=record.closed)
    return msgspec.structs.replace(record, statistics=computed | record.statistics)
