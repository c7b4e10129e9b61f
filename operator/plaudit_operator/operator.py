"""Run the operator: watches fill the work queue, and workers drain it while this process holds the Lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plaudit_operator.cache import Cache, Key
from plaudit_operator.names import SELECTOR
from plaudit_operator.observed import gpu_seconds
from plaudit_operator.planning.reconcile import Reconciler
from plaudit_operator.runtime.kinds import OWNERS, WATCHED, Kind
from plaudit_operator.runtime.kube import ApiServer, ConflictError, KubeError
from plaudit_operator.runtime.leader import Leader
from plaudit_operator.runtime.loop import Informer, WorkQueue
from plaudit_operator.settings import OperatorSettings
from plaudit_operator.status.progress import ProgressReader
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
_RESYNC_EVERY_S = 600.0
_SILENT_TOO_LONG_S = 300.0
_STUCK_AFTER_S = 120.0
_CALLS_AT_A_TIME = 16
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


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
            Informer(kube, kind, namespace, "" if kind in OWNERS else SELECTOR, self._cache, self._touched)
            for namespace in settings.watch_namespaces or ("",)
            for kind in WATCHED
        ]
        self._turns: dict[int, float] = {}
        """Start of each worker's current reconciliation (monotonic seconds)."""
        self.stop = threading.Event()
        self.lost = False
        self.series = OperatorSeries(self._cache, lambda: self._queue.depth, lambda: self._leader.leads, self._silences)

    def run(self) -> None:
        """Reconcile jobs until ``stop`` is set or the Lease is lost."""
        tasks: list[Callable[[], None]] = [partial(informer.run, self.stop) for informer in self._informers]
        tasks += [self._resync, *(partial(self._work, number) for number in range(self._settings.workers))]
        for task in tasks:
            threading.Thread(target=task, daemon=True).start()
        while not self.stop.is_set() and not all(informer.synced.is_set() for informer in self._informers):
            self.stop.wait(0.05)
        self._leader.run(self.stop, on_start=lambda: self._touched(self._cache.keys()), on_lost=self._lose)
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


class OperatorSeries(Collector):
    """Hold every Prometheus series of the operator; gauges are computed at each scrape.

    ``silences`` returns the seconds since the last event of each watch, by kind.
    """

    def __init__(
        self,
        cache: Cache,
        queue_depth: Callable[[], int],
        leads: Callable[[], bool],
        silences: Callable[[], Mapping[str, float]],
    ) -> None:
        self._cache = cache
        self._queue_depth = queue_depth
        self._leads = leads
        self._silences = silences
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "plaudit_operator_reconcile_seconds",
            "Time of one reconciliation of one RLJob",
            ["result"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        yield GaugeMetricFamily("plaudit_operator_queue_depth", "RLJobs that wait", value=self._queue_depth())
        yield GaugeMetricFamily("plaudit_operator_leader", "1 on the leader, 0 on standbys", value=int(self._leads()))
        ages = GaugeMetricFamily(
            "plaudit_operator_watch_last_event_age_seconds", "Time since the last event of the watch", labels=["kind"]
        )
        for kind, age_s in self._silences().items():
            ages.add_metric([kind], age_s)
        yield ages
        for owner in OWNERS:
            yield from self._states(owner)
        yield from self._costs()

    def _states(self, kind: Kind) -> Iterator[Metric]:
        prefix = f"plaudit_{kind.kind.lower()}"
        info = GaugeMetricFamily(f"{prefix}_info", f"{kind.kind}s", labels=["namespace", "name", "run", "phase"])
        conditions = GaugeMetricFamily(
            f"{prefix}_condition", f"Conditions of {kind.kind}s", labels=["namespace", "name", "type", "status"]
        )
        for job in self._cache.jobs(kind):
            metadata, status = job["metadata"], job.get("status") or {}
            key = [metadata["namespace"], metadata["name"]]
            info.add_metric([*key, str(status.get("run", "")), str(status.get("phase", ""))], 1)
            for condition in status.get("conditions") or []:
                conditions.add_metric([*key, condition["type"], condition["status"]], 1)
        yield info
        yield conditions

    def _costs(self) -> Iterator[Metric]:
        """Yield GPUs and GPU time of each job and role, and what waiting for rewards cost."""
        labels = ["namespace", "name", "run"]
        gpus = GaugeMetricFamily("plaudit_rljob_gpus", "GPUs that pods hold", labels=[*labels, "role"])
        spent = CounterMetricFamily("plaudit_rljob_gpu_seconds", "GPU time", labels=[*labels, "role"])
        waited = CounterMetricFamily(
            "plaudit_rljob_exposed_reward_gpu_seconds", "GPU time that trainers waited for rewards", labels=labels
        )
        for job in (job for kind in OWNERS for job in self._cache.jobs(kind)):
            metadata, status = job["metadata"], job.get("status") or {}
            cost = status.get("cost")
            if not cost:
                continue
            key = [metadata["namespace"], metadata["name"], str(status.get("run", ""))]
            for role in cost["roles"]:
                gpus.add_metric([*key, role["name"]], role["gpus"])
            for name, seconds in gpu_seconds(cost, time.time()).items():
                spent.add_metric([*key, name], seconds)
            waited.add_metric(key, cost["exposedRewardGpuSeconds"])
        yield from (gpus, spent, waited)
