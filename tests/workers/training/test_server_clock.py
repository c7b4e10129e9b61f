"""The trainer's estimate of Redis's clock, while Redis pauses and clocks are set: time never runs backwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.records import REDIS, UNKNOWN, WaitRecord
from plaudit_workers.training import state
from plaudit_workers.training.state import ServerClock
from plaudit_workers.training.step import StepReport

_PAUSE_S = 20.0


class World:
    """A trainer's host and Redis, whose clocks may be set; a question takes its time there and back."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.elapsed_s = 1000.0
        self.server_ahead_s = self.random.uniform(-3600, 3600)
        self.local_ahead_s = 0.0
        self.pausing = False
        self.late_before_s = self.late_after_s = 0.0

    async def ask(self) -> float:
        """Redis's TIME; a paused Redis takes the question before or after its pause."""
        late_s = _PAUSE_S * self.random.random() if self.pausing else 0.0
        self.elapsed_s += self.random.uniform(1e-4, 2e-3) + (late_s if self.random.random() < 0.5 else 0.0)
        self.elapsed_s += self.late_before_s
        server_s = self.server_s
        self.elapsed_s += self.random.uniform(1e-4, 2e-3) + late_s + self.late_after_s
        return server_s

    @property
    def server_s(self) -> float:
        """What Redis would answer now."""
        return 1.7e9 + self.elapsed_s + self.server_ahead_s

    def clock(self, monkeypatch: pytest.MonkeyPatch) -> ServerClock:
        """A clock of this host."""
        own = SimpleNamespace(
            monotonic=lambda: self.elapsed_s, time=lambda: 1.7e9 + self.elapsed_s + self.local_ahead_s
        )
        monkeypatch.setattr(state, "time", own)
        return ServerClock(self.ask)


@given(st.integers(0, 2**32), st.lists(st.sampled_from(["run", "pause", "redis set", "host set", "step"]), max_size=60))
def test_no_interval_is_negative_and_the_steps_add_up_to_the_time_that_passed(seed: int, events: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(_run(World(seed), events, monkeypatch))


async def _run(world: World, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = world.clock(monkeypatch), []
    await clock.synchronise()
    stamps, opened, began = [clock.now()], clock.now(), world.elapsed_s
    for event in [*events, "step"]:
        match event:
            case "redis set":
                world.server_ahead_s += world.random.uniform(-1200, 1200)
            case "host set":
                world.local_ahead_s += world.random.uniform(-1200, 1200)
            case "step":
                steps.append((clock.now() - opened, world.elapsed_s - began))
                set_by_s = clock.settle()
                stamps = [each + set_by_s for each in stamps]
                opened, began = clock.now(), world.elapsed_s
        world.pausing = event == "pause"
        world.elapsed_s += world.random.uniform(0.0, 2.0)
        await clock.synchronise()
        stamps.append(clock.now())
    assert all(earlier <= later for earlier, later in itertools.pairwise(stamps))
    for stamped_s, passed_s in steps:
        assert stamped_s == pytest.approx(passed_s, rel=0.011, abs=0.01)


@given(st.integers(0, 2**32))
def test_a_pause_of_redis_does_not_move_the_clock(seed: int) -> None:
    async def paused() -> None:
        world = World(seed)
        clock = world.clock(monkeypatch)
        await clock.synchronise()
        for pausing in world.random.choices([True, False], k=40):
            world.pausing = pausing
            await clock.synchronise()
            assert clock.now() == pytest.approx(world.server_s, abs=0.01)

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(paused())


def test_a_pause_of_redis_is_an_outage_and_a_busy_trainer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked() -> list[tuple[float, float]]:
        world = World(1)
        clock = world.clock(monkeypatch)
        await clock.synchronise()
        began = clock.now()
        world.late_before_s, world.late_after_s = 5.0, 0.0
        await clock.synchronise()
        world.late_before_s, world.late_after_s = 0.0, 5.0
        await clock.synchronise()
        ((start, end),) = clock.outages(began)
        assert end - start == pytest.approx(5.0, abs=0.1)
        return clock.outages(clock.now())

    assert asyncio.run(asked()) == []


@pytest.mark.parametrize(("late", "reply_s"), [(0, 0.0), (3, 0.0), (5, 0.3)])
def test_a_trainer_that_is_busy_when_most_replies_come_says_nothing_of_redis(
    late: int, reply_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def replies() -> float:
        world = World(1)
        clock = world.clock(monkeypatch)
        await clock.synchronise()
        for number in range(5):
            world.late_after_s = 0.3 if number < late else 0.0
            await clock.synchronise()
        return clock.reply_s(clock.now())

    assert asyncio.run(replies()) == pytest.approx(reply_s, abs=0.01)


async def test_replies_that_a_busy_process_reads_late_are_not_slow() -> None:
    async def ask() -> float:
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - the process is at work, and the reply lies in its socket
        return time.time()

    clock = ServerClock(ask)
    await clock.synchronise()
    assert clock.reply_s(clock.now()) < 0.15


@given(st.integers(0, 2**32), st.one_of(st.floats(-7200, -1.1), st.floats(1.1, 7200)))
def test_a_clock_of_redis_that_was_set_is_followed_at_once_from_the_next_step_on(seed: int, set_by_s: float) -> None:
    async def followed() -> None:
        world = World(seed)
        clock = world.clock(monkeypatch)
        await clock.synchronise()
        world.server_ahead_s += set_by_s
        await clock.synchronise()
        assert clock.set_by_s == pytest.approx(set_by_s, abs=0.01)
        assert clock.settle() == pytest.approx(set_by_s, abs=0.02)
        assert (clock.set_by_s, clock.now()) == (0.0, pytest.approx(world.server_s, abs=0.02))

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(followed())


@given(st.integers(0, 2**32), st.floats(-0.9, 0.9))
def test_a_clock_of_redis_that_is_corrected_a_little_is_followed_without_a_jump_back(seed: int, by_s: float) -> None:
    async def followed() -> None:
        world = World(seed)
        clock = world.clock(monkeypatch)
        await clock.synchronise()
        world.server_ahead_s += by_s
        await clock.synchronise()
        before = clock.now()
        clock.settle()
        assert (clock.set_by_s, clock.now() >= before) == (0.0, True)
        world.elapsed_s += 100
        assert clock.now() == pytest.approx(world.server_s, abs=0.05)

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(followed())


def test_a_report_forgets_the_causes_that_stamps_give_and_keeps_those_that_the_trainer_saw() -> None:
    report = StepReport(1, 0.0, waits=[WaitRecord(1.0, 3.0, ["a"]), WaitRecord(4.0, 5.0, [], REDIS)])
    report.forget_causes()
    assert [(wait.start, wait.end, wait.cause) for wait in report.waits] == [(1.0, 3.0, UNKNOWN), (4.0, 5.0, REDIS)]
