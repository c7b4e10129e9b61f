"""``plaudit rescore RUN --job JOB`` or ``--url URL``: score a run's stored samples anew, and compare.

read → score → compare: memory does not grow with the number of samples. With ``--output``, the same command continues
after a kill; the output, Parquet or JSON lines by its extension, is written completely or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet

from plaudit_job.load import load_job
from plaudit_metrics.sources.audits import run_audits
from plaudit_metrics.sources.sample_schema import COLUMNS, FOLDER, REAL, SCORER_COLUMNS, TEXT, scorer_column
from plaudit_metrics.statistics.audits import AuditedGroup, AuditFigures, audit_figures, rank_correlation
from plaudit_metrics.statistics.columns import FailureCounts
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import collect_seldom
from plaudit_wire.printable import print_text
from plaudit_wire.records import Failure, ScoringRecord
from plaudit_workers.commands.audited import interval_or_dash
from plaudit_workers.commands.rescore_rows import (
    Progress,
    StoredSample,
    StoredScorers,
    Unit,
    scorers_of_job,
    scorers_of_service,
    stored_groups,
)
from plaudit_workers.commands.samples import sample_files, samples_path
from plaudit_workers.commands.score import OfflineProgress
from plaudit_workers.commands.trial import show_logs
from plaudit_workers.files import refuse_inputs, whole_file
from plaudit_workers.launch.preflight import RunLock
from plaudit_workers.process import EXIT_DONE

_RESPONSE_CHARACTERS = 200
_SHOWN_CHARACTERS = 60
OnScored = Callable[[StoredSample, ScoringRecord], object]


def rescore(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.output is not None and arguments.output.suffix not in (".jsonl", ".parquet"):
        raise RefusedError(f"--output {arguments.output}: end its name in .parquet or .jsonl")
    opening: AbstractAsyncContextManager[StoredScorers]
    samples = samples_path(arguments.samples, arguments.runs_folder)
    run_folder = (samples.parent if samples.is_file() else samples).parent
    if arguments.url is not None:
        opening = scorers_of_service(arguments.url, os.environ.get("PLAUDIT_TOKEN", ""))
    else:
        opening = scorers_of_job(load_job(arguments.job), run_folder)
    files = sample_files(samples)
    if arguments.output is not None:
        refuse_inputs(arguments.output, files)
    comparison, failures, audits = ScoreComparison(arguments.changes), FailureCounts(), AuditComparison(run_folder)
    counted = OfflineProgress()
    show_logs()

    async def score() -> None:
        async with opening as scorers:
            with (
                Progress(arguments.output, str(arguments.samples), scorers.version, scorers.scoring) as progress,
                written_rows(arguments.output, scorers.names) as write,
            ):

                def compare(stored: StoredSample, scoring: ScoringRecord) -> None:
                    _compare(comparison, stored, scoring)
                    failures.add(scoring)
                    audits.add(stored, scoring)
                    counted.add(scoring.outcome, scoring.value, None)
                    write(stored, scoring)

                await _rescore(scorers, files, progress, compare)

    with ExitStack() as stack:
        if run := _run_folder(arguments.output):
            stack.enter_context(RunLock(run, "being rescored into its folder"))
        collect_seldom()
        asyncio.run(score())
    reasons, auditors = failures.failures(), audits.auditors()
    summary = msgspec.structs.replace(comparison.summary(), failures=reasons, auditors=auditors)
    print_text(msgspec.json.encode(summary).decode() if arguments.json else readable(summary))
    return EXIT_DONE


def _run_folder(output: Path | None) -> Path | None:
    """Return the folder of the run that an output lies in; None if it lies elsewhere."""
    parents = Path(os.path.realpath(output)).parents if output else ()
    return next((folder for folder in parents if (folder / "job.yaml").exists() and (folder / FOLDER).is_dir()), None)


async def _rescore(scorers: StoredScorers, files: Iterable[Path], progress: Progress, on_scored: OnScored) -> None:
    in_work: deque[tuple[str, list[StoredSample]]] = deque()

    async def unscored() -> AsyncIterator[tuple[str, Unit]]:
        resuming = True
        for name, unit in _units(files, scorers.scores_groups):
            scorings = progress.scored(name, len(unit)) if resuming else None
            resuming = scorings is not None
            if scorings is not None:
                for stored, scoring in zip(unit, scorings, strict=True):
                    on_scored(stored, scoring)
            else:
                in_work.append((name, unit))
                yield f"{progress.attempt}/{name}", [stored.sample for stored in unit]

    async for scorings in scorers.scored(unscored()):
        name, unit = in_work.popleft()
        progress.keep(name, scorings)
        for stored, scoring in zip(unit, scorings, strict=True):
            on_scored(stored, scoring)


def _units(files: Iterable[Path], scores_groups: bool) -> Iterable[tuple[str, list[StoredSample]]]:
    """Yield what is scored together, each under a name of its own in the run."""
    for group in stored_groups(files):
        step, first = group[0].step, group[0].sample
        if scores_groups and first.split == "train":
            yield f"{step}/{first.group}", group
        else:
            for stored in group:
                yield f"{step}/{first.group}/{stored.sample.index}", [stored]


def _compare(comparison: ScoreComparison, stored: StoredSample, scoring: ScoringRecord) -> None:
    comparison.add_outcomes(stored.outcome, scoring.outcome)
    if stored.score is not None and scoring.value is not None:
        sample = stored.sample
        response = sample.response[:_RESPONSE_CHARACTERS]
        comparison.add_scores(
            ScoreChange(stored.step, sample.group, sample.index, stored.score, scoring.value, response)
        )


def readable(summary: Summary) -> str:
    """Return the summary as a few lines of text."""
    lines = [
        f"samples           {summary.samples:,}",
        f"outcomes before   {_outcomes(summary.outcomes_before)}",
        f"outcomes now      {_outcomes(summary.outcomes_after)}",
        f"scored both times {summary.scored_both:,}",
    ]
    lines += [f"  {failure.scorer}: {failure}" for failure in summary.failures]
    if summary.scored_both:
        correlation = summary.rank_correlation
        lines += [
            f"mean score        {summary.mean_before:.4f} → {summary.mean_after:.4f} "
            f"(change {summary.mean_change:+.4f})",
            f"same score        {100 * (summary.agreement or 0):.1f} %",
            "rank correlation  "
            + ("undefined: one side has a single value" if correlation is None else f"{correlation:.3f}"),
        ]
    for name, (before, after) in summary.auditors.items():
        lines.append(
            f"auditor {name}, {before.groups:,} groups: rank correlation {interval_or_dash(before.agreement)} → "
            f"{interval_or_dash(after.agreement)}, gap {interval_or_dash(before.gap)} → {interval_or_dash(after.gap)}"
        )
    if summary.changed_most:
        lines.append("changed most")
    for change in summary.changed_most:
        text = " ".join(change.response.split())[:_SHOWN_CHARACTERS]
        lines.append(
            f"  {change.before:8.4f} → {change.after:8.4f}  step {change.step} {change.group} [{change.index}]  {text}"
        )
    return "\n".join(lines)


def _outcomes(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{outcome} {count:,}" for outcome, count in outcomes.items()) or "none"


_SAME = 1e-9
_MOST_RANKED = 1_000_000
"""Pairs that ranks are computed of; of more, a random sample of so many."""


class ScoreChange(msgspec.Struct, frozen=True):
    """Hold one sample whose score changed."""

    step: int
    group: str
    index: int
    before: float
    after: float
    response: str
    """Its first characters."""


class Summary(msgspec.Struct, frozen=True):
    """Summarize all samples."""

    samples: int
    outcomes_before: dict[str, int]
    outcomes_after: dict[str, int]
    scored_both: int
    """Samples with two scores; the following fields are about them."""
    mean_before: float | None
    mean_after: float | None
    mean_change: float | None
    agreement: float | None
    """The share of them with the same score (to 1e-9)."""
    rank_correlation: float | None
    changed_most: list[ScoreChange]
    """By how much, the most first."""
    failures: list[Failure] = []
    """Why samples have no score now, by scorer and kind, the most frequent first."""
    auditors: dict[str, tuple[AuditFigures, AuditFigures]] = {}
    """Figures of the run's auditors over the groups that they have audited: by the score before, and by that of now."""


