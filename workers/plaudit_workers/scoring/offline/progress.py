"""Report progress and a summary on standard error: counts by outcome, the mean score, the most frequent failures."""

from __future__ import annotations

import sys
import time
from collections import Counter

from plaudit_metrics.statistics.failures import NO_SCORER, FailureCounts
from plaudit_wire.records import Outcome

_REPORT_EVERY_S = 5.0
_SHOWN_FAILURES = 5


class OfflineProgress:
    """Count results, print a line every five seconds, and a summary at the end."""

    def __init__(self, total: int | None = None) -> None:
        self._began_s = self._reported_s = time.monotonic()
        self._total = total
        self._outcomes: Counter[str] = Counter()
        self._failures = FailureCounts()
        self._sum = 0.0

    def add(self, outcome: Outcome, score: float | None, reason: str | None) -> None:
        """Count one result that was written; a reason begins with the name of its scorer."""
        self._outcomes[outcome] += 1
        self._sum += score or 0.0
        if reason:
            scorer, _, text = reason.partition(": ")
            self._failures.add_failure(scorer if text else NO_SCORER, outcome, text or reason)
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(self._so_far(), file=sys.stderr)

    def summary(self) -> str:
        """Return counts, the mean score and the most frequent failures, one a line."""
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in self._outcomes.most_common())
        scored = self._outcomes["scored"]
        mean = f"; mean score {self._sum / scored:.4g}" if scored else ""
        failures = self._failures.failures()
        lines = [f"{self._so_far()}: {outcomes or 'no samples'}{mean}"]
        lines += [f"  {each.count:,} × {each.scorer}: {each.reason}" for each in failures[:_SHOWN_FAILURES]]
        if len(failures) > _SHOWN_FAILURES:
            lines.append(f"  and {len(failures) - _SHOWN_FAILURES} other kinds of failure: see the output")
        return "\n".join(lines)

    def _so_far(self) -> str:
        seconds = time.monotonic() - self._began_s
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._outcomes.total():,}{of} samples in {seconds:.1f} s"
