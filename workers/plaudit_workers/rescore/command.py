"""``plaudit rescore RUN --job JOB`` or ``--url URL``: score a run's stored samples anew, and compare.

read → score → compare: memory does not grow with the number of samples. With ``--output``, the same command continues
after a kill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from plaudit_metrics.statistics.failures import FailureCounts
from plaudit_wire.records import ScoringRecord
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.process import EXIT_DONE
from plaudit_workers.rescore.comparison import ScoreChange, ScoreComparison, Summary
from plaudit_workers.rescore.output import check_ending, written_rows
from plaudit_workers.rescore.progress import Progress
from plaudit_workers.rescore.rows import StoredSample, sample_files, samples_path, stored_groups
from plaudit_workers.rescore.scorers import StoredScorers, Unit, scorers_of_job, scorers_of_service
from plaudit_workers.scoring.offline.printed import show_logs

_RESPONSE_CHARACTERS = 200
_SHOWN_CHARACTERS = 60

Compare = Callable[[StoredSample, ScoringRecord], None]


def rescore(arguments: argparse.Namespace) -> int:
    """Run the command."""
    check_ending(arguments.output)
    opening: AbstractAsyncContextManager[StoredScorers]
    if arguments.url:
        opening = scorers_of_service(arguments.url, os.environ.get("PLAUDIT_TOKEN", ""))
    else:
        opening = scorers_of_job(load_job(arguments.job))
    files = sample_files(samples_path(arguments.samples, arguments.runs_folder))
    comparison, failures = ScoreComparison(arguments.changes), FailureCounts()
    show_logs()

    async def score() -> None:
        async with opening as scorers:
            with (
                Progress(arguments.output, str(arguments.samples), scorers.version) as progress,
                written_rows(arguments.output, scorers.names) as write,
            ):

                def compare(stored: StoredSample, scoring: ScoringRecord) -> None:
                    _compare(comparison, stored, scoring)
                    failures.add(scoring)
                    write(stored, scoring)

                await _rescore(scorers, files, progress, compare)

    asyncio.run(score())
    summary = msgspec.structs.replace(comparison.summary(), failures=failures.failures())
    print(msgspec.json.encode(summary).decode() if arguments.json else readable(summary))
    return EXIT_DONE


async def _rescore(scorers: StoredScorers, files: Iterable[Path], progress: Progress, compare: Compare) -> None:
    in_work: deque[tuple[str, list[StoredSample]]] = deque()

    async def unscored() -> AsyncIterator[tuple[str, Unit]]:
        resuming = True
        for name, unit in _units(files, scorers.scores_groups):
            scorings = progress.scored(name, len(unit)) if resuming else None
            resuming = scorings is not None
            if scorings is not None:
                for stored, scoring in zip(unit, scorings, strict=True):
                    compare(stored, scoring)
            else:
                in_work.append((name, unit))
                yield f"{progress.attempt}/{name}", [stored.sample for stored in unit]

    async for scorings in scorers.scored(unscored()):
        name, unit = in_work.popleft()
        progress.keep(name, scorings)
        for stored, scoring in zip(unit, scorings, strict=True):
            compare(stored, scoring)


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
        lines += [
            f"mean score        {summary.mean_before:.4f} → {summary.mean_after:.4f} "
            f"(change {summary.mean_change:+.4f})",
            f"same score        {100 * (summary.agreement or 0):.1f} %",
            f"rank correlation  {_correlation(summary.rank_correlation)}",
        ]
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


def _correlation(value: float | None) -> str:
    return "undefined: one side has a single value" if value is None else f"{value:.3f}"
