"""Reads stored samples, a batch of rows at a time. Written by ``training.store``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_wire.sample import Sample
from plaudit_workers.process import RefusedError

_NAME = re.compile(r"step-(\d+)-i(\d+)\.parquet")
_ROWS_AT_A_TIME = 256
_COLUMNS = [
    "step",
    "group",
    "index",
    "split",
    "data_source",
    "prompt",
    "response",
    "ground_truth_json",
    "extra_info_json",
    "response_tokens",
    "finish_reason",
    "outcome",
    "score",
]


class StoredSample(NamedTuple):
    """A sample and what it was scored in its run."""

    step: int
    sample: Sample
    outcome: str
    score: float | None


def sample_files(path: Path) -> list[Path]:
    """The files of a run's samples, by step; of a step that was trained again after a resume, the newest.

    Args:
        path: the run's ``samples`` folder, or one file.

    Raises:
        RefusedError: there are none.
    """
    if path.is_file():
        return [path]
    newest: dict[int, tuple[int, Path]] = {}
    for file in path.glob("step-*.parquet"):
        if found := _NAME.fullmatch(file.name):
            step, incarnation = int(found[1]), int(found[2])
            newest[step] = max(newest.get(step, (-1, file)), (incarnation, file))
    if not newest:
        raise RefusedError(
            f"{path} holds no stored samples (step-000001-i1.parquet, …): give the samples folder of a run, or one "
            "file. A run stores them unless metrics.keepSamples is false"
        )
    return [newest[step][1] for step in sorted(newest)]


def stored_groups(files: Iterable[Path]) -> Iterator[list[StoredSample]]:
    """The samples of one group after the other; those that were never generated are left out.

    Raises:
        RefusedError: a file is not one of stored samples.
    """
    rows = (row for file in files for row in _rows(file))
    for _, group in itertools.groupby(rows, lambda row: (row["step"], row["group"])):
        stored = [_stored(row) for row in group if row["response"] is not None]
        if stored:
            yield stored


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            missing = set(_COLUMNS) - set(opened.schema_arrow.names)
            if missing:
                raise RefusedError(
                    f"{file} holds no stored samples of Plaudit: columns {', '.join(sorted(missing))} are missing"
                )
            for batch in opened.iter_batches(_ROWS_AT_A_TIME, columns=_COLUMNS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"{file} cannot be read: {error}. Give the samples folder of a run") from error


def _stored(row: dict[str, Any]) -> StoredSample:
    sample = Sample(
        group=row["group"],
        index=row["index"],
        data_source=row["data_source"],
        prompt=row["prompt"],
        response=row["response"],
        ground_truth=msgspec.json.decode(row["ground_truth_json"]),
        extra_info=msgspec.json.decode(row["extra_info_json"]),
        response_tokens=row["response_tokens"] or 0,
        finish_reason=row["finish_reason"] or "stop",
        split=row["split"],
    )
    return StoredSample(row["step"], sample, row["outcome"] or "given_up", row["score"])
