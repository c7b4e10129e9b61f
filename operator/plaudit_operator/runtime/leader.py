"""Leader election: one operator holds a Lease and renews it, the others stand by.

A standby measures with its own clock how long the Lease has not changed, so clocks need not agree. A leader that cannot
renew stops before another may start; on shutdown it releases the Lease, so that the next one starts at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from plaudit_operator.runtime.kinds import LEASE
from plaudit_operator.runtime.kube import AlreadyExistsError, ApiServer, ConflictError, KubeError, NotFoundError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
DURATION_S = 15
_RENEW_EVERY_S = 2.0
_GIVE_UP_AFTER_S = 10.0


class Leader:
    """Hold the Lease of this namespace and name, one for each release of the chart, or compete for it."""

    def __init__(
        self, kube: ApiServer, lease: tuple[str, str], identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._namespace, self._name = lease
        self._identity = identity
        self._clock = clock
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None

    @property
    def leads(self) -> bool:
        """Return True while this operator is the leader: it renewed the Lease recently."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < _GIVE_UP_AFTER_S

    def run(self, stop: threading.Event, on_start: Callable[[], None], on_lost: Callable[[], None]) -> None:
        """Compete until ``stop`` is set or the Lease is lost; then release it."""
        led = False
        while not stop.is_set():
            self.step()
            if self.leads and not led:
                led = True
                logger.info("elected leader", identity=self._identity)
                on_start()
            elif led and not self.leads:
                logger.error("lost the lease", identity=self._identity)
                on_lost()
                return
            stop.wait(_RENEW_EVERY_S)
        self.release()

    def step(self) -> None:
        """Acquire or renew the Lease if possible."""
        began = self._clock()
        try:
            if self._acquire():
                self._renewed_at = began
        except (ConflictError, AlreadyExistsError):
            return  # another operator was faster
        except KubeError as error:
            logger.warning("lease not renewed", error=str(error))

    def _acquire(self) -> bool:
        try:
            lease = self._kube.get(LEASE, self._namespace, self._name)
        except NotFoundError:
            head = {"apiVersion": LEASE.api_version, "kind": LEASE.kind}
            metadata = {"name": self._name, "namespace": self._namespace}
            self._kube.create({**head, "metadata": metadata, "spec": self._held({}, renewal=False)})
            return True
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity", "")
        if holder not in ("", self._identity) and not self._expired(spec):
            return False
        self._write(lease, self._held(spec, renewal=holder == self._identity))
        return True

    def _expired(self, spec: dict[str, Any]) -> bool:
        state = (spec.get("holderIdentity"), spec.get("renewTime"))
        if state != self._seen:
            self._seen, self._seen_at = state, self._clock()
            return False
        return self._clock() - self._seen_at > float(spec.get("leaseDurationSeconds") or DURATION_S)

    def release(self) -> None:
        """Release the Lease."""
        if self._renewed_at is None:
            return
        self._renewed_at = None
        try:
            lease = self._kube.get(LEASE, self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                self._write(lease, {"holderIdentity": "", "renewTime": _now()})
        except KubeError as error:
            logger.warning("lease not released", error=str(error))

    def _held(self, before: dict[str, Any], *, renewal: bool) -> dict[str, Any]:
        held = {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_S, "renewTime": _now()}
        if not renewal:
            held |= {"acquireTime": _now(), "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1}
        return held

    def _write(self, lease: dict[str, Any], spec: dict[str, Any]) -> None:
        metadata = {"resourceVersion": lease["metadata"]["resourceVersion"]}
        self._kube.patch(LEASE, self._namespace, self._name, {"metadata": metadata, "spec": spec})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
