"""Split the trainer's waiting by its causes: intervals in, seconds per cause out.

**The rule.** Each instant of a wait goes wholly to the earliest cause in which any awaited group still is::

    generation < tools < sample_queue < limiter < score < group_scorer < ready_queue

A group is in the earliest cause of any of its samples; once all of them are terminal it is in ``group_scorer`` until it
is ready and in ``ready_queue`` until the wait ends. Other waits count as their neighbour: those for a
rollout, for weights and for the engine as ``generation``; time with a reward worker that was lost as
``sample_queue``; retries and the commit as ``score``. A wait for no known group (none admitted yet, rollouts reading a
checkpoint) is ``generation``.

Turns and tool calls of a conversation alternate. Its seconds in tools are placed at the end of its work in the rollout,
so that it, too, only moves forward.

Every sample only moves forward through the causes, so the earliest cause among many samples only moves forward too:
a wait splits at the points in time at which the *last* awaited sample leaves each cause. No sampling, no sweep, and
the parts add up to the wait.

A wait whose cause the trainer recorded itself goes wholly to it: ``pause`` (too many samples had no score, so the
trainer paused before it admitted their prompts again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plaudit_metrics.statistics.columns import Floats, Integers, SampleColumns
from plaudit_wire.records import PAUSE, GroupRecord, WaitRecord

CAUSES = ("generation", "tools", "sample_queue", "limiter", "score", "group_scorer", "ready_queue", PAUSE)
"""In the order of the pipeline; all but the first two are the reward side's."""
ROLLOUT_CAUSES = CAUSES[:2]
_OF_GROUPS = CAUSES[:-1]
"""Causes that follow from the stamps of the awaited groups."""

_FEWEST_PEERS = 4
"""Among fewer awaited samples (or groups) the last always accounts for a large part, which makes it no straggler."""


@dataclass(frozen=True)
class WaitSplit:
    """Hold the trainer's waiting in one step, by cause."""

    total_s: float
    """Sum of the waits."""
    cause_s: dict[str, float]
    """Seconds for each of ``CAUSES``; they add up to ``total_s``."""
    straggler_s: float
    """Seconds in which the trainer waited for a single sample or group (of at least four)."""

    @property
    def exposed_reward_s(self) -> float:
        """Return the seconds in which the trainer waited for rewards after generation had ended."""
        return sum(seconds for cause, seconds in self.cause_s.items() if cause not in ROLLOUT_CAUSES)


def split_waits(samples: SampleColumns, groups: Sequence[GroupRecord], waits: Sequence[WaitRecord]) -> WaitSplit:
    """Split the trainer's waiting over ``CAUSES`` by the rule above.

    Args:
        samples: every sample of every awaited group. For an awaited group without samples its record
            decides; a group without either is left out.
        groups: their records (for the end of the group scorers).
        waits: disjoint stretches of time on the transport's clock.
    """
    timeline = _Timeline(samples, {record.group: record for record in groups})
    cause_s = np.zeros(len(CAUSES))
    straggler_s = 0.0
    for wait in waits:
        if wait.cause in CAUSES:
            cause_s[CAUSES.index(wait.cause)] += wait.end - wait.start
            continue
        awaited = timeline.find(wait.awaited)
        cause_s[: len(_OF_GROUPS)] += _causes(wait, timeline.left[:, awaited])
        by_group = _held_by_last(wait, timeline.left[-1, awaited])
        by_sample = _held_by_last(wait, timeline.committed_in(awaited))
        straggler_s += max(by_group, by_sample)
    return WaitSplit(
        total_s=float(sum(wait.end - wait.start for wait in waits)),
        cause_s=dict(zip(CAUSES, cause_s.tolist(), strict=True)),
        straggler_s=straggler_s,
    )


class _Timeline:
    """Hold the points in time at which the last sample of each group left each cause.

    Attributes:
        left: shape [6, number of groups], seconds since the epoch: when the group left generation, tools, sample_queue,
            limiter, score and group_scorer.
    """

    def __init__(self, samples: SampleColumns, groups: Mapping[str, GroupRecord]) -> None:
        names = list(dict.fromkeys((*samples.groups, *groups)))
        self._codes = {name: code for code, name in enumerate(names)}
        self._order = np.argsort(samples.group, kind="stable")
        counts = np.bincount(samples.group, minlength=len(names))
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        of_samples = _times_left(samples)
        self._committed = of_samples[-1][self._order]
        self.left = np.full((len(_OF_GROUPS) - 1, len(names)), -np.inf)
        for cause, left in enumerate(of_samples):
            np.maximum.at(self.left[cause], samples.group, left)
        if groups:
            self._complete(groups)

    def _complete(self, groups: Mapping[str, GroupRecord]) -> None:
        codes = np.array([self._codes[name] for name in groups], dtype=np.int64)
        terminal = [record.terminal or record.ready or record.closed for record in groups.values()]
        ready = np.array([record.ready for record in groups.values()], dtype=np.float64)
        # Of a group without known samples the record alone tells when they were terminal.
        without = np.isneginf(self.left[0, codes])
        self.left[:5, codes[without]] = np.array(terminal, dtype=np.float64)[without]
        self.left[5, codes] = np.fmax(self.left[4, codes], ready)

    def find(self, names: Sequence[str]) -> Integers:
        """Return the positions of the groups that are known."""
        return np.array([self._codes[name] for name in names if name in self._codes], dtype=np.int64)

    def committed_in(self, groups: Integers) -> Floats:
        """Return when each sample of the given groups became terminal."""
        counts = self._ends[groups] - self._starts[groups]
        before = np.cumsum(counts) - counts
        places = np.repeat(self._starts[groups] - before, counts) + np.arange(counts.sum())
        committed: Floats = self._committed[places]
        return committed


def _times_left(samples: SampleColumns) -> list[Floats]:
    _, taken, published, _, score_taken, committed = samples.stamps
    generated = np.maximum(published - np.fmax(samples.tool_s, 0.0), taken)
    limited = np.minimum(score_taken + np.fmax(samples.limiter_s, 0.0), committed)
    return [generated, published, score_taken, limited, committed]


def _causes(wait: WaitRecord, left: Floats) -> Floats:
    """Return the seconds of one wait by cause, shape [len(_OF_GROUPS)]; ``left`` has shape [6, awaited groups]."""
    if left.shape[1] == 0:
        return np.array([wait.end - wait.start, *[0.0] * (len(_OF_GROUPS) - 1)])
    borders = np.maximum.accumulate(left.max(axis=1))
    return np.diff(np.concatenate([[wait.start], np.clip(borders, wait.start, wait.end), [wait.end]]))


def _held_by_last(wait: WaitRecord, done: Floats) -> float:
    """Return the seconds of the wait between the last two of ``done``; 0 among fewer than four."""
    if len(done) < _FEWEST_PEERS:
        return 0.0
    before, last = np.clip(np.partition(done, -2)[-2:], wait.start, wait.end)
    return float(last - before)
