"""Summarize why samples of a step have no score, for logs and messages. Pure; called by ``step_training``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plaudit_metrics.statistics.failures import FailureCounts
from plaudit_workers.stream.group import Group, GroupSample

_MOST_KINDS = 3


def has_failed(sample: GroupSample) -> bool:
    """Return True if scoring the sample failed. A sample that its scorers skipped on purpose did not fail."""
    return sample.scoring is None or sample.scoring.has_failed


def failed_samples(groups: Sequence[Group]) -> Iterator[GroupSample]:
    """Yield the samples of the groups whose scoring failed."""
    return (sample for group in groups for sample in group.samples if has_failed(sample))


def failure_reasons(samples: Sequence[GroupSample]) -> str:
    """Return the most frequent kinds of failure, such as ``mine: 64 × KeyError: 'answer' (reward.py:2 in score)``."""
    counts = FailureCounts()
    for sample in samples:
        if sample.scoring is not None:
            counts.add(sample.scoring)
    failures = counts.failures()
    shown = [f"{failure.scorer}: {failure}" for failure in failures[:_MOST_KINDS]]
    others = sum(failure.count for failure in failures[_MOST_KINDS:])
    return "; ".join([*shown, f"{others} × other reasons"] if others else shown)


def is_permanent(samples: Sequence[GroupSample]) -> bool:
    """Return True if every failure is a data error: the scorer or its data is wrong, and waiting changes neither."""
    return all(sample.scoring is not None and sample.scoring.outcome == "data_error" for sample in samples)
