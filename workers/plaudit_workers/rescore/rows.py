"""Read stored samples, a batch of rows at a time. ``training.run.stored_samples`` writes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow
import pyarrow.parquet

from plaudit_metrics.sources.samples.conversation import agent_of
from plaudit_metrics.sources.samples.files import surviving_files
from plaudit_wire.errors import RefusedError
from plaudit_wire.sample import Sample

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
_ADDED_COLUMNS = ["messages_json", "max_tokens", "completion_json", "agent_json"]
"""Columns that samples of older runs lack."""


class StoredSample(NamedTuple):
    """Hold a sample with its outcome and score in the run."""

    step: int
    sample: Sample
    outcome: str
    score: float | None


def samples_path(given: Path, runs: Path) -> Path:
    """Return the samples that a user means by a file, a folder of samples or of a run, or the id of a run."""
    if given.is_file() or any(given.glob("step-*.parquet")):
        return given
    for folder in (given / "samples", runs / given / "samples"):
        if folder.is_dir():
            return folder
    raise RefusedError(
        f"no stored samples of {given}: give a run's id (with --runs-folder, now {runs}), a run's folder, or a samples "
        "folder or file. A run stores samples unless metrics.keepSamples is false"
    )


def sample_files(path: Path) -> list[Path]:
    """Return the files of a run's samples by step, without those of steps that a resume rolled back."""
    if path.is_file():
        return [path]
    files = surviving_files(path)
    if not files:
        raise RefusedError(f"{path} has no stored samples yet: a run stores them when it closes its first step")
    return list(files.values())


def stored_groups(files: Iterable[Path]) -> Iterator[list[StoredSample]]:
    """Yield the samples of one group after the other, without those that were never generated.

    Raises:
        RefusedError: a file does not hold stored samples.
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
                    f"{file} does not hold stored samples: it lacks the columns {', '.join(sorted(missing))}"
                )
            added = [name for name in _ADDED_COLUMNS if name in opened.schema_arrow.names]
            for batch in opened.iter_batches(_ROWS_AT_A_TIME, columns=_COLUMNS + added):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"{file} cannot be read: {error}. Give the samples folder of a run") from error


def _stored(row: dict[str, Any]) -> StoredSample:
    agent = agent_of(row)
    sample = Sample(
        group=row["group"],
        index=row["index"],
        data_source=row["data_source"],
        prompt=row["prompt"],
        response=row["response"],
        ground_truth=msgspec.json.decode(row["ground_truth_json"]),
        extra_info=msgspec.json.decode(row["extra_info_json"]),
        messages=msgspec.json.decode(row.get("messages_json") or "[]"),
        response_tokens=row["response_tokens"] or 0,
        max_tokens=row.get("max_tokens") or 0,
        finish_reason=row["finish_reason"] or "stop",
        split=row["split"],
        completion=msgspec.json.decode(row.get("completion_json") or "[]"),
        tool_rewards=agent.tool_rewards,
        turn_rewards=agent.turn_rewards,
        agent_reward=agent.agent_reward,
        environment=agent.environment,
        failure=agent.failure,
    )
    return StoredSample(row["step"], sample, row["outcome"] or "given_up", row["score"])
