"""The trainer's side of the streams: admit groups, take ready ones, end each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from plaudit_wire.codec import encode
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, Prompt
from plaudit_wire.records import GroupEnd, GroupRecord, StepRecord
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group import Group
from plaudit_workers.stream.group_hash import read_group
from plaudit_workers.stream.limits import StreamLimits
from plaudit_workers.stream.release import release_call
from plaudit_workers.stream.trainer.fence import Fence, StaleIncarnationError
from plaudit_workers.stream.trainer.ready import TakenGroups
from plaudit_workers.stream.transitions import trainer as transitions
from plaudit_workers.stream.transitions.trainer import Admission, Closing

__all__ = ["Admission", "StaleIncarnationError", "StreamLimits", "TrainerStreams"]

logger = get_logger(__name__)

_CALLS_PER_INCARNATION = 1_000_000_000
_ENDED_REMEMBERED = 10_000


class TrainerStreams:
    """Serve one trainer's side of the streams. Call ``take_over`` first.

    Its calls raise ``StaleIncarnationError`` once another trainer has taken over.
    """

    def __init__(self, transport: Transport, limits: StreamLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._fence = Fence(transport)
        self._ready = TakenGroups(transport, self._fence)
        self._announcement: Announcement | None = None
        self._announcing = 0  # calls under way: a difference in Redis is not a fault meanwhile
        self._closes = 0
        self._ended: dict[str, tuple[GroupEnd, str]] = {}  # newest last

    @property
    def incarnation(self) -> int:
        """Return this trainer's number among those that took over the run."""
        return self._fence.incarnation

    @property
    def taken(self) -> Mapping[str, Group]:
        """Return the groups that are taken and not closed, by id, in the order in which they became ready."""
        return self._ready.groups

    async def take_over(self, floor: int = 0) -> int:
        """Become the run's trainer; any earlier trainer is refused from now on.

        Args:
            floor: the highest incarnation in a checkpoint; the new one is higher, even if Redis has lost its own.
        """
        await self._fence.take_over(floor)
        self._ready.clear()
        retry = self._transport.retry_through_outage
        open_groups = await retry(self.open_groups)
        await retry(lambda: self._transport.volume.prepare(open_groups))
        return self.incarnation

    async def admit(self, prompt: Prompt) -> Admission:
        """Create the prompt's group and offer it to the rollouts; never wait for room."""
        record = encode(prompt)
        if self._transport.volume.needed(record):
            record = await self._transport.spill(prompt.group, "prompt", record)
        return await self._fence.run(transitions.admit(self.incarnation, prompt, record, self._limits))

    async def take_ready(self, count: int, block_s: float) -> list[Group]:
        """Take groups in phase ``ready`` or ``dropped``, at most ``count``; [] if none arrived within ``block_s``.

        Each group is returned once; a trainer that takes over gets it again. ``close`` ends it.
        """
        groups = await self._ready.take(count, block_s)
        again = {group.id for group in groups if group.id in self._ended}
        await self._close_again(again)
        return [group for group in groups if group.id not in again]

    async def _close_again(self, group_ids: Iterable[str]) -> None:
        """End reappeared groups (the append-only file lost its last second) the way this trainer ended them before."""
        for group_id in group_ids:
            logger.error("an ended group reappeared", group=group_id)
            await self._close(group_id, *self._ended[group_id], b"", taken=True)

    async def read(self, group_id: str) -> Group | None:
        """Return the current state of a group; None when it is closed or lost."""
        return await read_group(self._transport, group_id)

    async def release_expired(self) -> list[str]:
        """Release overdue groups and return their ids; call it about once a second."""
        due: Any = await self._transport.commands.zrangebyscore(
            self._transport.names.open, "-inf", await self._transport.now()
        )
        groups = [await read_group(self._transport, member.decode()) for member in due]
        return [
            group.id
            for group in groups
            if group is not None and await self._fence.run(release_call(group, self.incarnation))
        ]

    async def close(self, group_id: str, end: GroupEnd, reason: str = "", record: GroupRecord | None = None) -> bool:
        """End a group: count it and free its memory. Samples that are not terminal are given up.

        Args:
            end: ``trained`` and ``evaluated`` only from phase ``ready``; ``dropped`` from any.

        Returns:
            False when there is no such group.

        Raises:
            ValueError: a group that is not ready cannot end as trained or evaluated, nor be dropped without a reason.
        """
        if (end == "dropped") != bool(reason):
            raise ValueError(
                f"group {group_id}: 'dropped' needs a reason and no other end takes one; got {end} with {reason!r}"
            )
        encoded = b"" if record is None else msgspec.msgpack.encode(record)
        answer = await self._close(group_id, end, reason, encoded, taken=self._ready.may_end_as_trained(group_id))
        if answer is Closing.not_ready:
            raise ValueError(f"group {group_id} is not ready: it cannot end as {end}")
        self._ended[group_id] = (end, reason)
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return answer is Closing.closed

    async def _close(self, group_id: str, end: GroupEnd, reason: str, record: bytes, *, taken: bool) -> Closing:
        self._closes += 1
        call = self.incarnation * _CALLS_PER_INCARNATION + self._closes
        ending = (end, reason, record)
        answer = await self._fence.run(transitions.close(group_id, call, self.incarnation, ending, taken=taken))
        if answer is not Closing.not_ready:
            self._ready.forget(group_id)
            await self._transport.volume.forget(group_id)
        return answer

    async def announce(self, announcement: Announcement) -> None:
        """Announce the policy that rollouts must load, after its files are complete."""
        self._announcement = announcement
        self._announcing += 1
        try:
            await self._fence.run(transitions.announce(self.incarnation, announcement))
        finally:
            self._announcing -= 1

    async def open_groups(self) -> list[str]:
        """Return the ids of the groups that are admitted and not closed."""
        members: Any = await self._transport.commands.zrange(self._transport.names.open, 0, -1)
        return [member.decode() for member in members]

    async def counters(self) -> dict[str, int]:
        """Return the ledger's counters and all others.

        ``admitted``, ``trained``, ``evaluated``, ``dropped``, ``dropped:<reason>``, ``duplicates`` and
        ``duplicates:<stream>``, ``redelivered:<stream>``, ``dead:<stream>``, ``poison``, ``groups_recreated``,
        ``open:<split>``.
        """
        stored: Any = await self._transport.commands.hgetall(self._transport.names.counters)
        counted = {name.decode(): int(value) for name, value in stored.items()}
        duplicates = sum(value for name, value in counted.items() if name.startswith("duplicates:"))
        return {**counted, "duplicates": duplicates}

    async def restore(self, ledger: dict[str, int], step: int) -> None:
        """Replace Redis's ledger and step by those of a checkpoint (``Ledger.counters``)."""
        await self._fence.run(transitions.restore(self.incarnation, step, ledger))

    async def missing(self, expected: Iterable[str]) -> list[str]:
        """Return the open groups of the trainer that Redis has lost (FLUSHALL, failover, rollback).

        Call it every few seconds, and before ``restore``. The trainer counts lost groups as ``dropped: lost`` and
        admits their prompts again under a new attempt. This call also repairs an older state of Redis: it ends
        reappeared groups again the way this trainer ended them, and repeats this trainer's last announcement if Redis
        holds another.
        """
        ids, ended = list(expected), set(self._ended)
        known = None if self._announcing else self._announcement
        pipeline = self._transport.commands.pipeline(transaction=False)
        pipeline.hget(self._transport.names.state, "announced")
        for group_id in ids:
            pipeline.exists(self._transport.names.group(group_id))
        announced, *found = await pipeline.execute()
        if known is not None and known is self._announcement and announced != encode(known):
            logger.error("Redis came back with an older state", announced=str(known.version))
            await self.announce(known)
        await self._close_again(ended.intersection(await self.open_groups()))
        return [group_id for group_id, exists in zip(ids, found, strict=True) if not exists]

    async def record_step(self, record: StepRecord) -> None:
        """Send a closed step to the metrics and set ``state.step``."""
        await self._fence.run(transitions.record_step(self.incarnation, record))
