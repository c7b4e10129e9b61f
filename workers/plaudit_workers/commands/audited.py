"""What auditors say of a run, for ``plaudit audit``: figures early and late, the trend, the widest disagreements.

Text, and a part of the page: both curves with their bands, drawn as SVG without scripts.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from plaudit_metrics.sources.audits import audits_file, read_audits
from plaudit_metrics.statistics.audits import (
    WINDOW_STEPS,
    AuditedGroup,
    AuditFigures,
    Disagreement,
    agreement_by_source,
    audit_figures,
    disagreements,
    group_figures,
    trend,
)
from plaudit_metrics.statistics.integrity import Estimate

_UNLIKELY = 0.01
_POINTS = 40
_WIDTH, _HEIGHT, _MARGIN = 640, 200, 36


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
    curve: list[Point]
    disagreements: list[Disagreement]


def auditor_reports(
    files: Sequence[Path], early: tuple[int, int], late: tuple[int, int], most: int
) -> list[AuditorReport]:
    """Return the reports of a run's auditors; none where the files of samples have no audits.

    Args:
        files: of the run's stored samples.
        early: first and last step of the early window; ``late`` likewise.
        most: disagreements of each.
    """
    groups = read_audits(audits_file(path.parent.parent, path) for path in files)
    names = sorted({name for group in groups for name in group.auditors})
    return [_report(name, groups, early, late, most) for name in names]


def _report(
    name: str, groups: Sequence[AuditedGroup], early: tuple[int, int], late: tuple[int, int], most: int
) -> AuditorReport:
    def within(window: tuple[int, int]) -> list[AuditedGroup]:
        return [group for group in groups if window[0] <= group.step <= window[1]]

    figures = group_figures(groups, name)
    steps = sorted({each.step for each in figures})
    trends = [(step, trend([each for each in figures if each.step <= step])) for step in _spread(steps)]
    known = [(step, found.diverges) for step, found in trends if found is not None]
    return AuditorReport(
        name=name,
        groups=len(figures),
        early=audit_figures(within(early), name),
        late=audit_figures(within(late), name),
        by_source=agreement_by_source(within(late), name),
        diverges=known[-1][1] if known else None,
        diverged_at=next((step for step, probability in known if probability < _UNLIKELY), None),
        curve=list(_curve(groups, name, steps)),
        disagreements=disagreements(within(late), name, most),
    )


def _spread(steps: Sequence[int]) -> Sequence[int]:
    """Return some 200 of the steps, the last one included."""
    return steps[:: -max(1, len(steps) // 200)][::-1]


def _curve(groups: Sequence[AuditedGroup], name: str, steps: Sequence[int]) -> Iterator[Point]:
    if not steps:
        return
    size = max(1, min(WINDOW_STEPS, len(steps) // 4), -(-len(steps) // _POINTS))
    for start in range(0, len(steps), size):
        chosen = steps[start : start + size]
        figures = audit_figures([group for group in groups if chosen[0] <= group.step <= chosen[-1]], name)
        if figures.reward is not None and figures.value is not None:
            yield Point(chosen[-1], figures.reward, figures.value)


def auditor_findings(reports: Sequence[AuditorReport]) -> Iterator[str]:
    """Yield a sentence for each figure of an auditor that a person should look at."""
    for each in reports:
        if each.diverged_at is not None:
            yield (
                f"the reward rose while auditor {each.name} fell, from step {each.diverged_at} on at the latest "
                "(chance alone: below 1 %)"
            )
        if (gap := each.late.gap) is not None and gap.high < 0:
            yield f"the update reinforced what auditor {each.name} rejects: gap {interval(gap)}"
        if (agreement := each.late.agreement) is not None and agreement.high < 0:
            yield f"the reward ranks responses against auditor {each.name}: correlation {interval(agreement)}"


def auditor_rows(reports: Sequence[AuditorReport]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table: figure, early, late."""
    for each in reports:
        for label, figure in (
            (f"auditor {each.name}", "value"),
            (f"reward of the samples that {each.name} audited", "reward"),
            (f"gap of {each.name}: reinforced less the others", "gap"),
            (f"agreement of reward and {each.name}", "agreement"),
        ):
            yield label, _or_dash(getattr(each.early, figure)), _or_dash(getattr(each.late, figure))
        for source, value in each.by_source.items():
            if len(each.by_source) > 1:
                yield f"agreement with {each.name}, {source}", "", f"{value:.2f}"
        yield f"groups audited by {each.name}", str(each.early.groups), str(each.late.groups)
        yield f"samples without a value of {each.name}", str(each.early.failed), str(each.late.failed)


