"""Keep machines ready for the prompts that rollouts take next (``sandboxes.warm``).

The trainer admits prompts before a rollout has room for them, so their tasks are known: images are pulled and machines
started meanwhile. The samples of a prompt, and prompts of equal shape, share a pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from plaudit_job.tasks import Task
from plaudit_reward.machines import task_of
from plaudit_reward.providers import WarmProvider
from plaudit_wire.errors import DataError
from plaudit_wire.messages import Prompt, RecordError, decode
from plaudit_wire.names import CONSUMER_GROUPS
from plaudit_workers.sandboxes.broker import Broker
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import VolumeError

_EVERY_S = 0.5
_PROMPTS = 64
"""Prompts that are looked at: the next ones."""
_KEPT_S: Final = 60.0
"""Seconds for which a pool stays that no prompt needs: those that were just taken claim their machines soon."""


class Pools:
    """Start warm machines, and remove those that are not needed any more.

    Args:
        size: Machines kept ready for each shape that is needed.
    """

    def __init__(self, transport: Transport, broker: Broker, provider: WarmProvider, size: int) -> None:
        self._transport = transport
        self._broker = broker
        self._provider = provider
        self._size = size
        self._needed_s: dict[str, float] = {}
        """When each shape was needed last."""

    async def keep(self) -> None:
        """Follow the admitted prompts until cancelled; do nothing for pools of no size."""
        while self._size:
            needed = await self.needed()
            now = time.monotonic()
            self._needed_s.update(dict.fromkeys(needed, now))
            await self._start(needed)
            for shape in self._broker.shapes():
                if now - self._needed_s.setdefault(shape, now) > _KEPT_S:
                    for held in self._broker.warm(shape):
                        await self._broker.end(held)
            await asyncio.sleep(_EVERY_S)

    async def _start(self, needed: Mapping[str, tuple[int, Task | None]]) -> None:
        """Start what is missing, for the next prompts first, while places are free that no claim waits for."""
        for shape, (samples, task) in needed.items():
            for _ in range(min(self._size, samples) - len(self._broker.warm(shape))):
                if self._broker.free <= 0:
                    return
                await self._broker.start_warm(shape, task)

    async def needed(self) -> dict[str, tuple[int, Task | None]]:
        """Return how many samples of each shape the next prompts have, and a task of it, in the order of need."""
        records = await self._transport.retry_through_outage(self._undelivered)
        needed: dict[str, tuple[int, Task | None]] = {}
        for record in records:
            try:
                prompt = decode(await self._transport.volume.load(record), Prompt)
                task = await asyncio.to_thread(task_of, prompt.extra_info)
            except (RecordError, VolumeError, DataError, ValueError):  # whoever takes the prompt reports it
                continue
            shape = self._provider.shape(task)
            samples, first = needed.get(shape, (0, task))
            needed[shape] = (samples + prompt.n, first)
        return needed

    async def _undelivered(self) -> list[bytes]:
        stream, commands = self._transport.names.prompts, self._transport.commands
        groups: Any = await commands.xinfo_groups(stream)
        own = next((each for each in groups if each["name"] == CONSUMER_GROUPS["prompts"].encode()), None)
        if own is None:
            return []
        entries: Any = await commands.xrange(stream, b"(" + own["last-delivered-id"], "+", _PROMPTS)
        pipeline = commands.pipeline(transaction=False)  # a prompt whose group has ended stays until somebody reads it
        for _, fields in entries:
            pipeline.hmget(self._transport.names.group(fields.get(b"group", b"").decode()), ["phase"])
        phases = await pipeline.execute()
        return [fields[b"record"] for (_, fields), (phase,) in zip(entries, phases, strict=True) if phase == b"open"]
