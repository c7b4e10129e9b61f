"""Count why samples have no score: each scorer's failures by kind, with the first reason of each kind.

A kind is an outcome and the part of its reason that does not change from sample to sample: the type of an exception
and its line, or the text before the first colon, without its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from plaudit_wire.printable import printable
from plaudit_wire.records import Outcome, ScoringRecord

NO_SCORER = "(no scorer)"
"""Stands for the scorer of samples that ended without one: poison, or given up at their group's deadline."""

_MOST_KINDS = 8
"""Kinds of failure that are kept for each scorer; further ones count as the last."""
_REASON_CHARACTERS = 200
_FOLDER = re.compile(r"\(/[^()]*/(?=[^/()]+:\d+)")
_PLACE = re.compile(r"\([^()]+:\d+[^()]*\)$")
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Failure(msgspec.Struct, frozen=True):
    """Hold one kind of failure of one scorer."""

    scorer: str
    outcome: Outcome
    reason: str
    """Of the first sample that failed so; empty when it has none."""
    count: int
    """Samples that failed so."""

    def __str__(self) -> str:
        """Return ``64 × KeyError: 'answer' (reward.py:2 in compute_score)``."""
        return f"{self.count} × {self.reason or self.outcome}"


class FailureCounts:
    """Count failures by scorer and kind, in bounded memory.

    Attributes:
        unscored: those of the ``samples`` that have no score.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.unscored = 0
        self._reasons: dict[tuple[str, Outcome, str], str] = {}
        self._counts: dict[tuple[str, Outcome, str], int] = {}

    def add(self, scoring: ScoringRecord) -> None:
        """Add one terminal sample. A scorer's failure counts even where the sample has a score without it."""
        self.samples += 1
        self.unscored += not scoring.is_scored
        failed = [(name, record) for name, record in scoring.scorers.items() if record.has_failed]
        for name, record in failed:
            self.add_failure(name, record.outcome, record.reason or "")
        if not scoring.is_scored and not failed:
            self.add_failure(NO_SCORER, scoring.outcome, scoring.reason or "")

    def failures(self) -> list[Failure]:
        """Return every kind of failure, the most frequent first."""
        found = [
            Failure(scorer, outcome, self._reasons[scorer, outcome, kind], count)
            for (scorer, outcome, kind), count in self._counts.items()
        ]
        return sorted(found, key=lambda failure: -failure.count)

    def add_failure(self, scorer: str, outcome: Outcome, reason: str) -> None:
        """Add one failure of a scorer."""
        place = _PLACE.search(reason)
        kind = _NUMBER.sub("#", reason.partition(":")[0][:80]) + (place[0] if place else "")
        key = (scorer, outcome, kind)
        if key not in self._counts:
            of_scorer = [known for known in self._counts if known[0] == scorer]
            if len(of_scorer) >= _MOST_KINDS:
                key = of_scorer[-1]
            else:
                self._reasons[key] = shortened(reason)
        self._counts[key] = self._counts.get(key, 0) + 1


def failure_labels(failures: Iterable[Failure]) -> dict[str, str]:
    """Return a step's labels ``reward_pipeline/scorer/<name>/reasons``: its failures, joined by semicolons."""
    by_scorer: dict[str, list[str]] = {}
    for failure in failures:
        by_scorer.setdefault(failure.scorer, []).append(str(failure))
    return {f"reward_pipeline/scorer/{name}/reasons": "; ".join(texts) for name, texts in sorted(by_scorer.items())}


def shortened(reason: str) -> str:
    """Return a reason as one printable line of at most 200 characters; a user's file is named without its folder."""
    text = _FOLDER.sub("(", printable(" ".join(reason.split())))
    place = _PLACE.search(text)
    if len(text) <= _REASON_CHARACTERS:
        return text
    end = f" {place[0]}" if place else ""
    return text[: _REASON_CHARACTERS - len(end) - 1].rstrip() + "…" + end
