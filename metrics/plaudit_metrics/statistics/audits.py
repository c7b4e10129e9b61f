"""Compare a reward with its auditors: pure functions over audited groups.

The question is whether what the policy is rewarded for is what an independent scorer would want. For one auditor, over
some audited groups::

    value        mean of the auditor's values
    reward       mean reward of the same samples
    gap          mean over the groups of: the auditor's mean over samples with a reward above their group's mean (what
                 the update reinforces), less its mean over the others
    agreement    Spearman's rank correlation of reward and auditor within a group, mean over the groups

A sample counts where it has both a reward and an audit; a group has a gap where its rewards differ, and an agreement
where both differ. Intervals are percentiles (95 %) of bootstrap samples of whole groups.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from plaudit_metrics.statistics.integrity import Estimate, estimate, ups_by_chance
from plaudit_wire.records import ScorerRecord

KEY = "audit/"
"""Prefix of the figures of a step."""
DRIFT_KEY = "drift/"
WAITING = "/waiting"
"""Ending of the key of drawn groups that are still open."""
WINDOW_STEPS = 20
"""The figures of a step are over the audited groups of so many newest steps."""
BLOCKS = 24
"""The trend is over so many of the newest blocks."""
GROUPS_A_BLOCK = 4
MOST_SOURCES = 20
"""So many data sources are tested by themselves: with more, no trend of one of them is unlikely enough."""
ALL_SOURCES = ""
DIVERGES = "diverges"
TREND_STEPS = 1000
"""It looks back no further than so many steps."""
UNLIKELY = 0.01
"""Probability below which a trend is reported."""
_POINTS = 40
_WINDOW_SHARE = 0.25
_FIGURES = ("value", "reward", "gap", "agreement")
_EQUAL = 1e-12
Floats = NDArray[np.float64]


class AuditedSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of an audited group."""

    index: int
    score: float | None
    """The reward that the trainer used; None: it had none."""
    audits: dict[str, ScorerRecord]
    """The auditors' results by their names."""


class AuditedGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """The audits of one group."""

    group: str
    step: int
    data_source: str
    samples: list[AuditedSample]

    @property
    def auditors(self) -> set[str]:
        """Return the names of the scorers that have audited the group."""
        return {name for sample in self.samples for name in sample.audits}


class Rescored(msgspec.Struct, frozen=True):
    """The values that a scorer gave to some samples of the first step when it was asked again after a later one."""

    scorer: str
    step: int
    pairs: list[tuple[float, float]]
    """First value and newest value of each sample that got one again."""
    failed: int
    """Samples that got none."""


class GroupFigures(msgspec.Struct, frozen=True):
    """One audited group as an auditor sees it; NaN where a figure is not defined."""

    group: str
    step: int
    data_source: str
    value: float
    reward: float
    gap: float
    reward_gap: float
    """The same difference in the reward's units."""
    agreement: float


class AuditFigures(msgspec.Struct, frozen=True):
    """One auditor over some groups."""

    groups: int
    failed: int
    """Samples without an audit, because the auditor failed or skipped them."""
    value: Estimate | None
    reward: Estimate | None
    gap: Estimate | None
    agreement: Estimate | None


def group_figures(groups: Iterable[AuditedGroup], auditor: str) -> list[GroupFigures]:
    """Return the figures of each group that the auditor has given a value, in the order of the groups."""
    found = []
    for group in groups:
        pairs = [(reward, value) for _, reward, value in _pairs(group, auditor)]
        if pairs:
            rewards, values = np.array(pairs, dtype=np.float64).T
            found.append(_of_group(group, rewards, values))
    return found


def _pairs(group: AuditedGroup, auditor: str) -> Iterator[tuple[int, float, float]]:
    """Yield index, reward and audit of the samples that have both."""
    for sample in group.samples:
        record = sample.audits.get(auditor)
        if record is not None and record.value is not None and sample.score is not None:
            yield sample.index, sample.score, record.value


