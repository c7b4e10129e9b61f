"""Files that a rollout requests, on a volume that refuses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Announcement, PolicyVersion, Transfer, TransferPart
from plaudit_wire.records import WorkerRecord
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.training.publish import write_offered
from plaudit_workers.training.resume import BackendThread
from plaudit_workers.training.scripted import ScriptedBackend
from plaudit_workers.training.sinks import Sinks
from plaudit_workers.training.state import Lineage, RunContext, RunState, ServerClock
from plaudit_workers.training.turns import Announcements
from plaudit_workers.weights.send import WeightPart, WeightServer
from simulated_run import Rows, make_plan

VERSION = PolicyVersion(1, 3)


class Offering(ScriptedBackend):
    """Writes offered weights as a trainer with a model does; the volume may work again at a later try."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tries = 0
        self.repaired_at = 0

    def write_files(self, announcement: Announcement) -> Announcement:
        self.tries += 1
        if self.tries == self.repaired_at:
            (self._folder / "weights").unlink()
        return write_offered(announcement, {}, self._folder / "weights")


@pytest.fixture
async def announced(simulation: Any) -> AsyncIterator[tuple[Announcements, RunState, Offering]]:
    """A version that rollout-0 requests as files, of a run whose ``weights`` cannot become a folder."""
    (simulation.folder / "weights").touch()
    part, server = WeightPart.of([(0, memoryview(b"weights"))]), WeightServer()
    server.offer(VERSION, "token", part)
    parts = [TransferPart(f"127.0.0.1:{server.port}", part.digest)]
    offered = Announcement(VERSION, "", "", Transfer("token", 7, parts))
    transport = await simulation.open()
    streams, sinks = TrainerStreams(transport, StreamLimits(max_open_groups=1)), Sinks(simulation.folder)
    await streams.take_over()
    await transport.beat(WorkerRecord(worker="rollout-0", role="rollout", needs_files=str(VERSION)))
    clock = ServerClock(transport.now)
    run = RunContext(make_plan(), simulation.folder, transport, streams, Rows(1, "train", {}), sinks, clock)
    state, backend = RunState(1, Lineage(), offered), Offering(simulation.folder)
    thread = BackendThread(backend)
    yield Announcements(run, state, thread, look_every_s=0.001), state, backend
    thread.abandon()
    server.close()
    sinks.close()
    await transport.close()


async def test_a_volume_that_refuses_requested_files_ends_the_run_with_their_path(
    announced: tuple[Announcements, RunState, Offering], simulation: Any
) -> None:
    announcements, _, backend = announced
    with pytest.raises(RefusedError, match=r"cannot write the weights to \S+/weights/1\.3 in 6 tries: .*rollout-0"):
        await asyncio.wait_for(announcements.write_requested_files(), 60)
    assert backend.tries == 6
    assert (simulation.folder / "weights").read_bytes() == b""


async def test_requested_files_are_written_and_announced_when_the_volume_works_again(
    announced: tuple[Announcements, RunState, Offering],
) -> None:
    announcements, state, backend = announced
    backend.repaired_at = 3
    writing = asyncio.create_task(announcements.write_requested_files())
    async with asyncio.timeout(60):
        while not state.announcement.path:
            await asyncio.sleep(0.01)
    writing.cancel()
    assert backend.tries == 3
    assert (Path(state.announcement.path) / "model.safetensors").read_bytes() == b"weights"
