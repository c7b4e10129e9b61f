"""A broker of machines on a real Redis, asked over real HTTP, with machines that are folders and namespaces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from builders import make_prompt
from harbor_tasks import write_sum_task
from plaudit_job.tasks import Task, read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider, WarmProvider
from plaudit_reward.served_machines import ServedProvider
from plaudit_reward.verifier import Keep
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.redis import RedisAddress
from plaudit_workers.sandboxes.broker import Broker
from plaudit_workers.sandboxes.places import Places
from plaudit_workers.sandboxes.series import BrokerSeries
from plaudit_workers.sandboxes.server import BrokerSettings, Pools, serve_led
from plaudit_workers.stream.calls import StreamLimits, new_call
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

TOKEN = "a-token-of-the-run"
CHOICE = MachineChoice(memory_bytes=256 << 20, disk_bytes=64 << 20)


class World:
    """One run: its streams, its folder, its task, and the clients of its broker."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport = transport
        self.trainer = TrainerStreams(transport, StreamLimits(max_open_groups=1000))
        self.folder = folder
        self.providers: list[ServedProvider] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.task: Task = read_task(write_sum_task(folder / "task"))
        (folder / SANDBOXES).mkdir()

    def provider(self, patience_s: float = 30.0, token: str = TOKEN) -> ServedProvider:
        """A client's provider."""
        url = f"http://127.0.0.1:{self.port}"
        self.providers.append(ServedProvider(ProcessProvider(CHOICE), url, token, patience_s=patience_s))
        return self.providers[-1]

    def machines(self, patience_s: float = 30.0) -> RunMachines:
        """The machines of the run, as a rollout or a reward worker has them."""
        return RunMachines(self.folder / SANDBOXES, self.provider(patience_s))

    async def admit(self, group: str, n: int = 2) -> None:
        """Admits a prompt of the task."""
        extra_info = self.task.row()["extra_info"]
        version = PolicyVersion(self.trainer.incarnation, 0)
        await self.trainer.admit(make_prompt(group, n, min_version=version, extra_info=extra_info))

    def folders(self) -> set[str]:
        """The machines that exist."""
        return {path.name for path in (self.folder / "machines").glob("[!.]*")}

    async def held(self) -> dict[str, str]:
        """The places that are held."""
        found: Any = await self.transport.commands.hgetall(self.transport.names.sandboxes)
        return {holder.decode(): value.decode() for holder, value in found.items()}


@pytest.fixture
async def world(transport: Transport, tmp_path: Path) -> AsyncIterator[World]:
    world = World(transport, tmp_path)
    await world.trainer.take_over()
    yield world
    for provider in world.providers:
        await provider.close()


Brokers = Callable[..., AbstractAsyncContextManager[Broker]]


@pytest.fixture
def broker(world: World, address: RedisAddress, run_name: str) -> Brokers:
    """``async with broker(most=2):`` a broker with a connection of its own."""

    @asynccontextmanager
    async def start(
        most: int = 2,
        warm: int = 0,
        lease_s: float = 5.0,
        provider: WarmProvider | None = None,
        places_class: Callable[..., Places] = Places,
        keep: Keep = "none",
    ) -> AsyncIterator[Broker]:
        transport = await Transport.open(address, run_name)
        own = BrokerSettings("127.0.0.1", world.port, TOKEN)
        provider = provider or ProcessProvider(CHOICE)
        places = places_class(transport, new_call(), most, lease_s)
        made = Broker(world.folder, provider, places, BrokerSeries(), keep)
        pools, stop = Pools(transport, made, provider, warm), asyncio.Event()
        try:
            assert await places.lead(stop)
            serving = asyncio.create_task(serve_led(own, made, places, pools, stop))
            try:
                yield made
            finally:
                stop.set()
                await serving
        finally:
            await transport.close()

    return start
