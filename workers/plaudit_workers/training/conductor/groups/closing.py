"""End groups: first in the trainer's ledger, which is authoritative, then in Redis. Used by the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from plaudit_wire.records import GroupEnd, GroupRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.training.run.state import RunContext, RunState


@dataclass(frozen=True)
class GroupEnding:
    """Describe how some groups end."""

    end: GroupEnd
    step: int
    """The step in which they are closed."""
    taken: float
    """When the trainer took them (server's clock)."""
    reason: str = ""
    """Cause of the drop; empty: each group's own reason."""
    again: bool = False
    """Their prompts are admitted again."""


async def end_groups(
    run: RunContext, state: RunState, groups: Sequence[Group], ending: GroupEnding
) -> list[GroupRecord]:
    """End groups that the trainer holds; return their records, in the same order."""
    records = end_in_ledger(run, state, groups, ending)
    await close_groups(run, state, records)
    return records


def end_in_ledger(run: RunContext, state: RunState, groups: Sequence[Group], ending: GroupEnding) -> list[GroupRecord]:
    """End groups in the ledger; ``close_groups`` has to follow."""
    records = [group_record(group, ending, run.clock.now()) for group in groups]
    for record in records:
        state.ledger.end(record.group, record.end, record.reason, again=ending.again)
    state.closing += 1
    return records


async def close_groups(run: RunContext, state: RunState, records: Sequence[GroupRecord]) -> None:
    """Close groups in Redis, which counts the ends and frees the memory."""
    try:
        closed = await asyncio.gather(
            *(run.streams.close(record.group, record.end, record.reason, record) for record in records)
        )
    finally:
        state.closing -= 1
    if not all(closed):
        state.counters_suspect = True


async def end_unseen(run: RunContext, state: RunState, group_ids: Sequence[str], reason: str) -> None:
    """Drop groups in flight that the trainer does not hold."""
    for group_id in group_ids:
        state.ledger.end(group_id, "dropped", reason)
    await asyncio.gather(*(run.streams.close(group_id, "dropped", reason) for group_id in group_ids))


async def discard_group(run: RunContext, state: RunState, group_id: str) -> None:
    """Close a group that is not in the ledger; Redis's counters are corrected later."""
    await run.streams.close(group_id, "dropped", "rolled_back")
    state.counters_suspect = True


async def correct_counters(run: RunContext, state: RunState) -> None:
    """Restore Redis's counters from the ledger if they may differ. No admission may be in progress."""
    if state.counters_suspect and not state.closing:
        state.counters_suspect = False
        await run.streams.restore(state.ledger.counters(), state.version.number)


def group_record(group: Group, ending: GroupEnding, closed: float) -> GroupRecord:
    """Describe the course of a group."""
    return GroupRecord(
        group=group.id,
        split=group.prompt.split,
        step=ending.step,
        end=ending.end,
        num_samples=len(group.samples),
        num_scored=sum(sample.scoring is not None and sample.scoring.is_scored for sample in group.samples),
        admitted=group.admitted,
        closed=closed,
        terminal=group.terminal,
        ready=group.ready,
        taken=ending.taken,
        reason=(ending.reason or group.reason or "unknown") if ending.end == "dropped" else "",
    )
