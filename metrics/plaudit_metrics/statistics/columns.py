"""Turn a step's samples into arrays: one column a field, so that every figure is one numpy call.

``ColumnCollector`` takes the samples one by one as they come and packs each into one row of numbers, so that nothing
is left to convert when the step closes. It also collects the turns and tool calls of conversations, and why samples
have no score. NaN means "did not happen".
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plaudit_wire.printable import printable
from plaudit_wire.records import (
    OUTCOMES,
    VERIFY_S,
    Failure,
    GenerationRecord,
    Outcome,
    SampleRecord,
    SandboxRecord,
    ScorerRecord,
    ScoringRecord,
    TurnRecord,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_KINDS: dict[Any, Any] = {"Floats": np.float64, "Integers": np.int64, "Flags": np.bool_}
"""Annotation of a field that is a column → the type of its array."""
SANDBOX_STAGES = ("claim", "start", "wait", "exec", "verify_wait", "verify")
"""The life of a sample's machine: ``claim`` and ``start`` once, then its commands and their waits, then its tests'."""
MOST_EXTRAS = 16
"""Numeric extras of one scorer that are figures of a step; further ones are not."""
_EXTRA_CHARACTERS = 64
_OUTCOME_CODES = {outcome: float(code) for code, outcome in enumerate(OUTCOMES)}
_NAN = math.nan
_NEVER_GENERATED = GenerationRecord(
    worker="",
    generate_s=_NAN,
    prompt_tokens=0,
    response_tokens=0,
    version_min=0,
    version_max=0,
    tool_s=_NAN,
    engine_queue_s=_NAN,
)


@dataclass(frozen=True)
class SampleColumns:
    """Hold a step's samples as arrays of shape [number of samples]; seconds, points in time since the epoch."""

    group: Integers
    """Index into ``groups``."""
    groups: tuple[str, ...]
    """Ids of the groups that the samples belong to."""
    admitted: Floats
    taken: Floats
    published: Floats
    score_first_taken: Floats
    score_taken: Floats
    committed: Floats
    generated: Flags
    """True where there is a generation record; elsewhere the generation's columns are NaN or 0."""
    generate_s: Floats
    tool_s: Floats
    engine_queue_s: Floats
    num_preempted: Integers
    """-1 where the engine does not report it."""
    prompt_tokens: Integers
    response_tokens: Integers
    version_min: Integers
    truncated: Flags
    """True where the response ended at its token limit."""
    limiter_s: Floats
    retry_s: Floats
    call_s: Floats
    value: Floats
    """NaN where the sample has no score."""
    outcome: Integers
    """Index into ``OUTCOMES``."""
    deliveries: Integers
    scorers: dict[str, ScorerColumns]
    failures: tuple[Failure, ...]
    """The failures of the scorers, the most frequent first."""
    turns: TurnColumns
    """The conversations among them."""
    sandboxes: SandboxColumns
    """The machines that some of them had."""

    def __len__(self) -> int:
        return len(self.group)

    @cached_property
    def stamps(self) -> Floats:
        """Return the times at which each sample passed from stage to stage, in order; do not write to it.

        Shape [6, number of samples], seconds since the epoch: admitted, taken, published, first taken, taken by the
        worker that committed, committed. Never falls along the first axis; a missing point equals the next one.
        """
        points = np.stack(
            [self.admitted, self.taken, self.published, self.score_first_taken, self.score_taken, self.committed]
        )
        for later in range(len(points) - 1, 0, -1):
            missing = np.isnan(points[later - 1])
            points[later - 1][missing] = points[later][missing]
        if np.isnan(points[-1]).any():
            points = np.where(np.isnan(points), np.nanmax(points, axis=0, initial=-np.inf), points)
        latest = np.maximum(points[-1], points[0])
        for earlier in range(len(points) - 1):
            np.maximum(points[earlier + 1], points[earlier], out=points[earlier + 1])
        ordered: Floats = np.minimum(points, latest, out=points)
        return ordered

    @cached_property
    def sandbox_s(self) -> Floats:
        """Return the seconds in which each sample waited for its machine, a part of ``tool_s``; 0 without one."""
        seconds = np.zeros(len(self))
        machines = self.sandboxes
        seconds[machines.sample] = machines.claim_s + machines.start_s + machines.wait_s
        return seconds

    @classmethod
    def from_records(cls, samples: Iterable[SampleRecord]) -> SampleColumns:
        """Turn records into arrays, in their order."""
        collector = ColumnCollector()
        for sample in samples:
            collector.add(sample)
        return collector.columns()


