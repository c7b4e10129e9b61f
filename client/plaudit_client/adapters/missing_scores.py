"""Warn about samples without a score, in the log of the trainer's process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from plaudit_client.result import Result

_LOG = logging.getLogger("plaudit_client")
_QUIET_S = 60.0


class MissingScores:
    """Warn about samples without a score, at most once a minute for each outcome. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._warned_at: dict[str, float] = {}
        self._since: dict[str, int] = {}

    def note(self, result: Result) -> None:
        """Count a sample, and warn if it has no score and its outcome's last warning is a minute old."""
        if result.score is not None:
            return
        outcome, now = result.outcome, self._clock()
        with self._lock:
            count = self._since.get(outcome, 0) + 1
            last = self._warned_at.get(outcome)
            silent = last is not None and now - last < _QUIET_S
            self._since[outcome] = count if silent else 0
            if silent:
                return
            self._warned_at[outcome] = now
        reason = result.reason or "no reason given"
        more = f" ({count - 1} more since the last warning of this outcome)" if count > 1 else ""
        _LOG.warning("sample %s has no score: %s: %s%s", result.id, outcome, reason, more)


_OF_THIS_PROCESS = MissingScores()


def note(result: Result) -> Result:
    """Warn about a result without a score, at most once a minute for each outcome; return the result."""
    _OF_THIS_PROCESS.note(result)
    return result
