"""Run the operator: watches fill the work queue, and workers drain it while this process holds the Lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from plaudit_operator.cache import Cache, Key, NamespaceStore
from plaudit_operator.names import SELECTOR
from plaudit_operator.planning.reconcile import Reconciler
from plaudit_operator.runtime.errors import ConflictError, KubeError
from plaudit_operator.runtime.kinds import OWNERS, WATCHED
from plaudit_operator.runtime.kube import ApiServer
from plaudit_operator.runtime.leader import Leader
from plaudit_operator.runtime.queue import WorkQueue
from plaudit_operator.runtime.watch import Informer
from plaudit_operator.series import OperatorSeries
from plaudit_operator.settings import OperatorSettings
from plaudit_operator.status.progress import ProgressReader
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_RESYNC_EVERY_S = 600.0
_SILENT_TOO_LONG_S = 300.0
_STUCK_AFTER_S = 120.0
_CALLS_AT_A_TIME = 16


class Operator:
    """Run one operator process, without its HTTP port."""

    def __init__(self, kube: ApiServer, settings: OperatorSettings, services: ProgressReader) -> None:
        self._settings = settings
        self._cache = Cache()
        self._queue: WorkQueue[Key] = WorkQueue()
        self._pool = ThreadPoolExecutor(_CALLS_AT_A_TIME, thread_name_prefix="call")
        self._reconciler = Reconciler(kube, self._cache, settings, self._pool, services)
        self._leader = Leader(kube, (settings.namespace, settings.lease), settings.identity)
        self._informers = [
            Informer(
                kube,
                kind,
                namespace,
                "" if kind in OWNERS else SELECTOR,
                NamespaceStore(self._cache, namespace),
                self._touched,
            )
            for namespace in settings.watch_namespaces or ("",)
            for kind in WATCHED
        ]
        self._turns: dict[int, float] = {}
        """Start of each worker's current reconciliation (monotonic seconds)."""
        self.stop = threading.Event()
        self.lost = False
        self.series = OperatorSeries(
            self._cache,
            lambda: self._queue.depth,
            lambda: self._leader.leads,
            self._silences,
        )

    def run(self) -> None:
        """Reconcile jobs until ``stop`` is set or the Lease is lost."""
        threads = [
            threading.Thread(target=informer.run, args=(self.stop,), daemon=True) for informer in self._informers
        ]
        threads += [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(self._settings.workers)]
        threads.append(threading.Thread(target=self._resync, daemon=True))
        for thread in threads:
            thread.start()
        while not self.stop.is_set() and not all(informer.synced.is_set() for informer in self._informers):
            self.stop.wait(0.05)
        self._leader.run(self.stop, on_start=self._all_again, on_lost=self._lose)
        self._queue.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def alive(self) -> str:
        """Return why this process should be restarted; empty if it is healthy."""
        silent = [informer.kind.kind for informer in self._informers if informer.silent_s > _SILENT_TOO_LONG_S]
        if silent:
            return f"no watch event for {_SILENT_TOO_LONG_S:.0f} s: {', '.join(silent)}"
        if any(time.monotonic() - began > _STUCK_AFTER_S for began in list(self._turns.values())):
            return f"a worker has spent {_STUCK_AFTER_S:.0f} s on one job"
        return ""

    def ready(self) -> str:
        """Return why this process is not ready; empty if it is."""
        waiting = [informer.kind.kind for informer in self._informers if not informer.synced.is_set()]
        return f"waiting for the first list of {', '.join(waiting)}" if waiting else ""

    def _silences(self) -> dict[str, float]:
        """Return the longest time since the last event of a watch, by kind (seconds)."""
        longest: dict[str, float] = {}
        for informer in self._informers:
            longest[informer.kind.kind] = max(informer.silent_s, longest.get(informer.kind.kind, 0.0))
        return longest

    def _touched(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._queue.add(key)

    def _all_again(self) -> None:
        self._touched(self._cache.keys())

    def _lose(self) -> None:
        self.lost = True
        self.stop.set()

    def _resync(self) -> None:
        """Look at all jobs now and then, one after another: no change has to wait behind thousands of them."""
        while not self.stop.wait(_RESYNC_EVERY_S):
            keys = self._cache.keys()
            for number, key in enumerate(keys):
                self._queue.add_after(key, _RESYNC_EVERY_S * number / len(keys))

    def _work(self, number: int) -> None:
        while (key := self._queue.take()) is not None:
            if not self._leader.leads:
                self._queue.done(key)  # all keys are queued again on election
                continue
            self._turns[number] = time.monotonic()
            self._turn(key)
            self._turns.pop(number)

    def _turn(self, key: Key) -> None:
        began = time.perf_counter()
        try:
            found = self._reconciler.reconcile(key)
            result = "ok" if found.writes else "unchanged"
            self._queue.done(key, found.again_after_s)
        except ConflictError:
            result = "conflict"  # the cache was behind; the event will follow
            self._queue.failed(key)
        except KubeError as error:
            result = "error"
            pause_s = self._queue.failed(key, error.retry_after_s)
            fields = {"error": str(error), "pause_s": round(pause_s, 2)}
            logger.warning("reconcile failed, retrying", namespace=key.namespace, job=key.name, kind=key.kind, **fields)
        except Exception:
            result = "crash"
            self._queue.failed(key, 5.0)
            logger.exception("reconcile crashed", namespace=key.namespace, job=key.name, kind=key.kind)
        self.series.reconcile_seconds.labels(result).observe(time.perf_counter() - began)