@dataclass(frozen=True)
class SandboxColumns:
    """Hold the machines of a step's samples; arrays of shape [number of machines]."""

    sample: Integers
    """Index of the sample."""
    claim_s: Floats
    start_s: Floats
    wait_s: Floats
    exec_s: Floats
    verify_wait_s: Floats
    """Its tests waited for a place; NaN where no tests ran, as ``verify_s``."""
    verify_s: Floats
    cpus: Floats
    failed: Flags

    def __len__(self) -> int:
        return len(self.sample)

    def seconds(self) -> dict[str, Floats]:
        """Return the seconds in each stage that its samples and their tests went through."""
        return {stage: getattr(self, f"{stage}_s") for stage in SANDBOX_STAGES}


@dataclass(frozen=True)
class ScorerColumns:
    """Hold one scorer's part in a step; arrays of shape [number of samples that it was asked about]."""

    value: Floats
    """NaN where it gave none."""
    limiter_s: Floats
    held_s: Floats
    """The part of ``limiter_s`` in which the endpoint had asked for a pause."""
    retry_s: Floats
    throttled_s: Floats
    """The part of ``retry_s`` for which the endpoint had too many requests."""
    call_s: Floats
    wait_s: Floats
    """Seconds waiting for a free scorer process."""
    group_s: Floats
    """Seconds for the sample's whole group, once all its samples had a score; a part of the others if ``of_group``."""
    of_group: bool
    """The scorer is of group scope."""
    outcome: Integers
    """Index into ``OUTCOMES``."""
    extras: dict[str, ExtraFigures]
    """Name of a numeric extra → its figures over the samples that have it."""

    @property
    def work_s(self) -> Floats:
        """Return the seconds that it held each sample, waits for limits excluded."""
        return self.retry_s + self.wait_s + self.call_s


class ExtraFigures(NamedTuple):
    """Hold the figures of a numeric extra of a scorer."""

    mean: float
    min: float
    max: float


