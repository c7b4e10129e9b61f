"""Serve the trainer's side of the streams: admit groups, take ready ones, end each exactly once.

Each of a trainer's transitions carries its incarnation, which the scripts check: a replaced trainer is refused
(``Fence``). ``Ledger`` checks that every admitted group has ended exactly once. A job's own Redis ends with its run; in
an external one keys would stay for ever, so ``expire_run`` and ``keep_run`` set and remove their time to live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, Prompt, encode
from plaudit_wire.records import GroupEnd, GroupRecord, StepRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.stream import calls as transitions
from plaudit_workers.stream.calls import Admission, Call, Closing, StreamLimits, take_ready
from plaudit_workers.stream.groups import Deadlines, Group, read_entries, read_group, read_groups, release_call
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
Answer = TypeVar("Answer")
_CALLS_PER_INCARNATION = 1_000_000_000
_ENDED_REMEMBERED = 10_000
_SCANNED_AT_ONCE = 1000
_FIRST = "0-0"
"""An entry before all others."""


class StaleIncarnationError(Exception):
    """Another trainer has taken over this run; this one must exit."""


class TrainerStreams:
    """Serve one trainer's side of the streams. Call ``take_over`` first.

    Its calls raise ``StaleIncarnationError`` once another trainer has taken over.
    """

    def __init__(self, transport: Transport, limits: StreamLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._fence = Fence(transport)
        self._ready = TakenGroups(transport, self._fence)
        self._deadlines = Deadlines(transport)
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

        ``floor`` is the highest incarnation in a checkpoint; the new one is higher, even if Redis has lost its own.
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
        due = await self._deadlines.overdue()
        groups = [await read_group(self._transport, name) for name in due.groups]
        return [
            group.id
            for group in groups
            if group is not None and await self._fence.run(release_call(group, self.incarnation))
        ]

    async def close(self, group_id: str, end: GroupEnd, reason: str = "", record: GroupRecord | None = None) -> bool:
        """End a group: count it and free its memory; samples that are not terminal are given up. False: no such group.

        A group can only be dropped, with a reason, unless it is in phase ``ready``: else ``ValueError``.
        """
        if (end == "dropped") != bool(reason):
            raise ValueError(
                f"group {group_id}: 'dropped' needs a reason and no other end takes one; got {end} with {reason!r}"
            )
        encoded = b"" if record is None else msgspec.msgpack.encode(record)
        held = self.taken.get(group_id)  # taken in phase ``ready``: an older state of Redis does not change that
        taken = held is not None and held.phase == "ready"
        answer = await self._close(group_id, end, reason, encoded, taken=taken)
        if answer is Closing.not_ready:
            raise ValueError(f"group {group_id} is not ready: it cannot end as {end}")
        self._ended[group_id] = (end, reason)
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return answer is Closing.closed

    async def _close(self, group_id: str, end: GroupEnd, reason: str, record: bytes, *, taken: bool) -> Closing:
        self._closes += 1
        call = self.incarnation * _CALLS_PER_INCARNATION + self._closes
        transition = transitions.close(group_id, call, self.incarnation, end, reason, record, taken=taken)
        answer = await self._fence.run(transition)
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
        self._ready.look_again()
        if known is not None and known is self._announcement and announced != encode(known):
            logger.error("Redis came back with an older state", announced=str(known.version))
            await self.announce(known)
        await self._close_again(ended.intersection(await self.open_groups()))
        return [group_id for group_id, exists in zip(ids, found, strict=True) if not exists]

    async def record_step(self, record: StepRecord) -> None:
        """Send a closed step to the metrics and set ``state.step``."""
        await self._fence.run(transitions.record_step(self.incarnation, record))


class TakenGroups:
    """Hold the groups that one trainer has taken and not closed, as they were when taken, in the stream's order."""

    def __init__(self, transport: Transport, fence: Fence) -> None:
        self._transport = transport
        self._fence = fence
        self._reader = transport.blocking_client()
        self.groups: dict[str, Group] = {}
        self._held_up_to = _FIRST  # every entry of `ready` that was taken, up to this one, is of a group held or closed
        self._last_seen = _FIRST

    def clear(self) -> None:
        """Forget all groups, so that they are returned again."""
        self.groups.clear()
        self._held_up_to = self._last_seen = _FIRST

    def look_again(self) -> None:
        """Look at all that was taken once more: Redis may have come back with another state."""
        self._held_up_to = _FIRST

    def forget(self, group_id: str) -> None:
        """Remove a closed group."""
        self.groups.pop(group_id, None)

    async def take(self, count: int, block_s: float) -> list[Group]:
        """Take at most ``count`` groups; [] if none arrived within ``block_s``."""
        rows = await self._take_rows(count)
        if not rows and block_s > 0:
            await self._wait(block_s)
            rows = await self._take_rows(count)
        # A group that is held already became ready again in an older state of Redis: it is not returned again.
        wanted = [(group, n) for _, group, n in rows if group not in self.groups]
        groups = await read_groups(self._transport, wanted, taken=True) if wanted else []
        # Between the two reads Redis may have come back with an older state, in which a group is not ready yet.
        found = [group for group in groups if group is not None and group.phase in ("ready", "dropped")]
        self.groups |= {group.id: group for group in found}
        self._advance(rows)
        return found

    def _advance(self, rows: Sequence[tuple[str, str, int]]) -> None:
        for entry, group_id, _ in rows:
            if group_id not in self.groups:  # it is read again
                break
            self._held_up_to = entry
        self._last_seen = max([self._last_seen, *(entry for entry, _, _ in rows)], key=_entry_order)

    async def _take_rows(self, count: int) -> list[tuple[str, str, int]]:
        """Take rows until one is of a group that is not held, or none is left."""
        while (rows := await self._rows(count)) and all(group in self.groups for _, group, _ in rows):
            self._advance(rows)
        return rows

    async def _rows(self, count: int) -> list[tuple[str, str, int]]:
        try:
            return await self._fence.run(take_ready(self._fence.incarnation, count, self._held_up_to))
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._transport.recreate_groups()
            return []

    async def _wait(self, block_s: float) -> None:
        """Wait for an entry without taking it: an entry read by a replaced trainer would be lost to its successor."""
        seen: Any = {self._transport.names.ready: self._last_seen}
        try:
            reply: Any = await self._reader.xread(seen, count=1000, block=max(round(block_s * 1000), 1))
        except OUTAGE as error:
            self._transport.outages.report(error)
            return
        if entries := read_entries(reply):
            self._last_seen = entries[-1][0].decode()