def interval(estimate: Estimate) -> str:
    """Return an estimate with its interval."""
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _or_dash(estimate: Estimate | None) -> str:
    return "-" if estimate is None else interval(estimate)


def disagreement_line(of: Disagreement, auditor: str) -> str:
    """Return one line about a sample on which reward and auditor disagree."""
    return f"step {of.step} {of.group} [{of.index}]  reward {of.reward:.4g}, {auditor} {of.value:.4g}"


def auditor_page(reports: Sequence[AuditorReport], responses: Mapping[tuple[str, int], str]) -> str:
    """Return the auditors' part of the page; ``responses`` by group and index, escaped."""
    parts = []
    for each in reports:
        read = "".join(
            f"<details><summary>{html.escape(disagreement_line(of, each.name))}</summary>"
            f"<pre>{responses.get((of.group, of.index), '')}</pre></details>"
            for of in each.disagreements
        )
        parts.append(
            f"<h2>Auditor {html.escape(each.name)}</h2>{curves(each)}"
            f"<h3>Reward and auditor disagree most</h3>{read or '<p>Nowhere.</p>'}"
        )
    return "".join(parts)


def curves(report: AuditorReport) -> str:
    """Return both curves with their bands as an SVG figure; an empty text with fewer than two points."""
    if len(report.curve) < 2:
        return ""
    steps = [point.step for point in report.curve]
    series = {"reward": [point.reward for point in report.curve], report.name: [point.value for point in report.curve]}
    bounds = [bound for of_series in series.values() for each in of_series for bound in (each.low, each.high)]
    low, high = min(bounds), max(max(bounds), min(bounds) + 1e-9)

    def place(step: int, value: float) -> str:
        x = _MARGIN + (step - steps[0]) / (steps[-1] - steps[0]) * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - _MARGIN - (value - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    shapes = []
    for number, (name, estimates) in enumerate(series.items()):
        pairs = list(zip(steps, estimates, strict=True))
        line = " ".join(place(step, each.value) for step, each in pairs)
        band = " ".join(
            [place(step, each.high) for step, each in pairs] + [place(step, each.low) for step, each in reversed(pairs)]
        )
        shapes.append(
            f"<polygon class='band{number}' points='{band}'/><polyline class='line{number}' points='{line}'/>"
            f"<text class='name{number}' x='{_MARGIN + 120 * number}' y='16'>{html.escape(name)}</text>"
        )
    ends = (
        f"<text x='2' y='{_MARGIN}'>{high:.2g}</text><text x='2' y='{_HEIGHT - _MARGIN}'>{low:.2g}</text>"
        f"<text x='{_MARGIN}' y='{_HEIGHT - 8}'>step {steps[0]}</text>"
        f"<text x='{_WIDTH - _MARGIN}' y='{_HEIGHT - 8}' text-anchor='end'>step {steps[-1]}</text>"
    )
    title = f"Mean reward and mean value of {report.name} over the steps, with 95 % intervals"
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{html.escape(title, quote=True)}'>"
        f"{''.join(shapes)}{ends}</svg><figcaption>{html.escape(title)}</figcaption></figure>"
    )
