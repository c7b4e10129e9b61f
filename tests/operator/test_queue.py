"""The work queue: each key once, one worker a key, failures wait."""

from __future__ import annotations

from plaudit_operator.runtime.loop import WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[WorkQueue[str], Clock]:
    clock = Clock()
    return WorkQueue(clock), clock


def test_a_key_that_is_added_often_is_worked_once():
    queue, _ = make()
    for _ in range(3):
        queue.add("a")
    assert queue.take(0) == "a"
    queue.done("a")
    assert queue.take(0) is None


def test_a_key_that_is_added_during_its_turn_comes_again_and_not_before():
    queue, _ = make()
    queue.add("a")
    queue.take(0)
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a")
    assert queue.take(0) == "a"


def test_later_means_not_before_and_the_earliest_of_several():
    queue, clock = make()
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 20)
    clock.now = 4.9
    assert queue.take(0) is None
    clock.now = 5.1
    assert queue.take(0) == "a"
    queue.done("a")
    clock.now = 30
    assert queue.take(0) is None


def test_failures_wait_longer_each_time_and_success_forgets_them():
    queue, clock = make()
    queue.add("a")
    pauses = []
    for _ in range(12):
        clock.now += 1000
        assert queue.take(0) == "a"
        pauses.append(queue.failed("a"))
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60
    clock.now += 1000
    queue.take(0)
    queue.done("a")
    queue.add("a")
    queue.take(0)
    assert queue.failed("a") == pauses[0]


def test_a_server_that_asks_to_wait_is_obeyed():
    queue, _ = make()
    queue.add("a")
    queue.take(0)
    assert queue.failed("a", at_least_s=7) == 7


def test_a_closed_queue_ends_its_workers():
    queue, _ = make()
    queue.add("a")
    queue.close()
    assert queue.take() is None
