"""Split a sample's wall time into its stages.

From admission to the moment it became terminal (``SAMPLE_STAGES``), and on to the moment the trainer took its group
(``GROUP_STAGES``)::

    admitted ─ rollout_queue ─ taken ─ engine_queue · generation · tools ─ published ─ sample_queue ─ first taken
    ─ redelivery ─ taken by the worker that committed ─ limiter · retry · score · commit ─ committed
    ─ group_wait ─ group terminal ─ group_scorer ─ ready ─ ready_queue ─ taken by the trainer

A ``─`` is a stamp of the transport's clock. A ``·`` divides a stretch by durations that one process measured with its
monotonic clock: they are placed in the order shown and cut at the end of the stretch. The rest of the stretch
belongs to ``generation`` before publication and to ``commit`` after it. So the stages add up exactly,
whatever the clocks do. Where a stamp is missing, the stage before it lasts until the next stamp.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plaudit_metrics.statistics.columns import Floats, SampleColumns
from plaudit_wire.records import GroupRecord, SampleRecord

SAMPLE_STAGES = (
    "rollout_queue",
    "engine_queue",
    "generation",
    "tools",
    "sample_queue",
    "redelivery",
    "limiter",
    "retry",
    "score",
    "commit",
)
GROUP_STAGES = ("group_wait", "group_scorer", "ready_queue")
STAGES = SAMPLE_STAGES + GROUP_STAGES

_UNKNOWN = GroupRecord("", "train", 0, "trained", 0, 0, 0.0, 0.0)
"""Stands for a group without a record: it has no points in time."""


def sample_stage_seconds(columns: SampleColumns) -> dict[str, Floats]:
    """Split each sample's time from admission to terminal.

    Returns:
        For each of ``SAMPLE_STAGES`` an array of shape [number of samples], seconds. Their sum over the stages is
        ``committed - admitted``.
    """
    admitted, taken, published, first_taken, score_taken, committed = columns.stamps
    engine_queue, tools, generation = _cut(published - taken, columns.engine_queue_s, columns.tool_s)
    limiter, retry, score, commit = _cut(committed - score_taken, columns.limiter_s, columns.retry_s, columns.call_s)
    return {
        "rollout_queue": taken - admitted,
        "engine_queue": engine_queue,
        "generation": generation,
        "tools": tools,
        "sample_queue": first_taken - published,
        "redelivery": score_taken - first_taken,
        "limiter": limiter,
        "retry": retry,
        "score": score,
        "commit": commit,
    }


def group_stage_seconds(columns: SampleColumns, groups: Mapping[str, GroupRecord]) -> dict[str, Floats]:
    """Return how long each sample then waited for its group, its group's scorers, and the trainer.

    Returns:
        For each of ``GROUP_STAGES`` an array of shape [number of samples], seconds; NaN where the group's record is
        missing or lacks the stamp.
    """
    records = [groups.get(group, _UNKNOWN) for group in columns.groups]
    terminal, ready, taken = (
        np.array(points, dtype=np.float64)[columns.group]
        for points in (
            [record.terminal for record in records],
            [record.ready for record in records],
            [record.taken for record in records],
        )
    )
    return {
        "group_wait": np.maximum(terminal - columns.committed, 0.0),
        "group_scorer": np.maximum(ready - terminal, 0.0),
        "ready_queue": np.maximum(taken - ready, 0.0),
    }


def stages_of(sample: SampleRecord, group: GroupRecord | None = None) -> dict[str, float]:
    """Return the seconds that one sample spent in each stage; stages of no length are left out."""
    columns = SampleColumns.from_records([sample])
    seconds = sample_stage_seconds(columns)
    if group is not None:
        seconds |= group_stage_seconds(columns, {group.group: group})
    return {stage: float(of_stage[0]) for stage, of_stage in seconds.items() if of_stage[0] > 0}


def _cut(span: Floats, *parts: Floats) -> list[Floats]:
    """Split ``span`` into the given parts in turn and a remainder; a part is cut where it exceeds the span."""
    cut: list[Floats] = []
    for part in parts:
        taken = np.fmin(np.fmax(part, 0.0), span)  # fmax: no part where it is NaN
        cut.append(taken)
        span = span - taken
    return [*cut, span]
