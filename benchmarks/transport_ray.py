"""The flow of ``transport.py`` over ``ray.util.queue.Queue``: three queues, three actors, one message a sample."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray
from ray.util.queue import Queue
from transport_streams import BATCH, GROUP_SIZE, RATE_PER_S, SCORE_S, TEXT, TOKENS, WINDOW, Hops

Message = dict[str, Any]


def make_sample(group: int, index: int) -> Message:
    """The contents of the streams' ``SampleBody``."""
    return {
        "group": group,
        "index": index,
        "response_ids": np.arange(TOKENS, dtype=np.int32),
        "logprobs": np.full(TOKENS, -0.5, dtype=np.float32),
        "loss_mask": np.ones(TOKENS, dtype=np.uint8),
        "prompt": "What is six times seven? " * 8,
        "response": TEXT,
        "ground_truth": "42",
        "sent": time.monotonic(),
    }


async def gather(work: list[Awaitable[Any]]) -> list[Any]:
    """All of it, ``BATCH`` at a time."""
    done: list[Any] = []
    for start in range(0, len(work), BATCH):
        done += await asyncio.gather(*work[start : start + BATCH])
    return done


class Role:
    """One actor: a process that runs one side of the flow."""

    def __init__(self, prompts: Queue, samples: Queue, ready: Queue) -> None:
        self._prompts, self._samples, self._ready = prompts, samples, ready

    async def warm(self) -> None:
        """Returns when the process is up."""

    async def rollout(self, groups: int, paced: bool) -> Hops:
        """Puts every sample of every prompt."""
        hops: list[float] = []
        start = 0.0

        async def put(group: int, index: int, number: int) -> None:
            if paced:
                await asyncio.sleep(max(start + number / RATE_PER_S - time.monotonic(), 0))
            await self._samples.put_async(make_sample(group, index))

        tasks: list[asyncio.Task[None]] = []
        for number in range(groups):
            prompt = await self._prompts.get_async()
            start = start or time.monotonic()
            hops.append(time.monotonic() - prompt["sent"])
            mine = [asyncio.create_task(put(prompt["group"], i, number * GROUP_SIZE + i)) for i in range(GROUP_SIZE)]
            tasks += mine
            if not paced and len(tasks) >= BATCH:
                await asyncio.gather(*tasks)
                tasks = []
        await asyncio.gather(*tasks)
        return {"prompts": hops}

    async def reward(self, groups: int, paced: bool) -> Hops:
        """Gets samples, scores them, puts them on."""
        hops: list[float] = []

        async def one() -> None:
            sample = await self._samples.get_async()
            hops.append(time.monotonic() - sample["sent"])
            if paced:
                await asyncio.sleep(SCORE_S)
            await self._ready.put_async({**sample, "score": 1.0, "sent": time.monotonic()})

        slots = asyncio.Semaphore(2 * RATE_PER_S if paced else BATCH)

        async def bounded() -> None:
            async with slots:
                await one()

        await asyncio.gather(*(bounded() for _ in range(groups * GROUP_SIZE)))
        return {"samples": hops}

    async def trainer(self, groups: int, paced: bool) -> Hops:
        """Puts prompts up to the window, gets samples until every group is complete."""
        hops: list[float] = []
        window = RATE_PER_S // GROUP_SIZE if paced else WINDOW
        found: Counter[int] = Counter()
        admitted = closed = 0
        getting: set[asyncio.Task[Message]] = set()
        start = time.monotonic()
        while closed < groups:
            allowed = int((time.monotonic() - start) * RATE_PER_S / GROUP_SIZE) + 1 if paced else groups
            room = min(window - (admitted - closed), groups - admitted, allowed - admitted)
            new = range(admitted, admitted + room)
            await gather([self._prompts.put_async({"group": g, "sent": time.monotonic()}) for g in new])
            admitted += max(room, 0)
            missing = min(BATCH, groups * GROUP_SIZE - sum(found.values())) - len(getting)
            getting |= {asyncio.create_task(self._ready.get_async()) for _ in range(missing)}
            done, getting = await asyncio.wait(getting, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                sample = task.result()
                found[sample["group"]] += 1
                if found[sample["group"]] == GROUP_SIZE:
                    hops.append(time.monotonic() - sample["sent"])
                    closed += 1
        return {"ready": hops}


class RayFlow:
    """A Ray of its own with the three actors, started warm."""

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
        queues = [Queue(actor_options={"num_cpus": 0}) for _ in range(3)]
        kind = ray.remote(num_cpus=0, max_concurrency=4)(Role)
        self._roles = {name: kind.remote(*queues) for name in ("rollout", "reward", "trainer")}
        ray.get([role.warm.remote() for role in self._roles.values()])
        return self

    def run(self, groups: int, *, paced: bool) -> tuple[float, Hops]:
        """One flow; returns seconds and hops."""
        start = time.monotonic()
        parts = ray.get([getattr(role, name).remote(groups, paced) for name, role in self._roles.items()])
        return time.monotonic() - start, {hop: times for part in parts for hop, times in part.items()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()
