"""Reconcile one job: observe, plan, apply, report.

Also emits events on an RLJob, as ``kubectl describe`` shows them, and looks up why Jobs and StatefulSets lack pods.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from plaudit_operator import policies
from plaudit_operator.actions import (
    Action,
    Delete,
    EmitEvent,
    Manifest,
    Patch,
    Plan,
    chooses_rollouts,
    earliest,
    hurry,
    with_deletion_costs,
)
from plaudit_operator.attempts import pods_missing, present_attempt
from plaudit_operator.cache import Cache, Key, trimmed
from plaudit_operator.names import FIELD_MANAGER, LABEL_RUN, SELECTOR
from plaudit_operator.observed import Object, Observed, timestamp
from plaudit_operator.planning.apply import ApplyResults, AwaitedError, Overruled, carry_out
from plaudit_operator.planning.plan import PROGRESS_EVERY_S, plan
from plaudit_operator.pod_state import is_leaving
from plaudit_operator.runtime.kinds import CONFIG_MAP, EVENT, POD, REWARD_SERVICE, kind_of
from plaudit_operator.runtime.kube import ApiServer, ConflictError, KubeError, NotFoundError
from plaudit_operator.services import needs_files, referenced, token_secret
from plaudit_operator.settings import OperatorSettings
from plaudit_operator.status.progress import ProgressReader
from plaudit_operator.status.status import failing_status, transitions
from plaudit_wire.backoff import backoff_s
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
_REFUSED_AGAIN_AFTER_S = 8.0
_LOOK_AGAIN_S = 8.0
_ASK_AGAIN_S = 0.5
_AWAITED_S = 1.0
_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0
_SHARED_FOR_S = 2.0
_MOST_CHARACTERS = 1024
"""The API server rejects longer messages."""


@dataclass(frozen=True)
class ReconcileResult:
    """Hold the result of one reconciliation."""

    again_after_s: float | None
    writes: int


class Reconciler:
    """Reconcile jobs; ``clock`` gives seconds since the epoch."""

    def __init__(
        self,
        kube: ApiServer,
        cache: Cache,
        settings: OperatorSettings,
        pool: Executor,
        services: ProgressReader,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._settings = settings
        self._pool = pool
        self._services = services
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        self._refusals = PodRefusals(kube)
        self._overruled = Overruled()

    def reconcile(self, key: Key) -> ReconcileResult:
        """Bring one job closer to its spec; raise ``KubeError`` if a retry is needed."""
        try:
            observed = self._observe(key)
        except KubeError as error:
            self._report_unread(key, error)
            raise
        if observed is None:
            hurried = hurry(self._cache.pods(key))
            for deletion in hurried:
                self._kube.delete(POD, key.namespace, deletion.name, deletion.uid, deletion.grace_s)
            return ReconcileResult(None, len(hurried))
        progress = self._fresh_progress(observed)
        if progress is None:
            return ReconcileResult(_ASK_AGAIN_S, 0)
        observed = replace(observed, progress=progress)
        now = self._clock()
        wanted = plan(observed, self._settings, now)
        # Garbage collection deletes the pods of a job that is being deleted in the foreground.
        leaving = (*observed.pods, *observed.earlier_pods) if is_leaving(observed.job) else observed.earlier_pods
        if chooses_rollouts(observed, wanted.actions):
            busy = self._services.busy(observed.name, observed.namespace)
            wanted = replace(wanted, actions=with_deletion_costs(observed, wanted.actions, busy))
        try:
            actions = wanted.actions if self._may_adopt(observed, wanted.actions) else []
        except KubeError as error:
            self._report_unread(key, error)
            raise
        actions = [action for action in actions if not self._overruled.holds(action, observed, now)]
        outcome = carry_out(self._kube, self._pool, observed, actions, hurry(leaving))
        self._overruled.learn(outcome.applied, now)
        if outcome.refusals or outcome.failed:
            # The planner turns them into conditions.
            seen = replace(observed, refusals=outcome.refusals, failures=outcome.failed)
            wanted = replace(plan(seen, self._settings, now), actions=[])
        # A deletion answers the same whether or not there was an object: look whether it is gone.
        look_s = _LOOK_AGAIN_S if any(isinstance(action, Delete) for action in actions) else None
        reported = self._report(observed, wanted)
        if reported is None:  # the object is gone, as its watch will say
            reported, look_s = 1, _LOOK_AGAIN_S
        return ReconcileResult(earliest(_again(wanted, outcome), look_s), outcome.calls + reported)

    def _may_adopt(self, observed: Observed, actions: Sequence[Action]) -> bool:
        """Return False if the job is being deleted, of which its watch may tell later than of the orphans."""
        if not any(isinstance(action, Patch) and "ownerReferences" in action.body["metadata"] for action in actions):
            return True
        metadata = observed.job["metadata"]
        try:
            present = self._kube.get(kind_of(observed.job["kind"]), observed.namespace, observed.name)["metadata"]
        except NotFoundError:
            return False
        return present["uid"] == metadata["uid"] and "deletionTimestamp" not in present

    def _report_unread(self, key: Key, error: KubeError) -> None:
        """Report that something which a decision needs could not be read."""
        observed = self._cache.observed(key)
        if observed is None or is_leaving(observed.job) or policies.is_managed_elsewhere(observed):
            return
        observed = replace(observed, failures={("API", "server"): str(error)})
        with contextlib.suppress(KubeError):  # the first error is the one to repeat for
            self._report(observed, Plan(failing_status(observed, self._clock())))

    def _observe(self, key: Key) -> Observed | None:
        observed = self._cache.observed(key)
        if observed is None:
            with self._lock:
                self._asked = {uid: at for uid, at in self._asked.items() if self._clock() - at < 60.0}
            self._refusals.forget(self._clock())
            return None
        if policies.is_managed_elsewhere(observed):
            return observed
        source = (observed.job["spec"].get("files") or {}).get("configMap")
        if source and not observed.ended and needs_files(observed):
            with contextlib.suppress(NotFoundError):
                observed = replace(observed, files=self._kube.get(CONFIG_MAP, observed.namespace, source))
        if services := referenced(observed.job):
            keys = (Key(observed.namespace, name, REWARD_SERVICE.kind) for name in services)
            found = {key: service for key in keys if (service := self._cache.find(key)) is not None}
            secrets = {key.name: token_secret(service, self._cache.run_uid(key)) for key, service in found.items()}
            observed = replace(observed, services=secrets)
        if not observed.ended and pods_missing(observed):
            # A late watch event must not turn a disruption of an attempt into a crash.
            pods, _ = self._kube.list(POD, observed.namespace, f"{SELECTOR},{LABEL_RUN}={observed.run}")
            observed = replace(observed, pods=tuple(trimmed(POD, pod) for pod in pods))
        look = Look() if observed.ended else self._refusals.look(observed, self._clock())
        return replace(
            observed,
            refused_pods=look.refusals,
            look_for_refusals_after_s=look.again_after_s,
        )

    def _fresh_progress(self, observed: Observed) -> dict[str, Any] | None:
        """Read the progress of a running job at most every 10 s, and again when an attempt of the trainer has ended.

        Return None while the metrics service takes its time for the last one: it goes with what follows.
        """
        started = observed.status.get("startTime")
        if observed.ended or not started or policies.is_managed_elsewhere(observed):
            return {}
        is_last = present_attempt(observed).verdict not in ("running", "absent")
        now = self._clock()
        with self._lock:
            if not is_last and now - self._asked.get(observed.uid, 0.0) < PROGRESS_EVERY_S * 0.9:
                return {}
            self._asked[observed.uid] = now
        return self._services.read(observed.name, observed.namespace, is_last=is_last)

    def _report(self, observed: Observed, wanted: Plan) -> int | None:
        """Write the status if it changed, then emit events; return the number of writes, None if there is no object."""
        changes = status_changes(observed.status, wanted.status)
        if not changes:
            return 0
        metadata = {key: observed.job["metadata"][key] for key in ("uid", "resourceVersion")}
        body = {"metadata": metadata, "status": changes}
        try:
            self._kube.patch(kind_of(observed.job["kind"]), observed.namespace, observed.name, body, "status")
        except NotFoundError:
            return None
        events = list(transitions(observed.status, wanted.status))
        for event in events:
            try:
                self._kube.create(event_manifest(observed.job, event, self._clock()))
            except KubeError as error:  # not retried
                logger.warning("event not written", reason=event.reason, error=str(error))
        return 1 + len(events)


def status_changes(before: Object, after: Object) -> dict[str, Any]:
    """Return the fields of a status that changed; a null removes a field."""
    changes = {name: value for name, value in after.items() if before.get(name) != value}
    return changes | dict.fromkeys(name for name in before if name not in after)


def _again(wanted: Plan, outcome: ApplyResults) -> float | None:
    real = [error for error in outcome.failures if not isinstance(error, AwaitedError)]
    if real:
        raise next((error for error in real if not isinstance(error, ConflictError)), real[0])
    awaited_s = _AWAITED_S if outcome.failures else None
    return earliest(wanted.requeue_after_s, awaited_s, _REFUSED_AGAIN_AFTER_S if outcome.refusals else None)


def event_manifest(job: Object, event: EmitEvent, now: float) -> Manifest:
    """Return the Event object of an RLJob; ``now`` is in seconds since the epoch."""
    metadata = job["metadata"]
    named = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": job["apiVersion"], "kind": job["kind"], **named},
        "type": event.kind,
        "reason": event.reason,
        "message": event.message[:_MOST_CHARACTERS],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }


@dataclass(frozen=True)
class Look:
    """Hold what one look at the events of a job's objects without pods found."""

    refusals: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Messages by kind and name of the owner; owners without one are left out."""
    again_after_s: float | None = None
    """Until the next look; None if nothing lacks pods."""


@dataclass(frozen=True)
class _Earlier:
    at: float
    looks: int
    pause_s: float
    refusals: Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class _List:
    """Hold the refusals of a namespace, by the uid of the object whose pods were refused."""

    at: float
    refusals: Mapping[str, str]


class PodRefusals:
    """Keep refusals by job. Each look waits twice as long as the one before, from 10 s to 5 minutes.

    The wait may grow because the watch reports every pod that is created at last. Jobs of a namespace share a list of
    events for 2 s: the API server reads all events of the namespace for each, however few it returns. Safe to use from
    several threads.
    """

    def __init__(self, kube: ApiServer) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._earlier: dict[str, _Earlier] = {}
        self._lists: dict[str, _List] = {}

    def look(self, observed: Observed, now: float) -> Look:
        """Return why the API server refuses pods of a job; raise ``KubeError`` if the events cannot be listed."""
        without_pods = policies.lacking(observed)
        overdue = [owner for owner in without_pods if policies.is_overdue(owner, now)]
        with self._lock:
            if not overdue:
                self._earlier.pop(observed.uid, None)
                return Look(again_after_s=policies.FIRST_LOOK_AFTER_S if without_pods else None)
            earlier = self._earlier.get(observed.uid)
        if earlier is None or now - earlier.at >= earlier.pause_s:
            looks = earlier.looks + 1 if earlier else 1
            pause_s = backoff_s(looks, _PAUSE_S, _LONGEST_PAUSE_S)
            events = self._events(observed.namespace, now)
            found = {(o["kind"], o["metadata"]["name"]): events.get(o["metadata"]["uid"], "") for o in overdue}
            earlier = _Earlier(now, looks, pause_s, {key: refusal for key, refusal in found.items() if refusal})
            with self._lock:
                self._earlier[observed.uid] = earlier
        return Look(earlier.refusals, max(1.0, earlier.at + earlier.pause_s - now))

    def forget(self, now: float) -> None:
        """Forget jobs that were not looked at for long: they are gone."""
        with self._lock:
            self._earlier = {uid: e for uid, e in self._earlier.items() if now - e.at < 2 * _LONGEST_PAUSE_S}

    def _events(self, namespace: str, now: float) -> Mapping[str, str]:
        """Return the newest refusal of each object of a namespace that has one, by its uid."""
        with self._lock:
            self._lists = {name: each for name, each in self._lists.items() if now - each.at < _SHARED_FOR_S}
            shared = self._lists.get(namespace)
        if shared is None:
            events: dict[str, list[Object]] = defaultdict(list)
            for event in self._kube.list(EVENT, namespace, "", f"reason={policies.REASON_OF_EVENTS}")[0]:
                events[event["involvedObject"].get("uid", "")].append(event)
            shared = _List(now, {uid: policies.refusal_of(own) for uid, own in events.items()})
            with self._lock:
                self._lists[namespace] = shared
        return shared.refusals
