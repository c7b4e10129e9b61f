"""Choose the server for a request from the state of each, kept as plain data; ``pool`` sends the requests.

A server gets requests only after its ``/health`` responded with 200. It is ejected after three failures in a row, or
after one refused connection, and then probed at growing intervals until it is healthy again. Among healthy servers the
one with the fewest requests in flight is next; servers with a failure since their last response come last, so that one
that fails fast does not attract all requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FAILURES_BEFORE_EJECTION = 3
_FIRST_PROBE_S = 0.25
_LONGEST_PROBE_S = 5.0


@dataclass(eq=False)
class Replica:
    """One server. Times are seconds of ``time.monotonic``."""

    url: str
    healthy: bool = False
    outstanding: int = 0
    """Requests in flight."""
    failures: int = 0
    """Failures since its last response."""
    paused_until_s: float = 0.0
    """End of the pause that it asked for with a 429."""
    probe_at_s: float = 0.0
    """Time of the next probe."""
    probe_pause_s: float = _FIRST_PROBE_S


class Replicas:
    """Hold all servers of a scorer."""

    def __init__(self) -> None:
        self._by_url: dict[str, Replica] = {}

    def __len__(self) -> int:
        return len(self._by_url)

    @property
    def any_healthy(self) -> bool:
        """Return True where a request could be sent, now or after a pause."""
        return any(replica.healthy for replica in self._by_url.values())

    def update(self, urls: Iterable[str], *, complete: bool) -> None:
        """Replace the servers by those found; known ones keep their state, and stay if the list is not ``complete``."""
        found = {url: self._by_url.get(url) or Replica(url) for url in urls}
        self._by_url = found if complete else {**self._by_url, **found}

    def pick(self, now_s: float) -> Replica | None:
        """Return the server for the next request; None when all are unhealthy or full."""
        free = [one for one in self._by_url.values() if one.healthy and one.paused_until_s <= now_s]
        return min(free, key=lambda one: (one.failures > 0, one.outstanding), default=None)

    def free_at_s(self) -> float:
        """Return the end of the first pause of a healthy server; infinite when none is healthy."""
        return min((one.paused_until_s for one in self._by_url.values() if one.healthy), default=float("inf"))

    def due(self, now_s: float) -> list[Replica]:
        """Return the servers to probe now."""
        return [one for one in self._by_url.values() if not one.healthy and one.probe_at_s <= now_s]

    def probed(self, replica: Replica, now_s: float, *, healthy: bool) -> None:
        """Record the result of a probe."""
        if healthy:
            replica.healthy, replica.failures, replica.probe_pause_s = True, 0, _FIRST_PROBE_S
            return
        replica.probe_at_s = now_s + replica.probe_pause_s
        replica.probe_pause_s = min(_LONGEST_PROBE_S, 2 * replica.probe_pause_s)

    def answered(self, replica: Replica) -> None:
        """Record a response, which may be a refusal."""
        replica.failures = 0

    def failed(self, replica: Replica, now_s: float) -> None:
        """Record a missing response, or an error of the server."""
        replica.failures += 1
        if replica.failures >= FAILURES_BEFORE_EJECTION:
            self.eject(replica, now_s)

    def eject(self, replica: Replica, now_s: float, pause_s: float = _FIRST_PROBE_S) -> None:
        """Stop requests to it until a probe finds it healthy; the first probe is after ``pause_s``."""
        replica.healthy = False
        replica.probe_at_s = now_s + pause_s

    def full(self, replica: Replica, now_s: float, pause_s: float) -> None:
        """Record that it asked for a pause."""
        replica.failures = 0
        replica.paused_until_s = now_s + pause_s