class ColumnCollector:
    """Collect samples into columns, one at a time: about two microseconds each, nothing but views at the end."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._rows = PackedRows(SampleColumns)
        self._scorers: dict[str, _ScorerCollector] = {}
        self._turns = TurnCollector()
        self._sandboxes = PackedRows(SandboxColumns)
        self._failures = FailureCounts()

    def add(self, sample: SampleRecord) -> None:
        """Add one terminal sample."""
        stamps, scoring = sample.stamps, sample.scoring
        generation = sample.generation or _NEVER_GENERATED
        self._rows.append(
            self._groups.setdefault(sample.group, len(self._groups)),
            stamps.admitted,
            _NAN if stamps.taken is None else stamps.taken,
            _NAN if stamps.published is None else stamps.published,
            _NAN if stamps.score_first_taken is None else stamps.score_first_taken,
            _NAN if stamps.score_taken is None else stamps.score_taken,
            _NAN if stamps.committed is None else stamps.committed,
            sample.generation is not None,
            generation.generate_s,
            generation.tool_s,
            generation.engine_queue_s,
            generation.num_preempted,
            generation.prompt_tokens,
            generation.response_tokens,
            generation.version_min,
            generation.finish_reason == "length",
            scoring.limiter_s,
            scoring.retry_s,
            scoring.call_s,
            _NAN if scoring.value is None else scoring.value,
            _OUTCOME_CODES[scoring.outcome],
            sample.deliveries,
        )
        if generation.turns:
            self._turns.add(generation.turns)
        if generation.sandbox is not None:
            self._add_sandbox(generation.sandbox, scoring)
        failed = not scoring.is_scored
        for name, record in scoring.scorers.items():
            of_scorer = self._scorers.get(name)
            if of_scorer is None:
                of_scorer = self._scorers[name] = _ScorerCollector()
            of_scorer.add(record)
            failed = failed or not record.is_scored
        if failed:
            self._failures.add(scoring)

    def _add_sandbox(self, machine: SandboxRecord, scoring: ScoringRecord) -> None:
        tests = [record for record in scoring.scorers.values() if VERIFY_S in record.extra]
        self._sandboxes.append(
            len(self._rows) - 1,  # that of this sample was added before
            machine.claim_s,
            machine.start_s,
            machine.wait_s,
            machine.exec_s,
            sum(record.limiter_s for record in tests) if tests else _NAN,
            sum(float(record.extra[VERIFY_S]) for record in tests) if tests else _NAN,
            machine.cpus,
            machine.failed,
        )

    def columns(self) -> SampleColumns:
        """Return the columns of all samples that were added so far."""
        return SampleColumns(
            groups=tuple(self._groups),
            scorers={name: scorer.columns() for name, scorer in self._scorers.items()},
            failures=tuple(self._failures.failures()),
            turns=self._turns.columns(),
            sandboxes=SandboxColumns(**self._sandboxes.columns()),
            **self._rows.columns(),
        )


class _ScorerCollector:
    """Collect the records of one scorer."""

    def __init__(self) -> None:
        self._rows = PackedRows(ScorerColumns)
        self._of_group = False
        self._extras: dict[str, tuple[float, int, float, float]] = {}
        """Name → sum, count, minimum and maximum."""

    def add(self, record: ScorerRecord) -> None:
        self._rows.append(
            _NAN if record.value is None else record.value,
            record.limiter_s,
            record.held_s,
            record.retry_s,
            record.throttled_s,
            record.call_s,
            record.wait_s,
            record.seconds if record.of_group else record.post_process_s,
            _OUTCOME_CODES[record.outcome],
        )
        self._of_group = record.of_group
        if record.extra:
            self._add_extras(record.extra)

    def _add_extras(self, extra: dict[str, float | str]) -> None:
        for name, value in extra.items():
            if isinstance(value, str) or not math.isfinite(value) or len(name) > _EXTRA_CHARACTERS:
                continue
            known = self._extras.get(name)
            if known is None and len(self._extras) >= MOST_EXTRAS:
                continue
            total, count, least, greatest = known or (0.0, 0, value, value)
            self._extras[name] = (total + value, count + 1, min(least, value), max(greatest, value))

    def columns(self) -> ScorerColumns:
        extras = {
            name: ExtraFigures(total / count, least, greatest)
            for name, (total, count, least, greatest) in sorted(self._extras.items())
        }
        return ScorerColumns(of_group=self._of_group, extras=extras, **self._rows.columns())


MOST_TOOLS = 64
"""Tools whose calls are figures of a step; a model may invent any number of names, which count as unknown."""
_UNKNOWN = "unknown"


@dataclass
class ToolCalls:
    """Hold the calls of one tool."""

    call_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    """``call_s`` of the calls that were not refused."""
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class TurnColumns:
    """Hold the conversations of a step; arrays of shape [number of conversations]."""

    num_turns: NDArray[np.int64]
    num_calls: NDArray[np.int64]
    tools: dict[str, ToolCalls]
    """By the tool's name."""


