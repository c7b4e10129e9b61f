"""The state of a client's session: groups that it waits for, results that arrived, acknowledgements. No I/O.

A group is *waiting* from its submission until its results arrive, then *open* until its last result was handled, then
*done*. Redis may lose waiting groups, and an older state of it may bring back done ones: this module detects both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.client.result import Result, results_of
from plaudit_workers.stream.sessions import GroupResult, SampleResult

Acknowledgement = tuple[str, str]
"""A group and the entry of its results."""

_DONE_REMEMBERED = 100_000


class Inbox:
    """Hold the groups of one session, by their ids in the run."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Sample] | None] = {}
        """Groups with their samples; None if an earlier client of the session submitted them."""
        self._arrived: deque[tuple[str, Result, bool]] = deque()  # group, result, True for the group's last
        self._open: dict[str, str] = {}  # group → entry of its results
        self._handled: dict[str, str] = {}
        self._done: dict[str, None] = {}

    @property
    def is_idle(self) -> bool:
        """Return True if no group is open and every result was yielded."""
        return not self.waiting and not self._arrived

    @property
    def num_arrived(self) -> int:
        """Return the number of results that were not yielded yet."""
        return len(self._arrived)

    def submitted(self, group: str, samples: list[Sample]) -> None:
        """Record that the service has a group, from this call or an earlier one; its results may have arrived."""
        if group not in self._open and group not in self._done:
            self.waiting[group] = samples

    def take(self, own_id: str, group: GroupResult) -> None:
        """Take the results of a group; they may arrive more than once."""
        name = group.group
        if name in self._done or name in self._handled:
            self._handled[name] = group.entry
        elif name in self._open:
            self._open[name] = group.entry
        else:
            results = list(results_of(own_id, group))
            self._arrived.extend((name, result, result is results[-1]) for result in results)
            self._open[name] = group.entry
        self.waiting.pop(name, None)

    def next(self) -> tuple[Result, str] | None:
        """Return the next result, and its group if it is the group's last, else ""; None if there is none."""
        if not self._arrived:
            return None
        group, result, is_last = self._arrived.popleft()
        return result, group if is_last else ""

    def handle(self, groups: Iterable[str]) -> None:
        """Mark the results of these groups as handled by the caller."""
        for group in groups:
            if group in self._open:
                self._handled[group] = self._open.pop(group)

    def handle_yielded(self) -> None:
        """Mark all groups whose last result was yielded as handled."""
        held = {group for group, _, _ in self._arrived}
        self.handle([group for group in self._open if group not in held])

    def to_acknowledge(self) -> list[Acknowledgement]:
        """Return the groups that were handled and not acknowledged."""
        return list(self._handled.items())

    def acknowledged(self, what: Sequence[Acknowledgement]) -> None:
        """Record that these groups were acknowledged to Redis."""
        for group, entry in what:
            if self._handled.get(group) == entry:
                del self._handled[group]
            self._done[group] = None
        while len(self._done) > _DONE_REMEMBERED:
            del self._done[next(iter(self._done))]

    def reappeared(self, known: set[str]) -> bool:
        """Return True if Redis still has groups that were acknowledged."""
        return not self._done.keys().isdisjoint(known)

    def lost(self, groups: Iterable[str]) -> dict[str, list[Sample]]:
        """Return the groups, lost by Redis, that this client can submit again; the others end as ``given_up``."""
        again: dict[str, list[Sample]] = {}
        for group in groups:
            if group in self.waiting:
                samples = self.waiting[group]
                if samples is None:
                    self.take(group.split(":", 2)[2], _given_up(group))
                else:
                    again[group] = samples
        return again


def _given_up(group: str) -> GroupResult:
    reason = "Redis has lost it, and this client did not submit it: submit it again"
    return GroupResult(group, "", [SampleResult(ScoringRecord("given_up", reason=reason), 0.0, 0)])
