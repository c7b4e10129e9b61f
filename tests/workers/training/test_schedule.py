"""Which prompts may be admitted and which groups may be trained: drawn runs of the pure schedule, and cases by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_workers.training.schedule import (
    GroupInFlight,
    Positions,
    ReadyGroup,
    Schedule,
    TrainerLedger,
    admissible,
    choose,
)
from plaudit_workers.training.step import OpenStep, Over, Retry, Update, Wait

SAMPLES = 4


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    mini_batches = draw(st.integers(1, 4))
    staleness = draw(st.integers(0, 3))
    return Schedule(
        steps=draw(st.integers(1, 6)),
        prompts_per_step=mini_batches * draw(st.integers(1, 3)),
        mini_batches_per_step=mini_batches,
        max_staleness=staleness,
        order=draw(st.sampled_from(["step", "ready"] if staleness else ["step"])),
        max_replaced=draw(st.sampled_from([0, 0, 1, 5])),
    )


@dataclass
class Run:
    """A run without processes: groups become ready, fail or are sampled by newer policies as hypothesis draws it."""

    schedule: Schedule
    data: st.DataObject
    ledger: TrainerLedger = field(default_factory=TrainerLedger)
    ready: list[ReadyGroup] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Step → staleness of each group trained in it."""
    mini_batches: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    """Positions accounted for, in order."""
    replaced: list[int] = field(default_factory=list)
    """Positions dropped for others, in order."""
    steps: dict[int, int] = field(default_factory=dict)
    """Position → the step for which it was admitted."""

    def admit(self, version: int) -> None:
        positions = self.ledger.train
        for position in admissible(self.schedule, version, positions):
            attempt = positions.attempt(position)
            group = f"t-{position}-1.{attempt}"
            step = positions.step_of(self.schedule, position)
            assert self.steps.setdefault(position, step) == step
            self.ledger.admit("train", GroupInFlight(group, position, attempt, step, version))
        assert len(positions.in_flight) <= self.schedule.max_in_flight

    def one_becomes_ready(self, version: int) -> None:
        taken = {group.flight.group for group in self.ready}
        waiting = [flight for flight in self.ledger.train.in_flight.values() if flight.group not in taken]
        waiting = [flight for flight in waiting if flight.group not in self.held]
        assert waiting, "the step waits, but nothing is on its way"
        flight = self.data.draw(st.sampled_from(waiting))
        sampled_by = self.data.draw(st.integers(flight.version, version))
        flight = replace(flight, version=sampled_by)
        self.ledger.train.in_flight[flight.group] = flight
        num_failed = self.data.draw(st.sampled_from([0, 0, 0, 1, SAMPLES]))
        trainable, uniform = num_failed < SAMPLES, self.data.draw(st.booleans())
        self.ready.append(ReadyGroup(flight, SAMPLES, num_failed, trainable=trainable, uniform=uniform and trainable))

    @property
    def held(self) -> set[str]:
        return self._held

    def step(self, step: int) -> None:
        open_step = OpenStep(self.schedule, step)
        self._held: set[str] = set()
        while True:
            self.admit(step - 1)
            self.take(open_step)
            decision = open_step.decide()
            if isinstance(decision, Wait):
                self.one_becomes_ready(step - 1)
            elif isinstance(decision, Update):
                self.mini_batches[step] = self.mini_batches.get(step, 0) + 1
                assert 1 <= len(decision.groups) <= self.schedule.mini_batch_size
                assert all(group.trainable for group in decision.groups)
                for group in decision.groups:
                    self.trained.setdefault(step, []).append(step - 1 - group.flight.version)
                    self.ledger.end(group.flight.group, "trained")
                self.done += [group.flight.position for group in decision.groups]
                open_step.ended(decision.groups)
            elif isinstance(decision, Retry):
                for group in decision.groups:
                    self.ledger.end(group.flight.group, "dropped", "too_many_failed", again=True)
                open_step.returned(decision.groups)
                assert open_step.retries < 50
            else:
                for group in decision.dropped:
                    self.ledger.end(group.flight.group, "dropped", "too_few_scores")
                self.done += [group.flight.position for group in decision.dropped]
                open_step.ended(decision.dropped)
                return
            assert self.ledger.problems() == []

    def take(self, open_step: OpenStep) -> None:
        while self.ready and open_step.batch_slots:
            others = [flight for flight in self.ledger.train.in_flight.values() if flight.group not in self._held]
            chosen = choose(self.schedule, open_step.step, open_step.slots, others, self.ready)[: open_step.batch_slots]
            if not chosen:
                return
            replaced = open_step.replaceable(chosen)
            for group in replaced:
                self.ledger.end(group.flight.group, "dropped", "zero_variance")
            self.replaced += [group.flight.position for group in replaced]
            open_step.replace(replaced)
            if replaced:
                self.ledger.train.add_extras(open_step.step, len(replaced))
            assert open_step.replaced <= self.schedule.max_replaced
            open_step.take([group for group in chosen if group not in replaced])
            self._held |= {group.flight.group for group in chosen}
            self.ready = [group for group in self.ready if group not in chosen]
            self.admit(open_step.step - 1)
            self.ledger = TrainerLedger.restored(self.ledger.snapshot())


