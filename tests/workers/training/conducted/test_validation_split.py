"""Validation runs through the same pipeline, is never trained on, and is told apart."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet
import pytest

from simulated_run import make_plan, positions


@pytest.mark.parametrize("staleness", [0, 1])
async def test_validation_comes_before_the_first_step_every_so_many_steps_and_after_the_last(
    simulation: Any, staleness: int
) -> None:
    plan = make_plan(steps=5, staleness=staleness, validate_every=2)
    async with simulation.workers():
        done, policy = await simulation.train(plan)
    assert done
    assert sorted(position for update in positions(policy) for position in update) == list(range(20))
    steps = {step.step: step.statistics for step in simulation.steps()}
    assert sorted(step for step, figures in steps.items() if "val/held-out/mine" in figures) == [0, 2, 4, 5]
    assert steps[2]["val/held-out/mine"] == steps[2]["val/held-out/reward"] == pytest.approx(2.5)
    assert steps[2]["timing_s/testing"] > 0
    ledger = simulation.ledger()
    assert (ledger["evaluated"], ledger["trained"], ledger["admitted"]) == (24, 20, 44)


async def test_validation_samples_are_of_exactly_the_validated_version(simulation: Any) -> None:
    async with simulation.workers():
        await simulation.train(make_plan(steps=4, staleness=1, validate_every=2))
    for number in (0, 2, 4):
        file = simulation.folder / "samples" / f"step-{number:06d}-i1.parquet"
        rows = [row for row in pyarrow.parquet.read_table(file).to_pylist() if row["split"] == "validation"]
        assert len(rows) == 6
        assert {(row["version_min"], row["version_max"], row["end"]) for row in rows} == {(number, number, "evaluated")}


async def test_validation_does_not_count_as_waiting_for_training_samples(simulation: Any) -> None:
    simulation.slow_s = 0.5
    async with simulation.workers():
        await simulation.train(make_plan(steps=2, validate_every=1))
    for step in simulation.steps()[1:]:
        assert all(not group.startswith("v-") for wait in step.waits for group in wait.awaited)
        assert step.num_samples == 16
        assert step.closed - step.opened == pytest.approx(step.statistics["step_s"])


async def test_validation_samples_without_a_score_do_not_count_as_zero(simulation: Any) -> None:
    simulation.broken_validation = {1, 2}
    async with simulation.workers():
        await simulation.train(make_plan(steps=1, validate_every=5))
    before, after = simulation.steps()
    assert before.statistics["val/held-out/mine"] == pytest.approx((0 + 3 + 4 + 5) / 4)
    assert after.statistics["val/held-out/mine"] == pytest.approx(2.5)


async def test_a_validation_that_was_broken_off_begins_anew(simulation: Any) -> None:
    simulation.slow_s = 1.5
    plan = make_plan(steps=1, validate_every=5)
    async with simulation.workers():
        assert not await simulation.killed(plan, 0.7)
        simulation.slow_s = 0.02
        done, policy = await simulation.train(plan)
    assert done
    assert positions(policy) == [[0, 1, 2, 3]]
    assert [step.step for step in simulation.steps()] == [0, 1]
    assert simulation.steps()[0].statistics["val/held-out/mine"] == pytest.approx(2.5)
    assert simulation.ledger()["problems"] == []
