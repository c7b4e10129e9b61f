"""Which server a request goes to: the state of each, as plain data; who asks them is ``scorer``.

A server is asked only after its ``/health`` has said yes, and no longer once it was ejected: after three failures in a
row, or at once when nobody listens. It is then probed, at growing intervals, until it is healthy again. Among healthy
servers the one with the fewest requests in work is next; those with a failure since their last answer come last, so
that one which fails fast does not draw all requests.
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
    """Requests that it works on."""
    failures: int = 0
    """Since its last answer."""
    paused_until_s: float = 0.0
    """It said that it is full."""
    probe_at_s: float = 0.0
    """When to look whether it is healthy again."""
    probe_pause_s: float = _FIRST_PROBE_S


class Replicas:
    """All servers of a scorer."""

    def __init__(self) -> None:
        self._by_url: dict[str, Replica] = {}

    def __len__(self) -> int:
        return len(self._by_url)

    @property
    def any_healthy(self) -> bool:
        """Whether a request could be sent, now or when a pause is over."""
        return any(replica.healthy for replica in self._by_url.values())

    def update(self, urls: Iterable[str], *, complete: bool) -> None:
        """Takes over what was found; known servers keep their state.

        Args:
            urls: of servers.
            complete: there are no others; else the known ones stay as well.
        """
        found = {url: self._by_url.get(url) or Replica(url) for url in urls}
        self._by_url = found if complete else {**self._by_url, **found}

    def pick(self, now_s: float) -> Replica | None:
        """The server for the next request; None when all are away or full."""
        free = [one for one in self._by_url.values() if one.healthy and one.paused_until_s <= now_s]
        return min(free, key=lambda one: (one.failures > 0, one.outstanding), default=None)

    def free_at_s(self) -> float:
        """When the first pause of a healthy server ends; infinite when none is healthy."""
        return min((one.paused_until_s for one in self._by_url.values() if one.healthy), default=float("inf"))

    def due(self, now_s: float) -> list[Replica]:
        """The servers to probe now."""
        return [one for one in self._by_url.values() if not one.healthy and one.probe_at_s <= now_s]

    def probed(self, replica: Replica, now_s: float, *, healthy: bool) -> None:
        """A probe was answered, or not."""
        if healthy:
            replica.healthy, replica.failures, replica.probe_pause_s = True, 0, _FIRST_PROBE_S
            return
        replica.probe_at_s = now_s + replica.probe_pause_s
        replica.probe_pause_s = min(_LONGEST_PROBE_S, 2 * replica.probe_pause_s)

    def answered(self, replica: Replica) -> None:
        """It gave an answer, be it a refusal."""
        replica.failures = 0

    def failed(self, replica: Replica, now_s: float) -> None:
        """It gave none, or an error of its own."""
        replica.failures += 1
        if replica.failures >= FAILURES_BEFORE_EJECTION:
            self.eject(replica, now_s)

    def eject(self, replica: Replica, now_s: float, pause_s: float = _FIRST_PROBE_S) -> None:
        """Takes it out until a probe finds it healthy, first probed after ``pause_s``."""
        replica.healthy = False
        replica.probe_at_s = now_s + pause_s

    def full(self, replica: Replica, now_s: float, pause_s: float) -> None:
        """It asked for a pause."""
        replica.failures = 0
        replica.paused_until_s = now_s + pause_s
