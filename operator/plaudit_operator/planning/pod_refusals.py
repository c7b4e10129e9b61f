"""Look up why Jobs and StatefulSets lack pods, from their events; called by the reconciler."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from plaudit_operator.observed import Object, Observed
from plaudit_operator.policies.refused_pods import LOOK_AGAIN_AFTER_S, REASON_OF_EVENTS, is_overdue, lacking, refusal_of
from plaudit_operator.runtime.kinds import EVENT
from plaudit_operator.runtime.kube import Kube


class PodRefusals:
    """Refusals by job, looked up at most every 10 s. Safe to use from several threads."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Mapping[tuple[str, str], str]]] = {}

    def of(self, observed: Observed, now: float) -> Mapping[tuple[str, str], str]:
        """Return why the API server refuses pods of a job, by kind and name of their owner.

        Raises:
            KubeError: the events cannot be listed.
        """
        overdue = [owner for owner in lacking(observed) if is_overdue(owner, now)]
        with self._lock:
            if not overdue:
                self._known.pop(observed.uid, None)
                return {}
            at, known = self._known.get(observed.uid, (0.0, {}))
        if now - at >= LOOK_AGAIN_AFTER_S:
            known = {(o["kind"], o["metadata"]["name"]): self._refusal(observed.namespace, o) for o in overdue}
            with self._lock:
                self._known[observed.uid] = now, known
        return {key: refusal for key, refusal in known.items() if refusal}

    def _refusal(self, namespace: str, owner: Object) -> str:
        fields = f"involvedObject.uid={owner['metadata']['uid']},reason={REASON_OF_EVENTS}"
        return refusal_of(self._kube.list(EVENT, namespace, "", fields)[0])