@given(schedule=schedules(), data=st.data())
def test_every_prompt_is_accounted_for_exactly_once_and_no_sample_is_too_stale(
    schedule: Schedule, data: st.DataObject
) -> None:
    run = Run(schedule, data)
    for step in range(1, schedule.steps + 1):
        run.step(step)
    assert len(run.done) == schedule.steps * schedule.prompts_per_step
    assert sorted(run.done + run.replaced) == list(range(len(run.done) + len(run.replaced)))
    assert len(run.replaced) <= schedule.steps * schedule.max_replaced
    assert not run.ledger.train.in_flight
    assert all(0 <= staleness <= schedule.max_staleness for of_step in run.trained.values() for staleness in of_step)


@given(schedule=schedules(), data=st.data())
def test_order_step_trains_each_step_on_its_own_prompts(schedule: Schedule, data: st.DataObject) -> None:
    run = Run(replace(schedule, order="step"), data)
    for step in range(1, schedule.steps + 1):
        done_before = len(run.done)
        run.step(step)
        done = run.done[done_before:]
        assert len(done) == schedule.prompts_per_step
        assert {run.steps[position] for position in done} == {step}
        if not schedule.max_replaced:
            assert sorted(done) == list(range((step - 1) * len(done), step * len(done)))


@pytest.mark.parametrize(
    ("staleness", "version", "expected"),
    [(0, 0, 4), (0, 1, 8), (1, 0, 8), (1, 1, 12), (2, 0, 12), (2, 9, 40)],
)
def test_prompts_of_a_step_are_admitted_once_the_version_that_the_schedule_names_is_published(
    staleness: int, version: int, expected: int
) -> None:
    schedule = Schedule(steps=10, prompts_per_step=4, max_staleness=staleness)
    assert schedule.admissible_end(version) == expected


def positions_at(cursor: int, returned: dict[int, int], in_flight: int = 0) -> Positions:
    positions = Positions()
    for position in range(in_flight):
        positions.admit(GroupInFlight(f"t-{position}-1.0", position, 0, 1, 0))
    positions.cursor, positions.returned = cursor, returned
    return positions


def test_prompts_that_were_returned_come_first_and_only_in_their_turn() -> None:
    schedule = Schedule(steps=10, prompts_per_step=4, max_staleness=1)
    assert admissible(schedule, 0, positions_at(6, {2: 1, 9: 1})) == [2, 6, 7]
    assert admissible(schedule, 1, positions_at(10, {2: 1, 9: 1})) == [2, 9, 10, 11]


def test_no_more_groups_are_in_flight_than_the_bound_allows() -> None:
    schedule = Schedule(steps=10, prompts_per_step=2, max_staleness=1)
    assert admissible(schedule, 5, positions_at(3, {}, in_flight=3)) == [3]


def test_a_prompt_that_was_admitted_ahead_of_the_cursor_is_not_admitted_twice() -> None:
    schedule = Schedule(steps=10, prompts_per_step=4)
    positions = positions_at(0, {})
    positions.admit(GroupInFlight("t-2-1.0", 2, 0, 1, 0))
    positions.end("t-2-1.0")
    assert admissible(schedule, 0, positions) == [0, 1, 3]
    for position in (0, 1):
        positions.admit(GroupInFlight(f"t-{position}-2.0", position, 0, 1, 0))
    assert (positions.cursor, positions.ahead) == (3, set())


def test_order_ready_takes_a_younger_group_only_while_the_older_ones_still_fit() -> None:
    schedule = Schedule(steps=10, prompts_per_step=2, max_staleness=1, order="ready")
    old = [GroupInFlight("old-0", 0, 0, 1, 0), GroupInFlight("old-1", 1, 0, 1, 0), GroupInFlight("old-2", 2, 0, 2, 0)]
    young = GroupInFlight("young", 3, 0, 2, 1)
    ready = [ReadyGroup(young, SAMPLES, 0, trainable=True)]
    # Step 1 has two slots and step 2 two more: three old groups leave one slot to the young one.
    assert [group.flight.group for group in choose(schedule, 1, 2, [*old, young], ready)] == ["young"]
    # In step 2 two old groups are at their last chance: the young one has to wait although it alone is ready.
    assert choose(schedule, 2, 2, [*old[1:], young], ready) == []


