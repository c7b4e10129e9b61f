"""Look up why Jobs and StatefulSets lack pods, from their events; called by the reconciler."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from plaudit_operator.observed import Object, Observed
from plaudit_operator.policies.refused_pods import FIRST_LOOK_AFTER_S, REASON_OF_EVENTS, is_overdue, lacking, refusal_of
from plaudit_operator.runtime.kinds import EVENT
from plaudit_operator.runtime.kube import Kube

_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True)
class Look:
    """One look at the events of a job's objects that lack pods.

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


class PodRefusals:
    """Refusals by job. Each look at the events waits twice as long as the one before, from 10 s to 5 minutes.

    The wait may grow because the watch reports every pod that is created at last. Safe to use from several threads.
    """

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._earlier: dict[str, _Earlier] = {}

    def look(self, observed: Observed, now: float) -> Look:
        """Return why the API server refuses pods of a job.

        Raises:
            KubeError: the events cannot be listed.
        """
        without_pods = lacking(observed)
        overdue = [owner for owner in without_pods if is_overdue(owner, now)]
        with self._lock:
            if not overdue:
                self._earlier.pop(observed.uid, None)
                return Look(again_after_s=FIRST_LOOK_AFTER_S if without_pods else None)
            earlier = self._earlier.get(observed.uid)
        if earlier is None or now - earlier.at >= earlier.pause_s:
            pause_s = min(_LONGEST_PAUSE_S, 2 * earlier.pause_s) if earlier else _PAUSE_S
            found = {(o["kind"], o["metadata"]["name"]): self._refusal(observed.namespace, o) for o in overdue}
            earlier = _Earlier(now, pause_s, {key: refusal for key, refusal in found.items() if refusal})
            with self._lock:
                self._earlier[observed.uid] = earlier
        return Look(earlier.refusals, max(1.0, earlier.at + earlier.pause_s - now))

    def forget(self, now: float) -> None:
        """Forget jobs that were not looked at for long: they are gone."""
        with self._lock:
            self._earlier = {uid: e for uid, e in self._earlier.items() if now - e.at < 2 * _LONGEST_PAUSE_S}

    def _refusal(self, namespace: str, owner: Object) -> str:
        fields = f"involvedObject.uid={owner['metadata']['uid']},reason={REASON_OF_EVENTS}"
        return refusal_of(self._kube.list(EVENT, namespace, "", fields)[0])
