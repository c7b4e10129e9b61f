"""The prompts of a run that skips what it has solved: they depend on its results, not on speed, also after a resume."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from plaudit_job.spec.rollout import SkipSolvedSpec
from plaudit_workers.training.schedule import GroupInFlight, Positions, Schedule
from plaudit_workers.training.state import PromptOrder

STEPS = 12


class Rows:
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def row_at(self, position: int) -> int:
        """Another order in every epoch."""
        epoch, place = divmod(position, self._num_rows)
        return Random(epoch).sample(range(self._num_rows), self._num_rows)[place]


@dataclass
class Run:
    """A run with ``order: step``: prompts of step s are admitted once version s - 1 - k is published."""

    schedule: Schedule
    rule: SkipSolvedSpec | None
    source: Rows
    learns_at: list[int]
    """Row → the step from which on the policy solves it."""
    speed: Random
    order: PromptOrder = field(init=False)
    positions: Positions = field(default_factory=Positions)
    version: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    """Position → row."""

    def __post_init__(self) -> None:
        self.order = PromptOrder(self.rule, self.schedule.max_staleness)

    def step(self) -> None:
        """Admit what the schedule allows, then end the groups of the next step in any order."""
        for position in range(self.positions.cursor, self.schedule.admissible_end(self.version)):
            self.admit(position)
        step = self.version + 1
        of_step = [position for position in self.rows if self.schedule.step_of(position) == step]
        self.speed.shuffle(of_step)
        for position in of_step:
            solved = step >= self.learns_at[self.rows[position]]
            self.order.record(position, step, 1.0 if solved else 0.5, self.source)
            self.positions.end(str(position))
        self.version = step

    def admit(self, position: int) -> None:
        place = self.order.place(position, self.schedule.step_of, self.source)
        self.rows[position] = self.source.row_at(place)
        self.positions.admit(GroupInFlight(str(position), position, 0, self.schedule.step_of(position), 0))

    def resumed(self) -> Run:
        """The run as a new trainer continues it from a checkpoint of this moment."""
        self.order.forget_ended(self.positions)
        snapshot = json.loads(json.dumps([self.order.snapshot(), self.positions.snapshot()]))
        positions = Positions.restored(snapshot[1])
        again = Run(self.schedule, self.rule, self.source, self.learns_at, self.speed, positions, self.version)
        again.order.restore(snapshot[0], positions)
        again.rows = dict(self.rows)
        return again


runs = st.builds(
    lambda prompts, staleness, visits, learns_at, seed: (
        Schedule(STEPS, prompts, max_staleness=staleness),
        SkipSolvedSpec(min_visits=visits),
        learns_at,
        seed,
    ),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, STEPS + 1), min_size=1, max_size=12),
    st.integers(0, 99),
)


@given(runs, st.sets(st.integers(1, STEPS)), st.integers(100, 199))
def test_the_prompts_are_the_same_at_any_speed_and_after_any_resume(given_run, resumes, other_seed):
    schedule, rule, learns_at, seed = given_run
    through = Run(schedule, rule, Rows(len(learns_at)), learns_at, Random(seed))
    resumed = Run(schedule, rule, Rows(len(learns_at)), learns_at, Random(other_seed))
    for step in range(1, STEPS + 1):
        through.step()
        resumed.step()
        if step in resumes:
            resumed = resumed.resumed()
    assert resumed.rows == through.rows
    assert len(resumed.rows) == STEPS * schedule.prompts_per_step


@given(runs)
def test_exactly_the_rows_that_were_always_solved_are_skipped(given_run):
    schedule, rule, learns_at, seed = given_run
    source = Rows(len(learns_at))
    run = Run(schedule, rule, source, learns_at, Random(seed))
    for _ in range(STEPS):
        run.step()
    place = 0
    for position in range(STEPS * schedule.prompts_per_step):
        known = schedule.step_of(position) - 1 - schedule.max_staleness

        def is_solved(row, known=known):
            steps = [schedule.step_of(other) for other, own in run.rows.items() if own == row]
            steps = [step for step in steps if step <= known]
            return len(steps) >= rule.min_visits and all(step >= learns_at[row] for step in steps)

        if not all(is_solved(row) for row in range(len(learns_at))):
            while is_solved(source.row_at(place)):
                place += 1
        assert run.rows[position] == source.row_at(place)
        place += 1


def test_without_a_rule_every_position_is_its_own_place():
    order = PromptOrder()
    order.record(3, 1, 1.0, Rows(5))
    assert [order.place(position, lambda _: 9, Rows(5)) for position in (0, 7, 3)] == [0, 7, 3]
    assert (order.snapshot(), order.num_solved) == (None, 0)


def test_a_run_that_begins_to_skip_after_a_resume_continues_behind_what_was_admitted():
    positions = Positions()
    for position in range(4):
        positions.admit(GroupInFlight(str(position), position, 0, 1, 0))
    order = PromptOrder(SkipSolvedSpec(min_visits=1))
    order.restore(None, positions)
    schedule = Schedule(9, 4)
    assert [order.place(position, schedule.step_of, Rows(3)) for position in (2, 4, 5)] == [2, 4, 5]


def test_another_runs_checkpoint_gives_its_places_without_its_results():
    schedule, rule = Schedule(9, 2), SkipSolvedSpec(min_visits=1)
    other = Run(schedule, rule, Rows(4), [1, 1, 99, 99], Random(0))
    for _ in range(3):
        other.step()
    assert other.order.num_solved > 0
    order = PromptOrder(rule)
    order.restore(other.order.snapshot(), other.positions, with_results=False)
    assert order.num_solved == 0
    assert order.place(5, schedule.step_of, Rows(4)) == other.order.place(5, schedule.step_of, Rows(4))
