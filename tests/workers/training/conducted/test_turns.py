"""Whole runs whose rollouts and model servers sleep during updates, as those do that share GPUs with the trainer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.launch.served_models import ServerTurns
from plaudit_workers.rollout.scripted import Script, ScriptedEngine
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.scripted import ScriptedBackend
from plaudit_workers.training.turns import Turns
from scripted_server import OK, Reply, ScriptedServer
from simulated_run import make_plan

TURNS = "plaudit_workers.training.turns"
HOLDING: set[Any] = set()
"""Engines and servers that hold memory of the GPUs."""
WAKING: set[Any] = set()
"""Engines that take it at this moment."""


class Sharing(ScriptedEngine):
    """Holds memory from its start, but not while it sleeps."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)

    async def start(self) -> None:
        HOLDING.add(self)

    disturbed = 0
    load_s = 0.01

    async def load_weights(self, path: Path, version: PolicyVersion, *switch: Any) -> None:
        HOLDING.add(self)
        WAKING.add(self)
        await asyncio.sleep(random.uniform(0, self.load_s))
        await super().load_weights(path, version, *switch)
        WAKING.discard(self)

    async def sleep(self, *switch: Any) -> None:
        await super().sleep(*switch)
        Sharing.disturbed += bool(WAKING)
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
    WAKING.clear()
    Alone.overlaps, Sharing.disturbed, Sharing.load_s = 0, 0, 0.01
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
async def test_no_rollout_holds_memory_during_an_update(sharing: Any, plan: dict[str, Any]) -> None:
    async with sharing.workers(rollouts=2):
        done, _ = await sharing.train(make_plan(steps=4, rollouts_sleep=True, **plan))
    assert done
    assert Alone.overlaps == 0
    assert (sharing.ledger()["trained"], sharing.ledger()["problems"]) == (16, [])
    assert all(step.statistics["timing_s/wait_for_gpus"] > 0 for step in sharing.steps() if step.step)


async def test_no_rollout_falls_asleep_while_another_one_takes_its_memory(sharing: Any) -> None:
    """vLLM measures what it frees on the whole GPU, and ends if that is less than nothing."""
    Sharing.load_s = 1.0
    async with sharing.workers(rollouts=3):
        done, _ = await sharing.train(
            make_plan(steps=4, staleness=2, order="ready", mini_batches=2, rollouts_sleep=True)
        )
    assert done
    assert (Alone.overlaps, Sharing.disturbed) == (0, 0)