class AuditComparison:
    """Compare both scores of the audited samples with what the run's auditors said of them.

    Args:
        run_folder: of the samples; without audits there is nothing to compare.
    """

    def __init__(self, run_folder: Path) -> None:
        self._audited = {(group.step, group.group): group for group in run_audits(run_folder)}
        self._scores: dict[tuple[int, str], dict[int, float | None]] = {}

    def add(self, stored: StoredSample, scoring: ScoringRecord) -> None:
        """Add one sample's new score."""
        place = stored.step, stored.sample.group
        if place in self._audited:
            self._scores.setdefault(place, {})[stored.sample.index] = scoring.value

    def auditors(self) -> dict[str, tuple[AuditFigures, AuditFigures]]:
        """Return each auditor's figures by the scores before, and by those of now."""
        before = [self._audited[place] for place in self._scores]
        after = [_scored_as(group, scores) for group, scores in zip(before, self._scores.values(), strict=True)]
        names = sorted({name for group in before for name in group.auditors})
        return {name: (audit_figures(before, name), audit_figures(after, name)) for name in names}


def _scored_as(group: AuditedGroup, scores: dict[int, float | None]) -> AuditedGroup:
    samples = [msgspec.structs.replace(sample, score=scores.get(sample.index)) for sample in group.samples]
    return msgspec.structs.replace(group, samples=samples)


