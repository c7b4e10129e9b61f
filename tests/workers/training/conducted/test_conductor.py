"""Whole runs under every schedule: what is trained, when, on what, and what is written down of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

MakePlan = Callable[..., Any]


@pytest.mark.parametrize(
    ("staleness", "mini_batches", "order"),
    [(0, 1, "step"), (0, 4, "step"), (1, 1, "step"), (1, 4, "step"), (2, 4, "step"), (1, 1, "ready"), (2, 4, "ready")],
)
async def test_a_run_trains_every_prompt_once_within_its_staleness(
    simulation: Any, make_plan: MakePlan, positions: Any, staleness: int, mini_batches: int, order: str
) -> None:
    plan = make_plan(steps=5, staleness=staleness, mini_batches=mini_batches, order=order)
    async with simulation.workers():
        done, policy = await simulation.train(plan)
    assert done
    trained = positions(policy)
    assert sorted(position for update in trained for position in update) == list(range(5 * 4))
    assert all(len(update) == 4 // mini_batches for update in trained)
    if order == "step":
        by_step = [sorted(sum(trained[i : i + mini_batches], [])) for i in range(0, len(trained), mini_batches)]
        assert by_step == [list(range(4 * step, 4 * step + 4)) for step in range(5)]
    steps = simulation.steps()
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert all(0 <= step.statistics["reward_pipeline/staleness/max"] <= staleness for step in steps)
    assert simulation.ledger()["trained"] == 20
    assert simulation.ledger()["problems"] == []