def _entry_order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


class Fence:
    """Send a trainer's transitions."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.incarnation = 0
        """This trainer's number among those that took over the run; 0 before ``take_over``."""

    async def take_over(self, floor: int) -> None:
        """Become the run's trainer, with an incarnation above ``floor``."""
        self.incarnation = await self._transport.scripts.run(transitions.take_over(floor))

    async def run(self, call: Call[Answer]) -> Answer:
        """Run one transition; raise ``StaleIncarnationError`` once another trainer has taken over."""
        (answer,) = await self._transport.scripts.answers((call,))
        if answer == b"stale":
            raise StaleIncarnationError(
                f"a later trainer than incarnation {self.incarnation} has taken over the run "
                f"{self._transport.names.run}"
            )
        return call.read(answer)


@dataclass
class Ledger:
    """Count the admitted groups and their ends; ``evaluated`` are validation groups."""

    admitted: int = 0
    trained: int = 0
    evaluated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    open: int = 0

    @classmethod
    def from_counters(cls, counters: Mapping[str, int], num_open: int) -> Self:
        """Read the ledger from ``TrainerStreams.counters`` and the number of open groups."""
        reasons = {name.partition(":")[2]: n for name, n in counters.items() if name.startswith("dropped:")}
        return cls(
            admitted=counters.get("admitted", 0),
            trained=counters.get("trained", 0),
            evaluated=counters.get("evaluated", 0),
            dropped=reasons,
            open=num_open,
        )

    def counters(self) -> dict[str, int]:
        """Return the counters in the form that ``TrainerStreams.restore`` takes."""
        reasons = {f"dropped:{reason}": n for reason, n in self.dropped.items()}
        ends = {"admitted": self.admitted, "trained": self.trained, "evaluated": self.evaluated}
        return {**ends, "dropped": sum(self.dropped.values()), **reasons}

    def problems(self) -> list[str]:
        """Describe each inconsistency in a sentence; [] when every admitted group is accounted for."""
        found = []
        ended = self.trained + self.evaluated + sum(self.dropped.values())
        if self.admitted != ended + self.open:
            found.append(
                f"{self.admitted} groups were admitted, but {self.trained} trained + {self.evaluated} evaluated + "
                f"{sum(self.dropped.values())} dropped + {self.open} open = {ended + self.open}"
            )
        counts = {"admitted": self.admitted, "trained": self.trained, "evaluated": self.evaluated, "open": self.open}
        found += [f"{name} is {count}" for name, count in {**counts, **self.dropped}.items() if count < 0]
        return found


async def expire_run(transport: Transport, seconds: int) -> None:
    """Let all keys of a run expire. A user of Redis that may not do so is reported; the run has succeeded."""
    try:
        await transport.retry_through_outage(lambda: _expire(transport, seconds))
    except NoPermissionError as error:
        logger.warning("Redis keeps the keys of this run; delete them with plaudit runs delete", error=str(error))


async def _expire(transport: Transport, seconds: int) -> None:
    for key in await _keys(transport):
        await transport.commands.expire(key, seconds)


async def keep_run(transport: Transport) -> None:
    """Take the time to live from all keys of a run that is started again after its end."""
    if await transport.commands.ttl(transport.names.state) > 0:
        for key in await _keys(transport):
            await transport.commands.persist(key)


async def _keys(transport: Transport) -> list[bytes]:
    return [key async for key in transport.commands.scan_iter(f"{transport.names.prefix}*", count=_SCANNED_AT_ONCE)]