def ready_group(position: int, num_failed: int = 0) -> ReadyGroup:
    flight = GroupInFlight(f"t-{position}-1.0", position, 0, 1, 0)
    return ReadyGroup(flight, SAMPLES, num_failed, trainable=num_failed < SAMPLES)


def test_a_mini_batch_closes_at_its_size_and_the_last_one_when_no_more_can_come() -> None:
    step = OpenStep(Schedule(steps=1, prompts_per_step=4, mini_batches_per_step=2), 1)
    step.take([ready_group(3)])
    assert step.decide() == Wait()
    step.take([ready_group(1)])
    first = step.decide()
    assert first == Update([ready_group(1), ready_group(3)])
    step.ended(first.groups)
    step.take([ready_group(0), ready_group(2, num_failed=SAMPLES)])
    second = step.decide()
    assert second == Update([ready_group(0)])
    step.ended(second.groups)
    assert step.decide() == Over([ready_group(2, num_failed=SAMPLES)])


def test_a_step_with_too_many_failed_samples_is_not_trained_but_returned() -> None:
    step = OpenStep(Schedule(steps=1, prompts_per_step=2, max_failed_share=0.5), 1)
    groups = [ready_group(0, num_failed=SAMPLES), ready_group(1, num_failed=1)]
    step.take(groups)
    assert step.decide() == Retry(groups, failed_share=5 / 8)
    step.returned(groups)
    assert (step.retries, step.slots, step.decide()) == (1, 2, Wait())
    step.take([ready_group(0), ready_group(1)])
    assert step.decide() == Update([ready_group(0), ready_group(1)])


def test_exactly_the_allowed_share_of_failed_samples_is_still_trained() -> None:
    step = OpenStep(Schedule(steps=1, prompts_per_step=2, max_failed_share=0.5), 1)
    step.take([ready_group(0, num_failed=2), ready_group(1, num_failed=2)])
    assert isinstance(step.decide(), Update)


def test_a_broken_group_that_comes_first_holds_a_mini_batch_back_but_does_not_return_the_step() -> None:
    step = OpenStep(Schedule(steps=1, prompts_per_step=4, mini_batches_per_step=4, max_failed_share=0.4), 1)
    step.take([ready_group(0, num_failed=3)])
    assert step.decide() == Wait()
    for position in (1, 2, 3):
        step.take([ready_group(position)])
        decision = step.decide()
        assert decision == Update([ready_group(position)])
        step.ended(decision.groups)
    last = step.decide()
    assert last == Update([ready_group(0, num_failed=3)])
    step.ended(last.groups)
    assert step.decide() == Over([])


def test_a_ledger_that_was_stored_and_restored_is_the_same_ledger() -> None:
    ledger = TrainerLedger()
    for position in range(4):
        ledger.admit("train", GroupInFlight(f"t-{position}-1.0", position, 0, 1, 0))
    ledger.admit("validation", GroupInFlight("v-0-1.0", 0, 0, 0, 0))
    ledger.end("t-0-1.0", "trained")
    ledger.end("t-1-1.0", "dropped", "poison")
    ledger.roll_back(["t-2-1.0"])
    ledger.end("v-0-1.0", "evaluated")
    restored = TrainerLedger.restored(ledger.snapshot())
    assert restored.snapshot() == ledger.snapshot()
    assert restored.problems() == []
    assert restored.counters() == {
        "admitted": 5,
        "trained": 1,
        "evaluated": 1,
        "dropped": 2,
        "dropped:poison": 1,
        "dropped:rolled_back": 1,
    }
    assert (restored.train.cursor, restored.train.returned) == (4, {2: 1})


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    ledger = TrainerLedger()
    ledger.admit("train", GroupInFlight("t-0-1.0", 0, 0, 1, 0))
    del ledger.train.in_flight["t-0-1.0"]
    (problem,) = ledger.problems()
    assert problem.startswith("1 groups were admitted, but 0 trained")


def test_a_group_that_found_no_room_is_admitted_later_under_the_same_attempt() -> None:
    ledger = TrainerLedger()
    ledger.admit("train", GroupInFlight("t-0-1.0", 0, 0, 1, 0))
    ledger.withdraw("t-0-1.0")
    assert (ledger.counters()["admitted"], ledger.train.returned, ledger.problems()) == (0, {0: 0}, [])
