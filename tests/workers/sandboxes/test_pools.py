"""Warm machines: started for the prompts that rollouts take next, given to samples, removed when nobody needs them."""

from __future__ import annotations

import asyncio

import pytest

from namespaces import HAS_NAMESPACES
from plaudit_reward.providers import ProcessProvider
from plaudit_sandbox.machine import CommandEnd
from plaudit_workers.sandboxes import server
from waiting import until

from .conftest import CHOICE, Brokers, World

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")


class CountingProvider(ProcessProvider):
    """Counts the machines that are started, and gives each task a shape of its own if asked to."""

    def __init__(self) -> None:
        super().__init__(CHOICE)
        self.started = 0

    def start(self, *arguments: object) -> None:
        self.started += 1
        super().start(*arguments)  # type: ignore[arg-type]


async def test_machines_are_warm_before_a_rollout_takes_the_prompt(world: World, broker: Brokers) -> None:
    await world.admit("g", 2)
    provider = CountingProvider()
    async with broker(most=3, warm=4, provider=provider):
        await until(lambda: provider.started == 2)  # as many as the prompt has samples
        await until(lambda: len(list(world.folder.glob("machines/*/made.json"))) == 2)
        machines = world.machines()
        claims = await asyncio.gather(*(machines.claim("g", index, world.task) for index in range(2)))
        held = await world.held()
        assert {"g 0", "g 1"} <= held.keys()
        assert len({value.partition(" ")[0] for value in held.values()}) == len(held)
        for _, made in claims:
            ended = await made.machine.run(["cat", "a", "b"], timeout_s=20.0, directory=made.directory)
            assert isinstance(ended, CommandEnd)
            assert ended.output == "34"


async def test_a_pool_that_no_prompt_needs_goes(world: World, broker: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_KEPT_S", 0.3)
    await world.admit("g", 2)
    async with broker(most=3, warm=1):
        await until(lambda: len(world.folders()) == 1)
        await world.trainer.close("g", "dropped", "test")
        await until(lambda: not world.folders())

        async def is_free() -> bool:
            return await world.held() == {}

        await until(is_free)


async def test_a_warm_machine_leaves_its_place_to_a_claim_of_another_shape(world: World, broker: Brokers) -> None:
    class ShapedProvider(CountingProvider):
        def shape(self, task: object) -> str:
            return "with a task" if task else "without"

    await world.admit("g", 2)
    async with broker(most=1, warm=1, provider=ShapedProvider()):
        await until(lambda: len(world.folders()) == 1)
        await world.machines().claim("g", 0, None)
        assert list(await world.held()) == ["g 0"]
