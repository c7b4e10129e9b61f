"""Store the samples of every closed group of a step as Parquet, one row a sample.

``plaudit_metrics.sources.sample_schema`` defines the files. The last file of a step that was interrupted in its middle
has all of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from plaudit_metrics.sources.sample_schema import (
    BOUNDED,
    ROW_GROUP,
    TEXT,
    group_columns,
    sample_columns,
    samples_file,
    samples_table,
)
from plaudit_wire.logs import get_logger
from plaudit_wire.records import GroupRecord
from plaudit_workers.files import whole_file
from plaudit_workers.stream.groups import Group

logger = get_logger(__name__)


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