class TurnCollector:
    """Collect the conversations of a step."""

    def __init__(self) -> None:
        self._num_turns: list[int] = []
        self._num_calls: list[int] = []
        self._tools: dict[str, ToolCalls] = {}

    def add(self, turns: Sequence[TurnRecord]) -> None:
        """Add one conversation."""
        answered = sum(bool(turn.calls) for turn in turns[:-1])
        self._num_turns.append(1 + len(turns) + answered)
        self._num_calls.append(sum(len(turn.calls) for turn in turns))
        for call in (call for turn in turns for call in turn.calls):
            tool = self._tools.setdefault(tool_name(call.tool, self._tools), ToolCalls())
            tool.call_s.append(call.call_s)
            if call.outcome != "refused":
                tool.run_s.append(call.call_s)
            tool.outcomes[call.outcome] += 1

    def columns(self) -> TurnColumns:
        """Return all conversations that were added so far."""
        return TurnColumns(
            np.array(self._num_turns, dtype=np.int64), np.array(self._num_calls, dtype=np.int64), dict(self._tools)
        )


def tool_name(name: str, known: Collection[str]) -> str:
    """Return the name under which a call is counted; rollouts leave the names empty that the policy invented."""
    return name if name in known or (name and len(known) < MOST_TOOLS) else _UNKNOWN


def turns_began(sample: SampleRecord) -> float:
    """Return when a sample's first turn began, seconds since the epoch; its last turn or call ended at publication."""
    turns = sample.generation.turns if sample.generation else []
    ends = [turn.started_s + turn.generate_s for turn in turns]
    ends += [call.started_s + call.call_s for turn in turns for call in turn.calls]
    published = sample.stamps.published or sample.stamps.committed or sample.stamps.admitted
    return published - max(ends, default=0.0)


def turn_statistics(columns: TurnColumns) -> dict[str, float]:
    """Compute verl's ``num_turns/…`` and ``tool_call_counts/…``, each with ``min``, ``max`` and ``mean``.

    As verl counts: ``num_turns`` has one for the prompt, one for each turn of the policy and one for each turn of tool
    results; ``tool_call_counts`` has the calls of a sample. Without conversations there are none of the keys.
    """
    return spread("num_turns", columns.num_turns) | spread("tool_call_counts", columns.num_calls)


def spread(key: str, values: Floats | Integers) -> dict[str, float]:
    """Return ``<key>/min``, ``<key>/max`` and ``<key>/mean``; nothing without values."""
    if len(values) == 0:
        return {}
    return {f"{key}/min": float(values.min()), f"{key}/max": float(values.max()), f"{key}/mean": float(values.mean())}


NO_SCORER = "(no scorer)"
"""Stands for the scorer of samples that ended without one: poison, or given up at their group's deadline."""
_MOST_KINDS = 8
"""Kinds of failure that are kept for each scorer; further ones count as the last."""
_REASON_CHARACTERS = 200
_FOLDER = re.compile(r"\(/[^()]*/(?=[^/()]+:\d+)")
_PLACE = re.compile(r"\([^()]+:\d+[^()]*\)$")
_VARIES = re.compile(r"(?<!\w)'(?:[^'\\]|\\.)*'|\d+(\.\d+)?")


class FailureCounts:
    """Count why samples have no score: each scorer's failures by kind, with the first reason of each. Bounded.

    A kind is an outcome and the part of its reason that does not change from sample to sample: the type of an exception
    and its line, or the text before the first colon, without numbers and texts in quotes.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.unscored = 0
        """Those of the samples that have no score."""
        self._reasons: dict[tuple[str, Outcome, str], str] = {}
        self._counts: dict[tuple[str, Outcome, str], int] = {}

    def add(self, scoring: ScoringRecord) -> None:
        """Add one terminal sample. A scorer's failure counts even where the sample has a score without it."""
        self.samples += 1
        self.unscored += not scoring.is_scored
        failed = [(name, record) for name, record in scoring.scorers.items() if record.has_failed]
        for name, record in failed:
            self.add_failure(name, record.outcome, record.reason or "")
        if not scoring.is_scored and not failed:
            self.add_failure(NO_SCORER, scoring.outcome, scoring.reason or "")

    def failures(self) -> list[Failure]:
        """Return every kind of failure, the most frequent first."""
        found = [
            Failure(scorer, outcome, self._reasons[scorer, outcome, kind], count)
            for (scorer, outcome, kind), count in self._counts.items()
        ]
        return sorted(found, key=lambda failure: -failure.count)

    def add_failure(self, scorer: str, outcome: Outcome, reason: str) -> None:
        """Add one failure of a scorer."""
        place = _PLACE.search(reason)
        kind = _VARIES.sub("#", reason).partition(":")[0][:80] + (place[0] if place else "")
        key = (scorer, outcome, kind)
        if key not in self._counts:
            of_scorer = [known for known in self._counts if known[0] == scorer]
            if len(of_scorer) >= _MOST_KINDS:
                key = of_scorer[-1]
            else:
                self._reasons[key] = shortened(reason)
        self._counts[key] = self._counts.get(key, 0) + 1


