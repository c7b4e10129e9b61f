"""Take groups from ``ready``: each is returned once, and stays pending until it is closed."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from plaudit_wire.logs import get_logger
from plaudit_wire.outage import OUTAGE
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group import Group
from plaudit_workers.stream.group_hash import read_groups
from plaudit_workers.stream.reply import read_entries
from plaudit_workers.stream.trainer.fence import Fence
from plaudit_workers.stream.transitions.trainer import take_ready

logger = get_logger(__name__)


class TakenGroups:
    """Hold the groups that one trainer has taken and not closed, as they were when taken, in the stream's order."""

    def __init__(self, transport: Transport, fence: Fence) -> None:
        self._transport = transport
        self._fence = fence
        self._reader = transport.blocking_client()
        self.groups: dict[str, Group] = {}
        self._entries: dict[str, str] = {}  # group → entry of `ready`
        self._last_seen = "0-0"

    def clear(self) -> None:
        """Forget all groups, so that they are returned again."""
        self.groups.clear()
        self._entries.clear()
        self._last_seen = "0-0"

    def may_end_as_trained(self, group_id: str) -> bool:
        """Return True if the group was taken in phase ``ready``; an older state of Redis does not change that."""
        group = self.groups.get(group_id)
        return group is not None and group.phase == "ready"

    def forget(self, group_id: str) -> None:
        """Remove a closed group."""
        self.groups.pop(group_id, None)
        self._entries.pop(group_id, None)

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
        for entry, group_id, _ in rows:
            if group_id in self.groups:
                self._entries[group_id] = entry
            self._last_seen = max(self._last_seen, entry, key=_entry_order)
        return found

    async def _take_rows(self, count: int) -> list[tuple[str, str, int]]:
        try:
            return await self._fence.run(take_ready(self._fence.incarnation, count, list(self._entries.values())))
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            logger.error("the streams' consumer groups are missing; creating them again", stream="ready")
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
