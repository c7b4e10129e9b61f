"""Store the samples of every closed group of a step as Parquet, one row a sample.

``plaudit_metrics.sources.sample_schema`` defines the files. The last file of a step that was interrupted in its middle
has all of its groups.

A reward service stores some groups with their results too, so that they can be audited as a trainer's are. A group that
auditors want waits in Redis after its end (``lua/shared/group.lua``). A worker takes some, writes them as one file, and
lets them go. Redis knows meanwhile which groups the file has, and its number, so that after a kill the same file is
written again. Files have numbers as a trainer's steps have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_metrics.sources.audits import audits_file
from plaudit_metrics.sources.sample_schema import (
    BOUNDED,
    FOLDER,
    ROW_GROUP,
    TEXT,
    group_columns,
    sample_columns,
    samples_file,
    samples_table,
    surviving_files,
)
from plaudit_metrics.statistics.audits import TREND_STEPS
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import RecordError
from plaudit_wire.records import GroupRecord
from plaudit_workers.files import whole_file
from plaudit_workers.stream.calls import let_go, take_kept
from plaudit_workers.stream.groups import Group, read_kept_group
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_GROUPS_OF_A_FILE = 64
_WITHIN_S = 20.0
"""A group waits no longer than this for others of its file."""
_INCARNATION = 1


def store_groups(
    folder: Path,
    step: int,
    incarnation: int,
    groups: Sequence[Group],
    records: Mapping[str, GroupRecord],
    begun_by: int = 0,
) -> Path:
    """Write the closed groups of a step.

    Args:
        groups: their hashes as read before they were closed.
        records: group id → how it ended.
        begun_by: the incarnation that stored the step's first groups, which come first in this file too; 0: none.
    """
    rows: list[dict[str, Any]] = []
    for group in groups:
        shared = {"step": step, "incarnation": incarnation, **group_columns(group.prompt, records[group.id])}
        for sample in group.samples:
            own = sample_columns(sample.stamps, sample.body, sample.scoring)
            rows.append(shared | own | {"index": sample.index, "deliveries": sample.deliveries})
    scorings = (sample.scoring for group in groups for sample in group.samples if sample.scoring is not None)
    table = samples_table(rows, scorings)
    target = samples_file(folder, step, incarnation)
    write_samples(_after(samples_file(folder, step, begun_by), table) if begun_by else table, target)
    return target


def _after(earlier: Path, table: pyarrow.Table) -> pyarrow.Table:
    """Put the rows of an earlier file before those of a table; a column that is text in one of them is text."""
    if not earlier.exists():  # no group of the step had ended
        return table
    try:
        tables = [pyarrow.parquet.read_table(earlier), table]
    except (OSError, pyarrow.ArrowException) as error:
        logger.warning("the step's first samples are unreadable", path=str(earlier), error=str(error))
        return table
    of_both = set(tables[0].column_names) & set(tables[1].column_names)
    for name in sorted(
        each for each in of_both if tables[0].schema.field(each).type != tables[1].schema.field(each).type
    ):
        tables = [each.set_column(each.column_names.index(name), name, each[name].cast(TEXT)) for each in tables]
    return pyarrow.concat_tables(tables, promote_options="default")


def write_samples(table: pyarrow.Table, target: Path) -> None:
    """Write stored samples so that single ones are read cheaply: in small row groups, with bounds to skip files by."""
    with whole_file(target) as temporary:
        pyarrow.parquet.write_table(
            table, temporary, compression="zstd", row_group_size=ROW_GROUP, write_statistics=BOUNDED
        )


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
