"""Count each scorer's unfinished calls, with the age of the oldest: a hanging scorer never finishes one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from plaudit_wire.records import ScorerWork


class CallsInFlight:
    """Count the unfinished calls of a pipeline's scorers."""

    def __init__(self, scorers: Iterable[str] = ()) -> None:
        self._began: dict[str, dict[object, float]] = {scorer: {} for scorer in scorers}
        """Scorer → calls in the order in which they began (monotonic seconds)."""

    @contextlib.contextmanager
    def call(self, scorer: str) -> Iterator[None]:
        """Count one call, with its waits and retries, until the context ends."""
        calls = self._began.setdefault(scorer, {})
        token = object()
        calls[token] = time.monotonic()
        try:
            yield
        finally:
            del calls[token]

    def work(self) -> dict[str, ScorerWork]:
        """Return the work of each scorer."""
        now = time.monotonic()
        return {
            scorer: ScorerWork(len(calls), now - next(iter(calls.values())) if calls else 0.0)
            for scorer, calls in self._began.items()
        }
