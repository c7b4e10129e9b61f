"""Whole runs whose weights go from the trainer's memory to the rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plaudit_wire.messages import Announcement, PolicyVersion, Transfer, TransferPart
from plaudit_workers.training.scripted import ScriptedBackend
from plaudit_workers.weights.published import weights_digest
from plaudit_workers.weights.send import WeightPart, WeightServer
from simulated_run import make_plan

SERVERS: list[WeightServer] = []


class Offering(ScriptedBackend):
    """Offers every version from memory; that of step 2 is damaged after it was announced."""

    def __init__(self, folder: Path, *args: Any) -> None:
        super().__init__(folder, *args)
        self.requested: list[str] = []
        self.server = WeightServer()
        SERVERS.append(self.server)

    def publish(self, version: PolicyVersion) -> Announcement:
        content = bytearray(str(version).encode())
        part = WeightPart.of([(0, memoryview(content))])
        if version.number == 2:
            content[0] ^= 1
        self.server.offer(version, "token", part)
        parts = [TransferPart(f"127.0.0.1:{self.server.port}", part.digest)]
        return Announcement(version, "", "", Transfer("token", len(content), parts))

    def write_files(self, announcement: Announcement) -> Announcement:
        self.requested.append(str(announcement.version))
        content = str(announcement.version).encode()
        folder = self._folder / "weights" / str(announcement.version)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
        return msgspec.structs.replace(announcement, path=str(folder), digest=weights_digest(folder))

    def prune(self, in_use: Any) -> None:
        """Keep everything."""


@pytest.fixture(autouse=True)
def closed_servers() -> Iterator[None]:
    yield
    while SERVERS:
        SERVERS.pop().close()


async def test_files_are_written_only_for_a_version_that_rollouts_cannot_receive(simulation: Any) -> None:
    simulation.policy_class = Offering
    async with simulation.workers(rollouts=2):
        done, policy = await simulation.train(make_plan(steps=4))
    assert done
    assert policy.requested == ["1.2"]
    assert [path.name for path in (simulation.folder / "weights").iterdir()] == ["1.2"]
    assert (simulation.ledger()["trained"], simulation.ledger()["problems"]) == (16, [])


async def test_rollouts_follow_the_next_trainer_after_one_dies_with_its_memory(simulation: Any) -> None:
    simulation.policy_class = Offering
    plan = make_plan(steps=6, checkpoint_every_steps=1)
    async with simulation.workers(rollouts=2):
        simulation.update_s = lambda groups: 0.1
        trainer = asyncio.create_task(simulation.train(plan))
        await simulation.until_steps(2)
        trainer.cancel()
        await asyncio.wait([trainer])
        SERVERS[0].close()
        done, _ = await simulation.train(plan)
    assert done
    assert simulation.ledger()["problems"] == []
    assert simulation.steps()[-1].step == 6
