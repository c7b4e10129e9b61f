"""Watch the cluster (``Informer``), and queue the keys of what changed (``WorkQueue``).

An informer keeps a store in step with the cluster: one list and watch for each kind, in a thread of its own. A broken
watch resumes after the last event that was stored. If the server no longer has that version (410), a new list replaces
the store's content, so that missed deletions are found too.

In the queue each key waits for its turn: at most once, never on two workers, and longer after each failure.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from plaudit_operator.runtime.kinds import Kind
from plaudit_operator.runtime.kube import ApiServer, GoneError, KubeError, NotFoundError
from plaudit_wire.backoff import backoff_s
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
K = TypeVar("K", bound=Hashable)
K_co = TypeVar("K_co", covariant=True)
_SERVER_ENDS_AFTER_S = 240
_LOOK_FOR_OPTIONAL_KIND_EVERY_S = 60.0
_LOOK_FOR_KIND_EVERY_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 8.0
"""Short: all is well within ten seconds after the API server, or a webhook, is well again."""


class Store(Protocol[K_co]):
    """Receive what informers read. Both methods return the keys that changed."""

    def replace(self, kind: Kind, items: Iterable[Any], namespace: str) -> Iterable[K_co]:
        """Replace all objects of a kind (in a namespace); read ``items`` to their end before changing anything."""

    def update(self, kind: Kind, event: str, item: Any) -> Iterable[K_co]:
        """Store one event (``ADDED``, ``MODIFIED``, ``DELETED``)."""


class Informer(Generic[K]):
    """Keep a store in step with one kind, and call ``changed`` with the keys that changed.

    An empty namespace or label selector watches all.
    """

    def __init__(
        self,
        kube: ApiServer,
        kind: Kind,
        namespace: str,
        selector: str,
        store: Store[K],
        changed: Callable[[Iterable[K]], None],
    ) -> None:
        self.kind = kind
        self._kube = kube
        self._namespace = namespace
        self._selector = selector
        self._store = store
        self._changed = changed
        self._version = ""
        """resourceVersion of the newest event in the store; empty: a list is needed."""
        self._last_contact = time.monotonic()
        self._failures = 0
        self.synced = threading.Event()

    @property
    def silent_s(self) -> float:
        """Return the seconds since the API server last sent an event, a bookmark or a list of this kind."""
        return time.monotonic() - self._last_contact

    def run(self, stop: threading.Event) -> None:
        """List and watch until ``stop`` is set."""
        while not stop.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch(stop)
            except GoneError:
                self._version = ""
            except NotFoundError:
                self._version = ""
                self._wait_for_kind(stop)
            except KubeError as error:
                pause_s = self._pause_s()
                logger.warning("watch interrupted", kind=self.kind.kind, error=str(error), pause_s=round(pause_s, 2))
                stop.wait(pause_s)
            except Exception:  # without this thread the operator would not see this kind again
                self._version = ""
                pause_s = self._pause_s()
                logger.exception("watch crashed, listing again", kind=self.kind.kind, pause_s=round(pause_s, 2))
                stop.wait(pause_s)

    def _list(self) -> None:
        items, version = self._kube.list(self.kind, self._namespace, self._selector)
        keys = self._store.replace(self.kind, items, self._namespace)
        self._record_contact()
        self._version = version
        self._changed(keys)
        self.synced.set()

    def _watch(self, stop: threading.Event) -> None:
        timeout_s = int(_SERVER_ENDS_AFTER_S * random.uniform(0.8, 1.0))
        for event in self._kube.watch(self.kind, self._namespace, self._selector, self._version, timeout_s):
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._changed(self._store.update(self.kind, event["type"], event["object"]))
            self._version = version
            self._record_contact()
            self._failures = 0
            if stop.is_set():
                break
        self._record_contact()
        self._failures = 0

    def _wait_for_kind(self, stop: threading.Event) -> None:
        """Wait a while: the cluster does not serve this kind (yet)."""
        self._record_contact()
        if self.kind.optional:
            self._changed(self._store.replace(self.kind, [], self._namespace))
            self.synced.set()
            stop.wait(_LOOK_FOR_OPTIONAL_KIND_EVERY_S)
        else:
            logger.warning("kind not found, is its CRD installed?", kind=self.kind.kind)
            stop.wait(_LOOK_FOR_KIND_EVERY_S)

    def _pause_s(self) -> float:
        self._failures += 1
        return backoff_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter=(0.5, 1.0))

    def _record_contact(self) -> None:
        self._last_contact = time.monotonic()


class WorkQueue(Generic[K]):
    """Queue keys; ``clock`` gives monotonic seconds."""

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
            self._queue(key)
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
            count = self._failures[key] = self._failures.get(key, 0) + 1
            self._end_turn(key)
        pause = max(at_least_s, backoff_s(count, _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S))
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
            self._queue(key)

    def _queue(self, key: K) -> None:
        if key in self._working:
            self._again.add(key)
        else:
            self._ready.setdefault(key)

    def _wait_s(self, end: float | None) -> float | None:
        times = [self._later[0][0]] if self._later else []
        times += [end] if end is not None else []
        return max(0.0, min(times) - self._clock()) if times else None
