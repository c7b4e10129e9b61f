"""``plaudit rescore RUN --job JOB``: score a run's stored samples with another job's scorers, and compare.

read → score → compare: samples are scored as ``plaudit score`` does; memory does not grow with their number.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from plaudit_metrics.statistics.failures import FailureCounts
from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.job.spec.rewards.reward import RewardSpec
from plaudit_workers.process import EXIT_DONE
from plaudit_workers.rescore.comparison import ScoreChange, ScoreComparison, Summary
from plaudit_workers.rescore.output import written_rows
from plaudit_workers.rescore.rows import StoredSample, sample_files, samples_path, stored_groups
from plaudit_workers.scoring.build import build_pipeline
from plaudit_workers.scoring.offline.printed import show_logs
from plaudit_workers.scoring.offline.score import scored_in_order

_RESPONSE_CHARACTERS = 200
_SHOWN_CHARACTERS = 60


def rescore(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        RefusedError: the job, the samples or the output cannot be used.
    """
    reward = load_job(arguments.job).spec.reward
    groups = stored_groups(sample_files(samples_path(arguments.samples, arguments.runs_folder)))
    comparison, failures = ScoreComparison(arguments.changes), FailureCounts()
    show_logs()
    with written_rows(arguments.output, [scorer.name for scorer in reward.scorers]) as write:

        def compare(stored: StoredSample, scoring: ScoringRecord) -> None:
            _compare(comparison, stored, scoring)
            failures.add(scoring)
            write(stored, scoring)

        asyncio.run(_rescore(reward, groups, compare))
    summary = msgspec.structs.replace(comparison.summary(), failures=failures.failures())
    print(msgspec.json.encode(summary).decode() if arguments.json else readable(summary))
    return EXIT_DONE


async def _rescore(
    reward: RewardSpec, groups: Iterable[list[StoredSample]], compare: Callable[[StoredSample, ScoringRecord], None]
) -> None:
    pipeline = await build_pipeline(reward, "rescore")
    in_work: deque[StoredSample] = deque()

    async def units() -> AsyncIterator[list[Sample]]:
        for group in groups:
            in_work.extend(group)
            together = pipeline.scores_groups and group[0].sample.split == "train"
            for unit in [group] if together else [[stored] for stored in group]:
                yield [stored.sample for stored in unit]

    try:
        async for scoring in scored_in_order(pipeline, units(), reward.workers.max_concurrent_samples):
            compare(in_work.popleft(), scoring)
    finally:
        await pipeline.close()


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
