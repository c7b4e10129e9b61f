"""Report progress and a summary on standard error: counts by outcome, the mean score, the most frequent reasons."""

from __future__ import annotations

import sys
import time
from collections import Counter

from plaudit_metrics.statistics.failures import without_figures

_REPORT_EVERY_S = 5.0
_MAX_REASONS = 1_000
"""Reasons that are counted; those that differ only in their numbers are one, shown as the first of them."""
_SHOWN_REASONS = 5
_SHOWN_CHARACTERS = 200


class Progress:
    """Count results, print a line every five seconds, and a summary at the end.

    Args:
        total: samples in all, if known.
    """

    def __init__(self, total: int | None = None) -> None:
        self._began_s = self._reported_s = time.monotonic()
        self._total = total
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._first_of: dict[str, str] = {}
        self._sum = 0.0

    def add(self, outcome: str, score: float | None, reason: str | None) -> None:
        """Count one result that was written."""
        self._outcomes[outcome] += 1
        self._sum += score or 0.0
        if reason:
            kind = without_figures(reason)
            if kind in self._reasons or len(self._reasons) < _MAX_REASONS:
                self._reasons[kind] += 1
                self._first_of.setdefault(kind, reason)
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(self._so_far(), file=sys.stderr)

    def summary(self) -> str:
        """Return counts, the mean score and the most frequent reasons, one a line."""
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in self._outcomes.most_common())
        scored = self._outcomes["scored"]
        mean = f"; mean score {self._sum / scored:.4g}" if scored else ""
        lines = [f"{self._so_far()}: {outcomes or 'no samples'}{mean}"]
        for kind, count in self._reasons.most_common(_SHOWN_REASONS):
            text = " ".join(self._first_of[kind].split())
            lines.append(f"  {count:,} × {text[:_SHOWN_CHARACTERS]}{'…' if len(text) > _SHOWN_CHARACTERS else ''}")
        if len(self._reasons) > _SHOWN_REASONS:
            lines.append(f"  and {len(self._reasons) - _SHOWN_REASONS:,} other reasons: see the output")
        return "\n".join(lines)

    def _so_far(self) -> str:
        seconds = time.monotonic() - self._began_s
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._outcomes.total():,}{of} samples in {seconds:.1f} s"