def _of_group(group: AuditedGroup, rewards: Floats, values: Floats) -> GroupFigures:
    above = rewards > rewards.mean() + _EQUAL
    differ = above.any() and not above.all()
    gap, reward_gap = (
        float(each[above].mean() - each[~above].mean()) if differ else math.nan for each in (values, rewards)
    )
    return GroupFigures(
        group.group,
        group.step,
        group.data_source,
        float(values.mean()),
        float(rewards.mean()),
        gap,
        reward_gap,
        rank_correlation(rewards, values),
    )


def rank_correlation(x: Floats, y: Floats) -> float:
    """Return Spearman's correlation, Pearson's of the ranks, where equal values share the mean of their ranks.

    It is NaN where one of both has a single value, or none (Spearman, 1904).
    """
    if not len(x):
        return math.nan
    x, y = _ranks(x), _ranks(y)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > _EQUAL else math.nan


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2.0)[place]
    return ranks


def audit_figures(groups: Sequence[AuditedGroup], auditor: str) -> AuditFigures:
    """Return an auditor's figures over some groups, with intervals."""
    found = group_figures(groups, auditor)
    records = [sample.audits[auditor] for group in groups for sample in group.samples if auditor in sample.audits]
    estimates = {name: _estimate([getattr(each, name) for each in found]) for name in _FIGURES}
    return AuditFigures(len(found), sum(record.value is None for record in records), **estimates)


def _estimate(values: Sequence[float]) -> Estimate | None:
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return None
    return estimate(float(known.mean()), len(known), lambda draws: known[draws].mean(axis=1))


def _trends(blocks: Sequence[Sequence[GroupFigures]]) -> Iterator[tuple[int, float]]:
    """Yield the last step of each block from the 24th on, with the probability of its trend if all changed by chance.

    The trend is that the reward rises and the auditor falls, in its mean or its gap; the weaker of the two findings
    counts. Of both falls it is the smaller, doubled because there are two of them (Bonferroni). The first half of the
    newest blocks is compared with the second, block by block, by a sign test: Cox and Stuart 1955, Some Quick Sign
    Tests for Trend in Location and Dispersion (Biometrika 42). Nothing is assumed about the distributions.
    """
    names = ("reward", "value", "gap", "reward_gap")
    reward, value, gap, reward_gap = (
        np.array([_mean([getattr(each, name) for each in block]) for block in blocks]) for name in names
    )
    # Near the top all responses of a group are alike to the reward as well: that alone is no fall.
    relative = gap / reward_gap
    for end in range(BLOCKS, len(blocks) + 1):
        newest = slice(end - BLOCKS, end)
        gap_falls = max(_rises(-gap[newest]), _rises(-relative[newest]))
        falls = min(2 * min(_rises(-value[newest]), gap_falls), 1.0)
        yield blocks[end - 1][-1].step, max(_rises(reward[newest]), falls)


def divergences(figures: Sequence[GroupFigures]) -> dict[str, float]:
    """Return the probability of the newest trend of all groups (``ALL_SOURCES``), and of each source that still occurs.

    A hack of one source is lost among the groups of the others. Empty while there are too few groups for a trend.
    """
    recent = max((each.step for each in figures), default=0) - WINDOW_STEPS
    return {source: found[-1][1] for source, found in _chances(figures, BLOCKS, recent).items()}


def _chances(figures: Sequence[GroupFigures], most_blocks: int, after: int) -> dict[str, list[tuple[int, float]]]:
    """Return steps and probabilities of the trends of all groups, and of each source with groups after a step.

    Those of sources are multiplied by the number of sources (Bonferroni).
    """
    sources: dict[str, list[GroupFigures]] = {}
    for each in figures:
        sources.setdefault(each.data_source, []).append(each)
    tested = [
        source
        for source, part in sources.items()
        if source and BLOCKS * GROUPS_A_BLOCK <= len(part) < len(figures) and max(each.step for each in part) > after
    ]
    tested = sorted(tested, key=lambda source: -len(sources[source]))[:MOST_SOURCES]
    parts = [(ALL_SOURCES, figures, 1), *((source, sources[source], len(tested)) for source in tested)]
    found = {
        source: [(step, min(count * chance, 1.0)) for step, chance in _trends(_blocks(part)[-most_blocks:])]
        for source, part, count in parts
    }
    return {source: chances for source, chances in found.items() if chances}


