"""What a client makes of what Redis tells it: twice, out of an older state, or not at all."""

from __future__ import annotations

from plaudit_wire.records import Sample, ScoringRecord
from plaudit_workers.service.client import Inbox
from plaudit_workers.stream.calls import SubmittedGroup
from plaudit_workers.stream.sessions import GroupResult, SampleResult, encoded_group


def group(name: str, entry: str, n: int = 1) -> GroupResult:
    return GroupResult(
        f"s:a:{name}", entry, [SampleResult(ScoringRecord("scored", float(i)), 0.1, 1) for i in range(n)]
    )


def samples(name: str) -> SubmittedGroup:
    return encoded_group(f"s:a:{name}", [Sample(f"s:a:{name}", 0, "", "", "r")])


def test_results_come_once_and_a_group_is_handled_with_its_last() -> None:
    inbox = Inbox()
    inbox.submitted("s:a:g", samples("g"))
    inbox.take(group("g", "1-1", n=2))
    inbox.take(group("g", "1-1", n=2))
    first, second = inbox.next(), inbox.next()
    assert first is not None
    assert second is not None
    assert (first[0].index, first[1], second[0].index, second[1]) == (0, "", 1, "s:a:g")
    assert inbox.next() is None
    assert inbox.is_idle
    assert inbox.to_acknowledge() == []
    inbox.handle(["s:a:g"])
    assert inbox.to_acknowledge() == [("s:a:g", "1-1")]


def test_a_group_left_in_the_middle_is_not_handled() -> None:
    inbox = Inbox()
    inbox.take(group("g", "1-1", n=2))
    inbox.next()
    inbox.handle_yielded()
    assert inbox.to_acknowledge() == []


def test_an_acknowledged_result_that_reappears_is_acknowledged_again_and_not_yielded() -> None:
    inbox = Inbox()
    inbox.take(group("g", "1-1"))
    inbox.next()
    inbox.handle_yielded()
    inbox.acknowledged(inbox.to_acknowledge())
    assert inbox.reappeared({"s:a:g", "s:a:h"})
    inbox.submitted("s:a:g", samples("g"))  # submitted again to a Redis that had forgotten it
    inbox.take(group("g", "2-1"))
    assert inbox.next() is None
    assert inbox.is_idle
    assert inbox.to_acknowledge() == [("s:a:g", "2-1")]


def test_results_that_are_made_anew_before_they_are_acknowledged_count_by_their_newest_entry() -> None:
    inbox = Inbox()
    inbox.take(group("g", "1-1"))
    inbox.next()
    inbox.take(group("g", "2-1"))  # Redis has lost the first
    inbox.handle_yielded()
    assert inbox.to_acknowledge() == [("s:a:g", "2-1")]


def test_samples_lost_by_redis_are_submitted_again_or_given_up() -> None:
    inbox = Inbox()
    inbox.waiting = {"s:a:old": None}
    inbox.submitted("s:a:new", samples("new"))
    assert inbox.lost(["s:a:old", "s:a:new", "s:a:come meanwhile"]) == {"s:a:new": samples("new")}
    arrived = inbox.next()
    assert arrived is not None
    assert (arrived[0].id, arrived[0].outcome) == ("old", "given_up")
    assert inbox.waiting.keys() == {"s:a:new"}
