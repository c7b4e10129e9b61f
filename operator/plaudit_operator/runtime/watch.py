"""Events of the cluster become keys in the queue: one list and watch for each kind, in a thread of its own.

A watch that broke goes on from where it stopped; one that is too old (410) begins with a new list, which takes the
place of all that was known, so that a deletion nobody told of is noticed too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable

from plaudit_operator.cache import Cache, Key
from plaudit_operator.names import SELECTOR
from plaudit_operator.runtime.errors import GoneError, KubeError, NotFoundError
from plaudit_operator.runtime.kinds import OPTIONAL, RLJOB, Kind
from plaudit_operator.runtime.kube import Kube
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_SERVER_ENDS_AFTER_S = 240
_LOOK_FOR_KIND_EVERY_S = 60.0
_LOOK_FOR_CRD_EVERY_S = 2.0
_LONGEST_PAUSE_S = 15.0


class Informer:
    """Keeps the cache right about one kind.

    Args:
        kube: the API server.
        kind: what to watch.
        namespace: where; empty for everywhere.
        cache: is written.
        touched: is told the jobs that something happened to.
    """

    def __init__(
        self, kube: Kube, kind: Kind, namespace: str, cache: Cache, touched: Callable[[Iterable[Key]], None]
    ) -> None:
        self.kind = kind
        self._kube = kube
        self._namespace = namespace
        self._selector = "" if kind == RLJOB else SELECTOR
        self._cache = cache
        self._touched = touched
        self._heard = time.monotonic()
        self._failures = 0
        self.synced = threading.Event()

    @property
    def silent_s(self) -> float:
        """Seconds since the API server was last heard about this kind (an event, a bookmark, a list)."""
        return time.monotonic() - self._heard

    def run(self, stop: threading.Event) -> None:
        """Lists and watches until ``stop`` is set."""
        version = ""
        while not stop.is_set():
            try:
                version = version or self._list()
                version = self._watch(version, stop)
            except GoneError:
                version = ""
            except NotFoundError:
                version = ""
                self._missing(stop)
            except KubeError as error:
                self._failures += 1
                pause = min(_LONGEST_PAUSE_S, 0.1 * 2.0**self._failures) * random.uniform(0.5, 1.0)
                fields = {"kind": self.kind.kind, "error": str(error), "pause_s": round(pause, 2)}
                logger.warning("watch interrupted", **fields)
                stop.wait(pause)

    def _list(self) -> str:
        items, version = self._kube.list(self.kind, self._namespace, self._selector)
        self._hear()
        self._touched(self._cache.replace(self.kind, items))
        self.synced.set()
        return version

    def _watch(self, version: str, stop: threading.Event) -> str:
        timeout_s = int(_SERVER_ENDS_AFTER_S * random.uniform(0.8, 1.0))
        for event in self._kube.watch(self.kind, self._namespace, self._selector, version, timeout_s):
            self._hear()
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._touched(self._cache.update(self.kind, event["type"], event["object"]))
            if stop.is_set():
                break
        self._hear()
        return version

    def _missing(self, stop: threading.Event) -> None:
        """The cluster has no such kind (yet)."""
        self._hear()
        if self.kind in OPTIONAL:
            self._touched(self._cache.replace(self.kind, []))
            self.synced.set()
            stop.wait(_LOOK_FOR_KIND_EVERY_S)
        else:
            fields = {"kind": self.kind.kind}
            logger.warning("the cluster does not know this kind; is the CRD installed?", **fields)
            stop.wait(_LOOK_FOR_CRD_EVERY_S)

    def _hear(self) -> None:
        self._heard = time.monotonic()
        self._failures = 0