class Disagreement(msgspec.Struct, frozen=True):
    """A sample that the reward ranks higher among the audited ones than the auditor does."""

    step: int
    group: str
    index: int
    reward: float
    value: float
    ranks: float
    """Its rank by reward less its rank by the auditor, as a share of the samples: -1 to 1."""


def disagreements(groups: Sequence[AuditedGroup], auditor: str, most: int) -> list[Disagreement]:
    """Return the samples that the reward ranks furthest above the auditor, the widest first."""
    found = [(group, *pair) for group in groups for pair in _pairs(group, auditor)]
    if not found:
        return []
    rewards, values = (np.array([each[place] for each in found], dtype=np.float64) for place in (2, 3))
    apart = (_ranks(rewards) - _ranks(values)) / len(found)
    return [
        Disagreement(group.step, group.group, index, reward, value, float(apart[place]))
        for place in np.argsort(-apart, kind="stable")[:most].tolist()
        if apart[place] > 0
        for group, index, reward, value in [found[place]]
    ]


class Point(msgspec.Struct, frozen=True):
    """Both means over the audited groups of some steps, by the last of them."""

    step: int
    reward: Estimate
    value: Estimate


class AuditorReport(msgspec.Struct, frozen=True):
    """What one auditor says of a run."""

    name: str
    groups: int
    early: AuditFigures
    late: AuditFigures
    by_source: dict[str, float]
    """Agreement in the late steps by data source, lowest first."""
    diverges: float | None
    """Probability of the newest trend by chance alone; None with too few audits."""
    diverged_at: int | None
    """The first step after which it was below 1 %; None: never."""
    diverged_sources: dict[str, int]
    """That step of each data source that diverged by itself."""
    curve: list[Point]
    disagreements: list[Disagreement]


Window = tuple[int, int]
"""First and last step."""


def quarters(steps: Iterable[int]) -> tuple[Window, Window]:
    """Return the first and the last quarter of the steps, of which there is at least one; of one both are the same."""
    ordered = sorted(set(steps))
    size = max(1, round(len(ordered) * _WINDOW_SHARE))
    return (ordered[0], ordered[size - 1]), (ordered[-size], ordered[-1])


def auditor_reports(groups: Sequence[AuditedGroup], steps: Iterable[int], most: int) -> list[AuditorReport]:
    """Return the reports of a run's auditors by name; none without audited groups.

    Args:
        groups: the audited groups.
        steps: steps with stored samples, whose quarters are compared.
        most: disagreements of each auditor.
    """
    if not groups:
        return []
    early, late = quarters(steps)
    names = sorted({name for group in groups for name in group.auditors})
    return [_report(name, groups, early, late, most) for name in names]


def _report(name: str, groups: Sequence[AuditedGroup], early: Window, late: Window, most: int) -> AuditorReport:
    def within(window: Window) -> list[AuditedGroup]:
        return [group for group in groups if window[0] <= group.step <= window[1]]

    figures = group_figures(groups, name)
    diverged = {
        source: step
        for source, chances in _chances(figures, len(figures), after=0).items()
        if (step := next((step for step, chance in chances if chance < UNLIKELY), None)) is not None
    }
    return AuditorReport(
        name=name,
        groups=len(figures),
        early=audit_figures(within(early), name),
        late=audit_figures(within(late), name),
        by_source=agreement_by_source(within(late), name),
        diverges=min(divergences(figures).values(), default=None),
        diverged_at=min(diverged.values(), default=None),
        diverged_sources={source: step for source, step in diverged.items() if source != ALL_SOURCES},
        curve=list(_curve(figures)),
        disagreements=disagreements(within(late), name, most),
    )


