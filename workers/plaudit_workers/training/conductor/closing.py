"""Ends groups: first in the trainer's ledger, which is the authority, then in Redis. Used by the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from plaudit_wire.records import GroupEnd, GroupRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.training.run.state import Run, RunState


@dataclass(frozen=True)
class Ending:
    """How groups end."""

    end: GroupEnd
    step: int
    """The step they are closed in."""
    taken: float
    """When the trainer took them for that (server's clock)."""
    reason: str = ""
    """Why they are dropped; empty: each group's own reason."""
    again: bool = False
    """Their prompts are to be admitted again."""


async def end_groups(run: Run, state: RunState, groups: Sequence[Group], ending: Ending) -> list[GroupRecord]:
    """Ends groups that the trainer holds; returns their records, in the same order."""
    records = end_in_ledger(run, state, groups, ending)
    await close_groups(run, state, records)
    return records


def end_in_ledger(run: Run, state: RunState, groups: Sequence[Group], ending: Ending) -> list[GroupRecord]:
    """The first half of ``end_groups``; ``close_groups`` has to follow."""
    records = [group_record(group, ending, run.clock.now()) for group in groups]
    for record in records:
        state.ledger.end(record.group, record.end, record.reason, again=ending.again)
    state.closing += 1
    return records


async def close_groups(run: Run, state: RunState, records: Sequence[GroupRecord]) -> None:
    """The second half: Redis counts the ends and forgets the groups."""
    try:
        closed = await asyncio.gather(
            *(run.streams.close(record.group, record.end, record.reason, record) for record in records)
        )
    finally:
        state.closing -= 1
    if not all(closed):
        state.counters_suspect = True


async def end_unseen(run: Run, state: RunState, group_ids: Sequence[str], reason: str) -> None:
    """Drops groups in flight that the trainer does not hold."""
    for group_id in group_ids:
        state.ledger.end(group_id, "dropped", reason)
    await asyncio.gather(*(run.streams.close(group_id, "dropped", reason) for group_id in group_ids))


async def discard_group(run: Run, state: RunState, group_id: str) -> None:
    """Closes a group that the ledger has nothing (more) to do with; what Redis counts for it is put right later."""
    await run.streams.close(group_id, "dropped", "rolled_back")
    state.counters_suspect = True


async def correct_counters(run: Run, state: RunState) -> None:
    """Where Redis may count otherwise than the ledger, the ledger takes its place. No admission may be under way."""
    if state.counters_suspect and not state.closing:
        state.counters_suspect = False
        await run.streams.restore(state.ledger.counters(), state.version.number)


def group_record(group: Group, ending: Ending, closed: float) -> GroupRecord:
    """How a group went."""
    return GroupRecord(
        group=group.id,
        split=group.prompt.split,
        step=ending.step,
        end=ending.end,
        num_samples=len(group.samples),
        num_scored=sum(sample.scoring is not None and sample.scoring.value is not None for sample in group.samples),
        admitted=group.admitted,
        closed=closed,
        terminal=group.terminal,
        ready=group.ready,
        taken=ending.taken,
        reason=(ending.reason or group.reason or "unknown") if ending.end == "dropped" else "",
    )
