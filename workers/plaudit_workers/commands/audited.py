"""What auditors say of a run, for ``plaudit audit``: their reports as findings, rows and a part of the page.

Text, and a part of the page: both curves with their bands, drawn as SVG without scripts.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from plaudit_metrics.statistics.audits import AuditorReport, Disagreement
from plaudit_metrics.statistics.integrity import Estimate

_WIDTH, _HEIGHT, _MARGIN = 640, 200, 36
_LEFT = 72
"""The x coordinate at which the curves begin; the numbers before them are larger on a phone."""

_FEWEST_GROUPS = 8
"""Audited groups from which an interval means something: of one group a bootstrap gives an interval of no width."""


def auditor_findings(reports: Sequence[AuditorReport]) -> Iterator[str]:
    """Yield a sentence for each figure of an auditor that a person should look at."""
    for each in reports:
        if each.diverged_at is not None:
            steps = "".join(f"; in {source} from step {step}" for source, step in each.diverged_sources.items())
            yield (
                f"the reward rose while auditor {each.name} fell, from step {each.diverged_at} on at the latest "
                f"(chance alone: below 1 %){steps}"
            )
        if each.late.groups < _FEWEST_GROUPS:
            found = f"{each.late.groups}, and {each.late.failed} samples without a value"
            yield f"auditor {each.name} audited too few groups of the late steps for a finding: {found}"
            continue
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
            yield label, interval_or_dash(getattr(each.early, figure)), interval_or_dash(getattr(each.late, figure))
        for source, value in each.by_source.items():
            if len(each.by_source) > 1:
                yield f"agreement with {each.name}, {source}", "", f"{value:.2f}"
        yield f"groups audited by {each.name}", str(each.early.groups), str(each.late.groups)
        yield f"samples without a value of {each.name}", str(each.early.failed), str(each.late.failed)


def interval(estimate: Estimate) -> str:
    """Return an estimate with its interval."""
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def interval_or_dash(estimate: Estimate | None) -> str:
    """Return an estimate with its interval, or a dash where it is not defined."""
    return "-" if estimate is None else interval(estimate)


def disagreement_line(of: Disagreement, auditor: str) -> str:
    """Return one line about a sample on which reward and auditor disagree."""
    place = f"step {of.step} {of.group} [{of.index}]"
    return f"{place}  reward {of.reward:.4g}, {auditor} {of.value:.4g}: {of.ranks:.0%} of the samples higher by reward"


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
        x = _LEFT + (step - steps[0]) / (steps[-1] - steps[0]) * (_WIDTH - _LEFT - _MARGIN)
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
            f"<text class='name{number}' x='{_LEFT + 120 * number}' y='16'>{html.escape(name)}</text>"
        )
    ends = (
        f"<text x='{_LEFT - 6}' y='{_MARGIN}' text-anchor='end'>{high:.2g}</text>"
        f"<text x='{_LEFT - 6}' y='{_HEIGHT - _MARGIN}' text-anchor='end'>{low:.2g}</text>"
        f"<text x='{_LEFT}' y='{_HEIGHT - 8}'>step {steps[0]}</text>"
        f"<text x='{_WIDTH - _MARGIN}' y='{_HEIGHT - 8}' text-anchor='end'>step {steps[-1]}</text>"
    )
    title = f"Mean reward and mean value of {report.name} over the steps, with 95 % intervals"
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{html.escape(title, quote=True)}'>"
        f"{''.join(shapes)}{ends}</svg><figcaption>{html.escape(title)}</figcaption></figure>"
    )
