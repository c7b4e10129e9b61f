"""Engines that share a GPU start one after the other, each once the trainer's model lies there."""

from __future__ import annotations

import asyncio
import uuid

from plaudit_workers.process import alone_on_gpu

RUN = f"test-{uuid.uuid4().hex[:8]}"


async def starts(*devices: str, shared: bool = True) -> list[str]:
    """Start engines at once; return what happened, in order."""
    happened: list[str] = []

    async def start(name: str, visible: str) -> None:
        variables = {"CUDA_VISIBLE_DEVICES": visible} | ({"PLAUDIT_GPU_SHARE": "0.5"} if shared else {})
        async with alone_on_gpu(RUN, variables):
            happened.append(f"{name} begins")
            await asyncio.sleep(0.05)
            happened.append(f"{name} ends")

    await asyncio.gather(*(start(str(number), visible) for number, visible in enumerate(devices)))
    return happened


async def test_engines_on_the_same_gpu_start_one_after_the_other() -> None:
    happened = await starts("0,1", "1,2", "2,0")
    assert [event.split()[1] for event in happened] == ["begins", "ends"] * 3


async def test_engines_on_other_gpus_start_at_once() -> None:
    assert [event.split()[1] for event in await starts("0", "1")] == ["begins", "begins", "ends", "ends"]


async def test_engines_that_share_nothing_start_at_once() -> None:
    happened = await starts("0", "0", shared=False)
    assert [event.split()[1] for event in happened] == ["begins", "begins", "ends", "ends"]