def _curve(figures: Sequence[GroupFigures]) -> Iterator[Point]:
    """Yield some 40 points or fewer, each over the groups of consecutive steps."""
    steps = sorted({each.step for each in figures})
    size = max(1, min(WINDOW_STEPS, len(steps) // 4), -(-len(steps) // _POINTS))
    ordered = sorted(figures, key=lambda each: each.step)
    for _, some in itertools.groupby(ordered, key=lambda each: bisect.bisect_left(steps, each.step) // size):
        chosen = list(some)
        reward, value = _estimate([each.reward for each in chosen]), _estimate([each.value for each in chosen])
        if reward is not None and value is not None:
            yield Point(chosen[-1].step, reward, value)


def _blocks(figures: Sequence[GroupFigures]) -> list[list[GroupFigures]]:
    blocks: list[list[GroupFigures]] = [[]]
    for each in sorted(figures, key=lambda each: each.step):
        full = len(blocks[-1]) >= GROUPS_A_BLOCK
        if full and blocks[-1][-1].step != each.step:
            blocks.append([])
        blocks[-1].append(each)
    return blocks if len(blocks[-1]) >= GROUPS_A_BLOCK else blocks[:-1]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _rises(series: Floats) -> float:
    """Return the sign test's probability that so many of the later halves are higher by chance; ties do not count."""
    half = len(series) // 2
    changes = series[half:] - series[:half]
    ups, downs = int((changes > _EQUAL).sum()), int((changes < -_EQUAL).sum())
    return ups_by_chance(ups, ups + downs)


def step_figures(
    audits: Sequence[AuditedGroup], auditors: Iterable[str], drawn: Mapping[str, set[str]], step: int
) -> dict[str, float]:
    """Return the figures of a step by their keys (docs/metrics.md).

    Args:
        audits: audited groups of this step and the earlier ones.
        drawn: of each auditor, the groups of the newest steps that it is to score.
        step: the step that has closed.
    """
    newest = [group for group in audits if step - WINDOW_STEPS < group.step <= step]
    figures: dict[str, float] = {}
    for auditor in auditors:
        of_auditor, key = audit_figures(newest, auditor), f"{KEY}{auditor}"
        for name in _FIGURES:
            figures |= _with_bounds(f"{key}/{name}", getattr(of_auditor, name))
        done = {group.group for group in newest if auditor in group.auditors}
        figures[f"{key}/groups"] = float(of_auditor.groups)
        figures[f"{key}/failed"] = float(of_auditor.failed)
        figures[f"{key}{WAITING}"] = float(len(drawn.get(auditor, set()) - done))
        figures |= {f"{key}/source/{source}": value for source, value in agreement_by_source(newest, auditor).items()}
        if found := divergences(group_figures(audits, auditor)):
            figures[f"{key}/{DIVERGES}"] = min(found.values())
            figures |= {f"{key}/{DIVERGES}/{source}": chance for source, chance in found.items() if source}
    return figures


def drift_figures(rescored: Sequence[Rescored], step: int) -> dict[str, float]:
    """Return for each watched scorer how much more it gave when it was asked last, up to that step, by key.

    The mean of newest less first value over the same samples, and its 95 % interval (a bootstrap over the samples).
    """
    newest = {again.scorer: again for again in sorted(rescored, key=lambda each: each.step) if again.step <= step}
    figures: dict[str, float] = {}
    for scorer, again in newest.items():
        key = f"{DRIFT_KEY}{scorer}"
        figures |= {f"{key}/samples": float(len(again.pairs)), f"{key}/failed": float(again.failed)}
        figures |= _with_bounds(f"{key}/value", _estimate([now - first for first, now in again.pairs]))
    return figures


def _with_bounds(key: str, found: Estimate | None) -> dict[str, float]:
    return {} if found is None else {key: found.value, f"{key}_low": found.low, f"{key}_high": found.high}


def agreement_by_source(groups: Sequence[AuditedGroup], auditor: str) -> dict[str, float]:
    """Return the mean rank correlation by data source, lowest first."""
    by_source: dict[str, list[float]] = {}
    for each in group_figures(groups, auditor):
        by_source.setdefault(each.data_source, []).append(each.agreement)
    means = {source: mean for source, values in by_source.items() if not math.isnan(mean := _mean(values))}
    return dict(sorted(means.items(), key=lambda each: each[1]))
