"""Whole runs whose rollouts sleep during updates, as those do that share GPUs with the trainer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.rollout.engines.script import Script
from plaudit_workers.rollout.engines.scripted import ScriptedEngine
from plaudit_workers.stream.group import Group
from plaudit_workers.training.backend.scripted import ScriptedBackend

MakePlan = Callable[..., Any]
HOLDING: set[ScriptedEngine] = set()
"""Engines that hold memory of the GPUs."""


class Sharing(ScriptedEngine):
    """Holds memory from its start, but not while it sleeps."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)

    async def start(self) -> None:
        HOLDING.add(self)

    async def load_weights(self, path: Path, version: PolicyVersion, *switch: Any) -> None:
        HOLDING.add(self)
        await asyncio.sleep(0.01)
        await super().load_weights(path, version, *switch)

    async def sleep(self, *switch: Any) -> None:
        await super().sleep(*switch)
        await asyncio.sleep(0.01)
        HOLDING.discard(self)

    async def close(self) -> None:
        HOLDING.discard(self)


class Alone(ScriptedBackend):
    """Looks for engines that hold memory while it updates."""

    overlaps = 0

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        before = len(HOLDING)
        figures = super().update(groups)
        Alone.overlaps += before + len(HOLDING)
        return figures


@pytest.fixture
def sharing(simulation: Any) -> Any:
    HOLDING.clear()
    Alone.overlaps = 0
    simulation.engine_class, simulation.policy_class = Sharing, Alone
    simulation.update_s = lambda groups: 0.05
    return simulation


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"staleness": 1, "mini_batches": 2},
        {"staleness": 2, "order": "ready", "mini_batches": 4},
        {"validate_every": 2},
    ],
)
async def test_no_rollout_holds_memory_during_an_update(
    sharing: Any, make_plan: MakePlan, plan: dict[str, Any]
) -> None:
    async with sharing.workers(rollouts=2):
        done, _ = await sharing.train(make_plan(steps=4, rollouts_sleep=True, **plan))
    assert done
    assert Alone.overlaps == 0
    assert (sharing.ledger()["trained"], sharing.ledger()["problems"]) == (16, [])
    assert all(step.statistics["timing_s/rollouts_sleep"] > 0 for step in sharing.steps() if step.step)


async def test_without_the_setting_rollouts_hold_memory_during_updates(sharing: Any, make_plan: MakePlan) -> None:
    async with sharing.workers(rollouts=2):
        done, _ = await sharing.train(make_plan(steps=4))
    assert done
    assert Alone.overlaps > 0


async def test_the_next_trainer_wakes_rollouts_that_a_killed_one_left_asleep(sharing: Any, make_plan: MakePlan) -> None:
    plan = make_plan(steps=6, rollouts_sleep=True, checkpoint_every_steps=1)
    chance = random.Random(7)
    async with sharing.workers(rollouts=2):
        for _ in range(4):
            if await sharing.killed(plan, after_s=chance.uniform(0.1, 0.6)):
                break
        done, _ = await sharing.train(plan)
    assert done
    assert Alone.overlaps == 0
    assert sharing.ledger()["problems"] == []
    assert sharing.steps()[-1].step == 6


async def test_a_rollout_that_starts_during_an_update_waits_for_its_end(sharing: Any, make_plan: MakePlan) -> None:
    updating, seen = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def update_s(groups: Sequence[Group]) -> float:
        loop.call_soon_threadsafe(updating.set)
        return 0.5

    sharing.update_s = update_s
    async with sharing.workers(rollouts=1):
        training = asyncio.create_task(sharing.train(make_plan(steps=3, rollouts_sleep=True)))
        await updating.wait()
        sharing._start_worker("rollout-1")
        began = time.monotonic()
        while len(HOLDING) < 2 and not training.done():
            seen.append(len(HOLDING))
            await asyncio.sleep(0.01)
        assert time.monotonic() - began > 0.2
        done, _ = await training
    assert done
    assert Alone.overlaps == 0