class ScoreComparison:
    """Compare two scores of each sample in bounded memory, and list the ``num_changes`` that changed most."""

    def __init__(self, num_changes: int = 10) -> None:
        self._num_changes = num_changes
        self._random = random.Random(0)
        self._before: Counter[str] = Counter()
        self._after: Counter[str] = Counter()
        self._scored = self._same = 0
        self._sum_before = self._sum_after = 0.0
        self._pairs: list[tuple[float, float]] = []
        self._changes: list[tuple[float, int, ScoreChange]] = []
        self._order = itertools.count(0, -1)

    def add_outcomes(self, before: str, after: str) -> None:
        """Add one sample's outcomes."""
        self._before[before] += 1
        self._after[after] += 1

    def add_scores(self, change: ScoreChange) -> None:
        """Add one sample with two scores."""
        self._scored += 1
        self._sum_before += change.before
        self._sum_after += change.after
        size = abs(change.after - change.before)
        self._same += size <= _SAME
        if size > _SAME:
            heapq.heappush(self._changes, (size, next(self._order), change))
            if len(self._changes) > self._num_changes:
                heapq.heappop(self._changes)
        # A uniform random sample of the pairs (reservoir sampling).
        pair = change.before, change.after
        if len(self._pairs) < _MOST_RANKED:
            self._pairs.append(pair)
        elif (place := self._random.randrange(self._scored)) < _MOST_RANKED:
            self._pairs[place] = pair

    def summary(self) -> Summary:
        """Return the comparison of all samples so far."""
        n = self._scored
        correlation = rank_correlation(*np.array(self._pairs, dtype=np.float64).reshape(-1, 2).T)
        return Summary(
            samples=self._before.total(),
            outcomes_before=dict(self._before.most_common()),
            outcomes_after=dict(self._after.most_common()),
            scored_both=n,
            mean_before=self._sum_before / n if n else None,
            mean_after=self._sum_after / n if n else None,
            mean_change=(self._sum_after - self._sum_before) / n if n else None,
            agreement=self._same / n if n else None,
            rank_correlation=None if math.isnan(correlation) else correlation,
            changed_most=[change for *_, change in sorted(self._changes, key=lambda one: one[:2], reverse=True)],
        )


_ROWS_AT_A_TIME = 1024
_COLUMNS: dict[str, pyarrow.DataType] = {
    **{name: COLUMNS[name] for name in ("step", "group", "index", "data_source", "prompt", "response")},
    "outcome_before": TEXT,
    "score_before": REAL,
    "outcome": TEXT,
    "score": REAL,
    "reason": TEXT,
}
_SCORER_COLUMNS = {name: SCORER_COLUMNS[name] for name in ("value", "outcome", "reason")}


@contextmanager
def written_rows(target: Path | None, scorers: list[str]) -> Iterator[OnScored]:
    """Yield a function that writes one sample; ``target`` appears when the block ends without an error."""
    if target is None:
        yield lambda stored, scoring: None
    elif target.suffix == ".jsonl":
        with whole_file(target) as temporary, temporary.open("wb") as file:
            yield lambda stored, scoring: file.write(msgspec.json.encode(_row(stored, scoring)) + b"\n")
    else:
        with whole_file(target) as temporary, _ParquetRows(temporary, scorers) as rows:
            yield lambda stored, scoring: rows.add(_row(stored, scoring))


def _row(stored: StoredSample, scoring: ScoringRecord) -> dict[str, Any]:
    sample = stored.sample
    row: dict[str, Any] = {
        name: getattr(sample, name) for name in ("group", "index", "data_source", "prompt", "response")
    }
    row |= {"step": stored.step, "outcome_before": stored.outcome, "score_before": stored.score}
    row |= {"outcome": scoring.outcome, "score": scoring.value, "reason": scoring.reason}
    for name, scorer in scoring.scorers.items():
        row |= {scorer_column(name, column): getattr(scorer, column) for column in _SCORER_COLUMNS}
    return row


class _ParquetRows:
    def __init__(self, path: Path, scorers: list[str]) -> None:
        of_scorers = {scorer_column(name, column): kind for name in scorers for column, kind in _SCORER_COLUMNS.items()}
        self._schema = pyarrow.schema(_COLUMNS | of_scorers)
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> _ParquetRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == _ROWS_AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()
