"""Build the API's responses about steps, as plain data, for the live page and for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from plaudit_metrics.service.trace import chrome_trace
from plaudit_metrics.sources.steps import ClosedStep, flat_step
from plaudit_metrics.statistics.stages import stages_of
from plaudit_metrics.statistics.steps import slowest_samples, wall_seconds
from plaudit_metrics.statistics.verdict import explain, reasoning, verdict_over
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord

RECENT_STEPS = 10
"""The number of steps in the verdict over several."""


def step_summary(step: ClosedStep) -> dict[str, Any]:
    """Return the step's figures by the keys of docs/metrics.md, without its waits."""
    flat = flat_step(step.record)
    del flat["waits"]
    return flat | {"records_missing": step.records_missing}


def step_detail(step: ClosedStep) -> dict[str, Any]:
    """Return the figures, the waits, the explanation of the verdict and the rules that led to it."""
    record = step.record
    return step_summary(step) | {
        "explanation": explain(record.verdict, record.statistics),
        "reasoning": msgspec.to_builtins(reasoning(_own_figures(record))),
        "waits": msgspec.to_builtins(record.waits),
    }


def sample_details(step: ClosedStep, count: int) -> list[dict[str, Any]]:
    """Return the step's slowest samples, each with its stages."""
    return [_sample(sample, step) for sample in step.slowest[:count]]


def step_timeline(
    step: ClosedStep, samples: Iterable[SampleRecord], groups: Iterable[GroupRecord], count: int
) -> dict[str, Any]:
    """Return the timeline of the ``count`` slowest of a step's samples, in Chrome's trace format."""
    chosen = slowest_samples(samples, count)
    drawn = {sample.group for sample in chosen}
    return chrome_trace(step.record, chosen, [group for group in groups if group.group in drawn])


def verdict_detail(recent: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the newest step's verdict and where its time went, and the verdicts of all given steps."""
    newest = recent[-1]
    waits = {key: value for key, value in newest.statistics.items() if key.startswith("wait/")}
    own_s = newest.closed - newest.opened - sum(waits.values())
    return {
        "step": newest.step,
        "verdict": newest.verdict,
        "explanation": explain(newest.verdict, newest.statistics),
        "seconds": {"trainer_s": own_s, **{key.removeprefix("wait/"): value for key, value in sorted(waits.items())}},
        "recent_verdict": verdict_over(_own_figures(record) for record in recent),
        "recent": Counter(record.verdict for record in recent),
    }


def _sample(sample: SampleRecord, step: ClosedStep) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(sample)
    group = step.groups.get(sample.group)
    return record | {"wall_s": wall_seconds(sample), "stages_s": stages_of(sample, group)}


def _own_figures(record: StepRecord) -> dict[str, float]:
    return {"step_s": record.closed - record.opened} | record.statistics
