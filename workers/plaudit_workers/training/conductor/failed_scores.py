"""Summarize why samples have no score: the reasons by kind, with counts. Pure; called by ``step_training``."""

from __future__ import annotations

import os.path
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from plaudit_wire.records import Outcome
from plaudit_workers.stream.group import Group, GroupSample

_MOST_KINDS = 3
_LONGEST_REASON = 160
_PLACE = re.compile(r"\((?P<file>[^()]*):(?P<line>\d+) in [^()]*\)$")
_NOT_PUBLISHED = "the sample was never published"


@dataclass(frozen=True)
class FailedKind:
    """Failed samples of the same outcome, scorer and kind of error."""

    outcome: Outcome
    scorer: str
    """Empty where no scorer is to blame, such as for ``poison`` or ``given_up``."""
    count: int
    reason: str
    """The most frequent reason, on one line."""

    def __str__(self) -> str:
        """``mine: 64 × KeyError: 'answer' (reward.py:2)``; outcomes other than ``data_error`` are named."""
        outcome = "" if self.outcome == "data_error" else f"{self.outcome}, "
        scorer = f"{self.scorer}: " if self.scorer else ""
        return f"{scorer}{self.count} × {outcome}{self.reason}"


def has_failed(sample: GroupSample) -> bool:
    """Return True if scoring the sample failed. A sample that its scorers skipped on purpose did not fail."""
    return sample.scoring is None or (sample.scoring.value is None and sample.scoring.outcome != "skipped")


def failed_kinds(groups: Sequence[Group]) -> list[FailedKind]:
    """Count the failed samples of the groups by kind, the most frequent kind first.

    Samples are of one kind if outcome, scorer and the reason up to its first colon (the exception's class) agree.
    """
    reasons: defaultdict[tuple[Outcome, str, str], Counter[str]] = defaultdict(Counter)
    for group in groups:
        for sample in filter(has_failed, group.samples):
            outcome, scorer, reason = _reason(sample)
            reasons[outcome, scorer, reason.partition(":")[0]][reason] += 1
    kinds = [
        FailedKind(outcome, scorer, counts.total(), counts.most_common(1)[0][0])
        for (outcome, scorer, _), counts in reasons.items()
    ]
    return sorted(kinds, key=lambda kind: -kind.count)


def describe(kinds: Sequence[FailedKind]) -> str:
    """Return the most frequent kinds as one line for people."""
    shown = "; ".join(map(str, kinds[:_MOST_KINDS]))
    others = sum(kind.count for kind in kinds[_MOST_KINDS:])
    return f"{shown}; {others} × other reasons" if others else shown


def _reason(sample: GroupSample) -> tuple[Outcome, str, str]:
    scoring = sample.scoring
    if scoring is None:
        return "given_up", "", _NOT_PUBLISHED
    reason = scoring.reason or "no reason recorded"
    scorer, _, rest = reason.partition(": ")
    # The pipeline puts the name of the scorer that decided in front of the reason.
    if scorer in scoring.scorers:
        return scoring.outcome, scorer, _one_line(rest)
    return scoring.outcome, "", _one_line(reason)


def _one_line(reason: str) -> str:
    line = " ".join(reason.split())
    place = _PLACE.search(line)
    if place is None:
        return line[:_LONGEST_REASON]
    text = line[: place.start()].rstrip()[:_LONGEST_REASON]
    return f"{text} ({os.path.basename(place['file'])}:{place['line']})"