@pytest.mark.long
async def test_after_an_outage_that_hid_all_heartbeats_an_update_waits_for_them(
    sharing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Heartbeats count for 2 s here and come every half second, so that the outage may be short."""
    for constant in ("plaudit_workers.stream.transport.LIVE_WITHIN_S", f"{TURNS}.LIVE_WITHIN_S"):
        monkeypatch.setattr(constant, 2.0)
    monkeypatch.setattr(f"{TURNS}._OUTAGE_HIDES_AFTER_S", 1.0)
    monkeypatch.setattr("plaudit_workers.rollout.worker._BEAT_EVERY_S", 0.5)
    take, outages = Turns.take, [3.0, 3.0]

    async def interrupted(turns: Turns) -> bool:
        for _ in range(200 if outages else 0):  # until all have loaded, unless this update continues a turn
            if len(HOLDING) == 4:
                break
            await asyncio.sleep(0.01)
        if outages and len(HOLDING) == 4:
            server.kill()
            await asyncio.sleep(outages.pop())
            await asyncio.to_thread(server.start)  # the trainer looks at once, rollouts try again within half a second
        return await take(turns)

    monkeypatch.setattr(Turns, "take", interrupted)
    with RedisServer(tmp_path / "redis", persistence="always") as server:
        sharing.server = server
        async with sharing.workers(rollouts=4):
            done, _ = await sharing.train(make_plan(steps=8, rollouts_sleep=True, staleness=1))
    sharing.server = redis_server
    assert (done, outages) == (True, [])
    assert Alone.overlaps == 0


async def test_without_the_setting_rollouts_hold_memory_during_updates(sharing: Any) -> None:
    async with sharing.workers(rollouts=2):
        done, _ = await sharing.train(make_plan(steps=4))
    assert done
    assert Alone.overlaps > 0


async def test_the_next_trainer_wakes_rollouts_that_a_killed_one_left_asleep(sharing: Any) -> None:
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


async def test_a_rollout_that_starts_during_an_update_waits_for_its_end(sharing: Any) -> None:
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


class Model(ScriptedServer):
    """A reward model that holds memory while it is awake, and reports requests that reach it asleep."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = self._scored
        self.asleep, self.under_way, self.disturbed, self.naps = False, 0, 0, 0

    async def _scored(self, _: bytes) -> Reply:
        self.disturbed += self.asleep
        self.under_way += 1
        await asyncio.sleep(random.uniform(0, 0.05))
        self.disturbed += self.asleep
        self.under_way -= 1
        return OK

    async def sleep(self) -> None:
        self.disturbed += self.under_way
        self.asleep = True
        self.naps += 1
        await asyncio.sleep(0.01)
        HOLDING.discard(self)

    async def wake_up(self) -> None:
        HOLDING.add(self)
        await asyncio.sleep(0.01)
        self.asleep = False


@asynccontextmanager
async def serving(simulation: Any, *names: str) -> AsyncIterator[list[Model]]:
    """Servers of the run's reward model, with the processes that let them take turns."""
    models = [Model() for _ in names]
    for model in models:
        await model.start()
        HOLDING.add(model)
    section = {"source": "reward", "sleepDuringUpdates": True}
    simulation.scorer = {"name": "rm", "kind": "model", "model": section}
    simulation.model_servers = {"rm": [model.url for model in models]}
    transport = await simulation.open()
    async with asyncio.TaskGroup() as tasks:
        running = []
        for name, model in zip(names, models, strict=True):
            turns = ServerTurns(name, transport)
            running += [tasks.create_task(turns.beats()), tasks.create_task(turns.follow(model))]
        yield models
        for task in running:
            task.cancel()
    await transport.close()
    for model in models:
        await model.stop()


@pytest.mark.long
@pytest.mark.parametrize("plan", [{}, {"staleness": 1, "mini_batches": 2}, {"staleness": 2, "order": "ready"}])
async def test_no_reward_model_holds_memory_during_an_update_and_none_is_asked_in_its_sleep(
    sharing: Any, plan: dict[str, Any]
) -> None:
    async with serving(sharing, "model-0", "model-1") as models, sharing.workers(rollouts=2, reward_workers=2):
        done, _ = await sharing.train(make_plan(steps=4, rollouts_sleep=True, models_sleep=True, **plan))
    assert done
    assert Alone.overlaps == 0
    assert [model.disturbed for model in models] == [0, 0]
    assert all(model.naps for model in models)
    assert (sharing.ledger()["trained"], sharing.ledger()["problems"]) == (16, [])
    assert all(step.statistics["reward_pipeline/outcome/scored"] == step.num_samples for step in sharing.steps())


@pytest.mark.long
async def test_a_worker_that_dies_leaves_reward_models_their_turns(sharing: Any) -> None:
    chance = random.Random(3)
    plan = make_plan(steps=6, rollouts_sleep=True, models_sleep=True, staleness=1, mini_batches=2)
    async with serving(sharing, "model-0") as (model,), sharing.workers(rollouts=1, reward_workers=2):
        training = asyncio.create_task(sharing.train(plan))
        await asyncio.sleep(chance.uniform(0.1, 0.5))
        await sharing.kill_worker(chance)  # counts as live, and so as calling the model, for 20 s
        done, _ = await training
    assert done
    assert (Alone.overlaps, model.disturbed, sharing.ledger()["problems"]) == (0, 0, [])


async def test_rollouts_that_do_not_take_turns_sample_while_a_reward_model_sleeps(sharing: Any) -> None:
    sharing.options = {"sleeps": False}
    async with serving(sharing, "model-0") as (model,), sharing.workers():
        done, _ = await sharing.train(make_plan(steps=4, models_sleep=True))
    assert done
    assert Alone.overlaps > 0
    assert (model.naps, model.disturbed) == (4, 0)
