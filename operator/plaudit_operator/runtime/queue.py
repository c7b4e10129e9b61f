"""Keys that wait for their turn: each at most once, never two workers on one key, failures wait longer each time."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 60.0


class WorkQueue(Generic[K]):
    """Queue keys.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: dict[K, None] = {}
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._later: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._order = itertools.count()
        self._closed = False

    def add(self, key: K) -> None:
        """Queue a key now; if a worker holds it, queue it again once that worker is done."""
        with self._changed:
            if key in self._working:
                self._again.add(key)
            else:
                self._ready.setdefault(key)
            self._changed.notify()

    def add_after(self, key: K, delay_s: float) -> None:
        """Queue a key after ``delay_s``; of several times the earliest applies."""
        due = self._clock() + delay_s
        with self._changed:
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._later, (due, next(self._order), key))
                self._changed.notify()

    def take(self, timeout_s: float | None = None) -> K | None:
        """Return the next key, held until ``done`` or ``failed``; None if the queue is closed, or after the timeout."""
        end = None if timeout_s is None else self._clock() + timeout_s
        with self._changed:
            while True:
                self._move_due()
                if self._closed:
                    return None
                if self._ready:
                    key = next(iter(self._ready))
                    del self._ready[key]
                    self._working.add(key)
                    return key
                wait = self._wait_s(end)
                if wait is not None and wait <= 0 and end is not None and self._clock() >= end:
                    return None
                self._changed.wait(wait)

    def done(self, key: K, again_after_s: float | None = None) -> None:
        """Release a key that was reconciled."""
        with self._changed:
            self._failures.pop(key, None)
            self._end_turn(key)
        if again_after_s is not None:
            self.add_after(key, again_after_s)

    def failed(self, key: K, at_least_s: float = 0.0) -> float:
        """Release a key that failed and queue it again after a pause; return the pause (seconds)."""
        with self._changed:
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
            self._end_turn(key)
        pause: float = max(at_least_s, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(count, 20)))
        self.add_after(key, pause)
        return pause

    def close(self) -> None:
        """Close the queue: every ``take`` returns None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def depth(self) -> int:
        """Return the number of keys that wait for a worker now."""
        with self._changed:
            self._move_due()
            return len(self._ready)

    def _end_turn(self, key: K) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._ready.setdefault(key)
            self._changed.notify()

    def _move_due(self) -> None:
        now = self._clock()
        while self._later and self._later[0][0] <= now:
            due, _, key = heapq.heappop(self._later)
            if self._due.get(key) != due:
                continue  # an earlier time came before
            del self._due[key]
            if key in self._working:
                self._again.add(key)
            else:
                self._ready.setdefault(key)

    def _wait_s(self, end: float | None) -> float | None:
        times = [self._later[0][0]] if self._later else []
        times += [end] if end is not None else []
        return max(0.0, min(times) - self._clock()) if times else None