def failure_labels(failures: Iterable[Failure]) -> dict[str, str]:
    """Return a step's labels ``reward_pipeline/scorer/<name>/reasons``: its failures, joined by semicolons."""
    by_scorer: dict[str, list[str]] = {}
    for failure in failures:
        by_scorer.setdefault(failure.scorer, []).append(str(failure))
    return {f"reward_pipeline/scorer/{name}/reasons": "; ".join(texts) for name, texts in sorted(by_scorer.items())}


def shortened(reason: str) -> str:
    """Return a reason as one printable line of at most 200 characters; a user's file is named without its folder."""
    text = _FOLDER.sub("(", printable(" ".join(reason.split())))
    place = _PLACE.search(text)
    if len(text) <= _REASON_CHARACTERS:
        return text
    end = f" {place[0]}" if place else ""
    return text[: _REASON_CHARACTERS - len(end) - 1].rstrip() + "…" + end


_ROWS_AT_A_TIME = 128


@cache
def _kinds(table: type) -> dict[str, Any]:
    """Return the columns of a table: name and type of the fields that are arrays, in their order."""
    return {each.name: _KINDS[each.type] for each in fields(table) if each.type in _KINDS}


class PackedRows:
    """Grow a table whose columns are the fields of a dataclass that are arrays, in their order.

    Rows are packed into a small buffer, since one ``struct`` call is many times faster than an array access for each
    number; a full buffer is turned into columns at once, so that reading the columns copies at most one buffer.
    """

    def __init__(self, table: type) -> None:
        self._kinds = _kinds(table)
        self._row = struct.Struct(f"{len(self._kinds)}d")
        self._buffer = bytearray(self._row.size * _ROWS_AT_A_TIME)
        self._filled = 0
        """Bytes of the buffer."""
        self._columns = np.empty((len(self._kinds), 0))
        self._count = 0
        """Rows that are in the columns."""

    def append(self, *values: float) -> None:
        """Append one row: a number for each column, in the order of the fields."""
        self._row.pack_into(self._buffer, self._filled, *values)
        self._filled += self._row.size
        if self._filled == len(self._buffer):
            self._turn()

    def __len__(self) -> int:
        return self._count + self._filled // self._row.size

    def columns(self) -> dict[str, Any]:
        """Return the array of each column, contiguous, by its name."""
        self._turn()
        columns = zip(self._kinds.items(), self._columns[:, : self._count], strict=True)
        return {name: column.astype(kind, copy=False) for (name, kind), column in columns}

    def _turn(self) -> None:
        added = self._filled // self._row.size
        count, (width, room) = self._count + added, self._columns.shape
        if count > room:
            grown = np.empty((width, max(count, 2 * room)))
            grown[:, : self._count] = self._columns[:, : self._count]
            self._columns = grown
        rows = np.frombuffer(self._buffer, np.float64, added * width).reshape(added, width)
        self._columns[:, self._count : count] = rows.T
        self._count, self._filled = count, 0


_REASONS = re.compile(r"reward_pipeline/scorer/(.+)/reasons")


def failures_of(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each scorer's failures in the figures of a step, as ``failure_labels`` wrote them."""
    return [(found[1], str(step[key])) for key in step if (found := _REASONS.fullmatch(key))]
