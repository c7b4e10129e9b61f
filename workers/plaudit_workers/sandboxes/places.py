"""Hold the places of a run's machines in Redis: one broker at a time gives them, and never more than there are.

The hash ``sandboxes`` is the truth about which machines exist and whose they are: a place is taken in it before a
machine is made, and freed after the machine is gone. A place belongs to a sample (``<group> <index>``), so a prompt
that is delivered again gets the place of the rollout that died, or to a pool (``warm <machine>``).

A broker leads while its lease in Redis holds. It renews the lease, and answers nobody once it could have lapsed; each
change of a place checks in Redis that no other broker has taken over. A broker that is not the leader any more ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from typing import Any

from plaudit_wire.logs import get_logger
from plaudit_workers.process import unless_stopped
from plaudit_workers.stream.calls import Call, Lead, MachinePlace, free_place, hold_place, lead
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_RENEWALS = 5
_LOOK_EVERY_S = 0.5
WARM = "warm "
"""The beginning of a pool's holders; no group's id holds a space."""


class DeposedError(RuntimeError):
    """Another broker has taken over, or Redis has lost the places: this process begins anew."""


class Places:
    """Give and free the places of a run.

    Args:
        broker: Name of this process, new at each start.
        most: Places (``sandboxes.maxConcurrent``).
        lease_s: Seconds after which another broker may take over from one that is silent.
    """

    def __init__(self, transport: Transport, broker: str, most: int, lease_s: float = 15.0) -> None:
        self._transport = transport
        self._broker = broker
        self._lease_s = lease_s
        self._until_s = 0.0
        self.most = most

    @property
    def leads(self) -> bool:
        """Return True while no other broker can have taken over."""
        return time.monotonic() < self._until_s

    async def lead(self, stop: asyncio.Event) -> bool:
        """Wait until this process is the run's only broker; return False if ``stop`` is set first."""
        while not await self._renew(Lead.new, Lead.kept):  # kept: by a call whose reply was lost
            if not await unless_stopped(stop, asyncio.sleep(_LOOK_EVERY_S)):
                return False
        return True

    async def keep(self) -> None:
        """Renew the lease until cancelled; raise ``DeposedError`` if it is lost."""
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS)
            if not await self._renew(Lead.kept):
                raise DeposedError("another broker of the machines has taken over, or Redis has lost the places")

    async def leave(self) -> None:
        """Make way for another broker."""
        if self.leads:
            self._until_s = 0.0
            await self._transport.scripts.run(lead(self._broker, 0.0))

    async def held(self) -> dict[str, str]:
        """Return the machine of each holder."""
        key, commands = self._transport.names.sandboxes, self._transport.commands
        found: Any = await self._transport.retry_through_outage(lambda: commands.hgetall(key))
        return {holder.decode(): machine.decode() for holder, machine in found.items()}

    async def hold(self, holder: str, machine: str, warm: str = "") -> MachinePlace:
        """Give a sample's machine a place, or that of the machine ``warm`` of a pool. Raises ``DeposedError``."""
        group, _, index = holder.partition(" ")
        sample = group, index, warm and WARM + warm
        return await self._hold(hold_place(self._broker, holder, machine, self.most, *sample))

    async def hold_warm(self, machine: str, shape: str) -> MachinePlace:
        """Give a pool's machine a place. Raises ``DeposedError``."""
        return await self._hold(hold_place(self._broker, WARM + machine, shape, self.most))

    async def free(self, holder: str, machine: str) -> None:
        """Free the place of a machine that is gone. Raises ``DeposedError``."""
        if not await self._transport.scripts.run(free_place(self._broker, holder, machine)):
            raise DeposedError("another broker of the machines has taken over")

    async def ended(self, samples: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those samples that are finished, or whose group is gone: nobody needs their machines."""
        asked = list(samples)
        if not asked:
            return []

        def ask() -> Awaitable[list[Any]]:
            pipeline = self._transport.commands.pipeline(transaction=False)
            for group, index in asked:
                pipeline.hmget(self._transport.names.group(group), ["phase", f"ended:{index}"])
            return pipeline.execute()

        answers = await self._transport.retry_through_outage(ask)
        return [sample for sample, (phase, end) in zip(asked, answers, strict=True) if phase is None or end is not None]

    async def _hold(self, call: Call[MachinePlace]) -> MachinePlace:
        answer = await self._transport.scripts.run(call)
        if answer is MachinePlace.stale:
            raise DeposedError("another broker of the machines has taken over")
        return answer

    async def _renew(self, *wanted: Lead) -> bool:
        asked_s = time.monotonic()
        answer = await self._transport.scripts.run(lead(self._broker, self._lease_s))
        if answer not in wanted:
            return False
        self._until_s = asked_s + self._lease_s
        return True
