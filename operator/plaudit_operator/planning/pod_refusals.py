"""Look up why Jobs and StatefulSets lack pods, from their events; called by the reconciler."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from plaudit_operator.observed import Object, Observed
from plaudit_operator.policies.refused_pods import FIRST_LOOK_AFTER_S, REASON_OF_EVENTS, is_overdue, lacking, refusal_of
from plaudit_operator.runtime.kinds import EVENT
from plaudit_operator.runtime.kube import ApiServer

_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0
_SHARED_FOR_S = 2.0


@dataclass(frozen=True)
class Look:
    """Hold what one look at the events of a job's objects without pods found.

    Attributes:
        refusals: messages by kind and name of the owner; owners without one are left out.
        again_after_s: until the next look; None if nothing lacks pods.
    """

    refusals: Mapping[tuple[str, str], str] = field(default_factory=dict)
    again_after_s: float | None = None


@dataclass(frozen=True)
class _Earlier:
    at: float
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
        without_pods = lacking(observed)
        overdue = [owner for owner in without_pods if is_overdue(owner, now)]
        with self._lock:
            if not overdue:
                self._earlier.pop(observed.uid, None)
                return Look(again_after_s=FIRST_LOOK_AFTER_S if without_pods else None)
            earlier = self._earlier.get(observed.uid)
        if earlier is None or now - earlier.at >= earlier.pause_s:
            pause_s = min(_LONGEST_PAUSE_S, 2 * earlier.pause_s) if earlier else _PAUSE_S
            events = self._events(observed.namespace, now)
            found = {(o["kind"], o["metadata"]["name"]): events.get(o["metadata"]["uid"], "") for o in overdue}
            earlier = _Earlier(now, pause_s, {key: refusal for key, refusal in found.items() if refusal})
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
            for event in self._kube.list(EVENT, namespace, "", f"reason={REASON_OF_EVENTS}")[0]:
                events[event["involvedObject"].get("uid", "")].append(event)
            shared = _List(now, {uid: refusal_of(own) for uid, own in events.items()})
            with self._lock:
                self._lists[namespace] = shared
        return shared.refusals
