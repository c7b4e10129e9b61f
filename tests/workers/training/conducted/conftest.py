"""What the tests of whole runs share: one simulated run a test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plaudit_workers.launch.redis import RedisServer
from simulated_run import Simulation


@pytest.fixture
async def simulation(redis_server: RedisServer, run_name: str, tmp_path: Path) -> AsyncIterator[Simulation]:
    simulation = Simulation(redis_server, run_name, tmp_path / "run")
    yield simulation
    await simulation.end_trainers()
    with warnings.catch_warnings():  # trainers that were killed did not close their connections
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()  # what is left stays: by the end of the suite, each test would search a second for its own garbage
    transport = await simulation.open()
    async for key in transport.commands.scan_iter(f"plaudit:{{{run_name}}}:*", count=1000):
        await transport.commands.unlink(key)
    await transport.close()
