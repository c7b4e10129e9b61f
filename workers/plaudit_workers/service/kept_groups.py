"""Store some groups of a reward service with their results, so that they can be audited as a trainer's groups are.

A group that auditors want waits in Redis after its end (``lua/shared/group.lua``). A worker takes some, writes them as
one file of stored samples, and lets them go. Redis knows meanwhile which groups the file has, and its number, so that
after a kill the same file is written again. Files have numbers as a trainer's steps have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from plaudit_metrics.sources.audits import audits_file
from plaudit_metrics.sources.sample_schema import FOLDER, surviving_files
from plaudit_metrics.statistics.audits import TREND_STEPS
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import RecordError
from plaudit_wire.records import GroupRecord
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.calls import let_go, take_kept
from plaudit_workers.stream.groups import Group, read_kept_group
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_GROUPS_OF_A_FILE = 64
_WITHIN_S = 20.0
"""A group waits no longer than this for others of its file."""
_INCARNATION = 1


class KeptGroups:
    """The groups of one service that wait to be stored in its folder."""

    def __init__(self, transport: Transport, run_folder: Path) -> None:
        self._transport = transport
        self._run_folder = run_folder

    async def store(self, newest: int) -> bool:
        """Store a file of what has waited, and return True; False if nothing has waited long enough.

        A file whose writing was cut off is written again as it was.

        Args:
            newest: number of the newest file there is; 0: none.
        """
        taken = await self._transport.scripts.run(take_kept(_GROUPS_OF_A_FILE, _WITHIN_S, newest + 1))
        if taken is None:
            return False
        file, names = taken
        groups = [await self._read(name) for name in names]
        if None not in groups:  # else another worker has stored them, or Redis has lost them
            await asyncio.to_thread(self._write, file, [group for group in groups if isinstance(group, Group)])
        await self._transport.scripts.run(let_go(file))
        return True

    async def _read(self, name: str) -> Group | RecordError | None:
        try:
            return await read_kept_group(self._transport, name)
        except RecordError as error:
            logger.error("cannot read a group for auditors", group=name, error=str(error))
            return error

    def _write(self, file: int, groups: Sequence[Group]) -> None:
        """Write the samples of a file; remove the oldest files, which no figure covers any more."""
        folder = self._run_folder / FOLDER
        records = {group.id: _record(group, file) for group in groups}
        store_groups(folder, file, _INCARNATION, [_with_task(group) for group in groups], records)
        for old in list(surviving_files(folder).values())[:-TREND_STEPS]:
            audits_file(self._run_folder, old).unlink(missing_ok=True)
            old.unlink(missing_ok=True)


def _record(group: Group, file: int) -> GroupRecord:
    num_scored = sum(sample.scoring is not None and sample.scoring.is_scored for sample in group.samples)
    ended = max((sample.stamps.committed or group.admitted for sample in group.samples), default=group.admitted)
    return GroupRecord(
        group.id, "train", file, "returned", len(group.samples), num_scored, group.admitted, ended, group.terminal
    )


def _with_task(group: Group) -> Group:
    """Return a group with the task of its samples in its prompt, where stored samples have it."""
    body = next((sample.body for sample in group.samples if sample.body is not None), None)
    if body is None:
        return group
    first = body.sample
    prompt = msgspec.structs.replace(
        group.prompt, ground_truth=first.ground_truth, extra_info=first.extra_info, messages=first.messages
    )
    return msgspec.structs.replace(group, prompt=prompt)
