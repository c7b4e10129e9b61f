"""A broker that is killed before or after any of its calls, and the one after it: no machine is lost or given twice."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from namespaces import HAS_NAMESPACES
from plaudit_job.tasks import Task
from plaudit_reward.machines import RunMachines
from plaudit_reward.providers import ProcessProvider, TaskMachine
from plaudit_sandbox.machine import CommandEnd
from plaudit_wire.errors import InfrastructureError
from plaudit_workers.sandboxes.places import DeposedError, Places
from plaudit_workers.stream.calls import MachinePlace

from .conftest import CHOICE, Brokers, World

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
EXAMPLES = int(os.environ.get("PLAUDIT_EXAMPLES", "10"))
CALLS = 60
"""More than a run has: it is killed at the end, or never."""
MOST = 2
SAMPLES = 3


class KilledError(DeposedError):
    """The process is dead: nothing that it still runs has an effect."""


class Life:
    """Counts the calls of one broker, and ends it before or after one of them."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def call(self, name: str) -> None:
        """One point at which it may be killed."""
        self.left -= 1
        if self.left < 0:
            raise KilledError(name)


class MortalProvider(ProcessProvider):
    """Process machines of a broker that may be killed, and a look at how many there are."""

    def __init__(self, life: Life, world: World) -> None:
        super().__init__(CHOICE)
        self._life = life
        self._world = world

    def start(self, folder: Path, task: Task | None) -> None:
        assert len(self._world.folders()) <= MOST
        self._around("start", lambda: ProcessProvider.start(self, folder, task))

    def fill(self, folder: Path, task: Task | None) -> TaskMachine:
        return self._around("fill", lambda: ProcessProvider.fill(self, folder, task))

    def find(self, folder: Path, task: Task | None) -> TaskMachine:
        return self._around("find", lambda: ProcessProvider.find(self, folder, task))

    def remove(self, *places: Path) -> None:
        self._around("remove", lambda: ProcessProvider.remove(self, *places))

    def _around(self, name: str, act: Callable[[], Any]) -> Any:
        self._life.call(f"before {name}")
        result = act()
        self._life.call(f"after {name}")
        return result


def mortal_places(life: Life) -> Callable[..., Places]:
    """The places of a broker that may be killed."""

    class MortalPlaces(Places):
        async def hold(self, holder: str, machine: str, warm: str = "") -> MachinePlace:
            life.call("before hold")
            answer = await super().hold(holder, machine, warm)
            life.call("after hold")
            return answer

        async def hold_warm(self, machine: str, shape: str) -> MachinePlace:
            life.call("before hold_warm")
            answer = await super().hold_warm(machine, shape)
            life.call("after hold_warm")
            return answer

        async def free(self, holder: str, machine: str) -> None:
            life.call("before free")
            await super().free(holder, machine)
            life.call("after free")

        async def leave(self) -> None:
            if life.left >= 0:
                await super().leave()

    return MortalPlaces


async def work(machines: RunMachines, world: World, index: int) -> tuple[str, list[str]]:
    """One sample: two commands and the tests. Returns its end, and what its commands found."""
    seen: list[str] = []
    name, made = await machines.claim("g", index, world.task)
    try:
        for word in ("3", "4"):
            script = f"echo {word} >> words; cat words; echo 7 > sum"
            ended = await made.machine.run(["bash", "-c", script], timeout_s=20.0, directory=made.directory)
            assert isinstance(ended, CommandEnd)
            seen.append(ended.output)
        verdict = await machines.verify(made, world.task, timeout_s=20.0, environment={})
        return str(verdict.reward), seen
    except InfrastructureError as error:
        return str(error), seen
    finally:
        await machines.remove(name)


async def live(world: World, broker: Brokers, warm: int, calls: int) -> None:
    """Run all samples with a broker that is killed after so many calls, and with the next."""
    lives = [Life(calls), Life(1 << 30)]
    done = asyncio.Event()

    async def serve() -> None:
        for life in lives:
            provider, places = MortalProvider(life, world), mortal_places(life)
            with suppress(KilledError):
                async with broker(MOST, warm, lease_s=0.5, provider=provider, places_class=places) as running:
                    ended = asyncio.ensure_future(done.wait())
                    await asyncio.wait([ended, running.failed], return_when=asyncio.FIRST_COMPLETED)
                    ended.cancel()
            if done.is_set():
                return

    serving = asyncio.create_task(serve())
    machines = world.machines()
    ends = await asyncio.gather(*(work(machines, world, index) for index in range(SAMPLES)))
    done.set()
    await serving
    for end, seen in ends:
        assert end == "1.0" or "lost while the command ran" in end
        assert seen == ["3\n", "3\n4\n"][: len(seen)]
    assert not [holder for holder in await world.held() if not holder.startswith("warm ")]


@pytest.mark.long
async def test_whenever_a_broker_is_killed_each_sample_gets_its_own_machine_and_verdict(
    world: World, broker: Brokers
) -> None:
    await world.admit("g", SAMPLES)
    for calls in random.sample(range(CALLS), min(CALLS, EXAMPLES // 5)):
        for warm in (0, 1):
            await live(world, broker, warm, calls)
