"""The room of a token, in virtual time: another's sample waits for seconds, and no worker runs out of work."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.records import ScoringRecord
from plaudit_workers.service.callers import FairRoom
from plaudit_workers.stream.sessions import GroupResult, SampleResult

START = 1000.0


def scored(seconds: float, call_s: float) -> GroupResult:
    return GroupResult("s:x:1", "1-0", [SampleResult(ScoringRecord("scored", 1.0, call_s=call_s), seconds, 1)])


def simulated(room: FairRoom, servers: int, call_s: float, until_s: float) -> tuple[list[tuple[float, float]], float]:
    """Keep a room full before workers that take samples in their order.

    Returns (time, seconds of waiting) of each sample, and the share of the time in which the workers were busy.
    """
    free, work, ended = [START] * servers, list[tuple[float, float]](), list[tuple[float, float]]()
    heapq.heapify(free)
    now, busy = START, 0.0
    while now < START + until_s:
        while len(work) < room.size:
            begins = max(now, heapq.heappop(free))
            heapq.heappush(free, begins + call_s)
            heapq.heappush(work, (begins + call_s, now))
        room.is_used_up = True
        now, submitted = heapq.heappop(work)
        busy += call_s
        ended.append((submitted, now - submitted - call_s))
        room.note(scored(now - submitted, call_s), now)
    return ended, busy / (servers * (now - START))


@pytest.mark.long
@given(st.integers(1, 64), st.floats(0.01, 20), st.integers(0, 3))
def test_the_wait_falls_to_seconds_and_workers_stay_busy(servers, call_s, spare):
    """However few processes stand behind the slots for which the room was made."""
    most = 2 * max(servers * 2**spare, 8)
    turnover_s = most / servers * call_s
    ended, busy = simulated(FairRoom(most, START), servers, call_s, 30 * turnover_s + 60)
    late = [wait for submitted, wait in ended if submitted > START + 15 * turnover_s + 30]
    longest_call = max(call_s, 8 / servers * call_s)
    assert max(late) <= 3.0 + 2 * longest_call
    assert busy > 0.85


@pytest.mark.parametrize("most", [256, 2048])
def test_a_service_with_a_worker_for_each_slot_is_filled(most):
    """A judge of 10 s: no sample waits, so the room grows to what the workers take."""
    room = FairRoom(most, START)
    simulated(room, servers=most, call_s=10.0, until_s=60)
    assert room.size == most


def test_the_samples_of_before_do_not_count():
    room = FairRoom(64, START)
    for number in itertools.count():
        room.note(scored(9.0, 0.0), START + 10 + number / 100)
        if room.size < 32:
            break
    size, set_at = room.size, START + 10 + number / 100
    for number in range(500):  # submitted before it was set
        room.note(scored(9.0, 0.0), set_at + number / 100)
    assert room.size == size == 8
