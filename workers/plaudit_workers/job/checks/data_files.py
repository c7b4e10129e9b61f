"""Looks into a data file that a job names: its columns, from the first rows only."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from plaudit_workers.job.problem import Problem

COLUMNS = ("data_source", "prompt", "reward_model")
"""What every row must have; ``extra_info`` and others may be there."""

_ROWS = 10
_NEEDED = "Rows need data_source, prompt (messages or text) and reward_model: {ground_truth: …}"


def data_problem(field: str, path: str) -> Problem | None:
    """What is wrong with a data file; None when nothing is.

    Args:
        field: the field of the job that names it.
        path: the file, absolute.
    """
    file = Path(path)
    if not file.is_file():
        words = f"{path} is a folder" if file.is_dir() else f"there is no file {path}"
        return Problem(field, words, "Write the data first, or mend the path: it is relative to the job file")
    readers = {".parquet": _parquet_complaint, ".jsonl": _jsonl_complaint}
    reader = readers.get(file.suffix)
    if reader is None:
        return Problem(field, f"{path} ends with {file.suffix!r}", "Give a .parquet or a .jsonl file")
    try:
        complaint = reader(file)
    except OSError as error:
        return Problem(field, f"{path} cannot be read: {error.strerror or error}", "Write the file anew")
    return Problem(field, f"{path} {complaint}", _NEEDED) if complaint else None


class _Row(msgspec.Struct):
    """What is looked at of every row."""

    data_source: str


def data_sources(path: str) -> set[str]:
    """The data sources of all rows of a file in which ``data_problem`` sees nothing wrong."""
    if path.endswith(".parquet"):
        import pyarrow.compute
        import pyarrow.parquet

        column = pyarrow.parquet.read_table(path, columns=["data_source"]).column("data_source")
        return set(pyarrow.compute.unique(column).to_pylist())
    decode = msgspec.json.Decoder(_Row).decode
    with Path(path).open("rb") as lines:
        return {decode(line).data_source for line in lines if line.strip()}


def _parquet_complaint(file: Path) -> str | None:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
    except pyarrow.ArrowInvalid:
        return "is no Parquet file"
    if metadata.num_rows == 0:
        return "has no rows"
    schema = metadata.schema.to_arrow_schema()
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        return f"lacks {_columns(missing)} (it has {', '.join(schema.names)})"
    reward_model = schema.field("reward_model").type
    if not pyarrow.types.is_struct(reward_model) or reward_model.get_field_index("ground_truth") < 0:
        return f"has reward_model as {reward_model}, without ground_truth"
    return None


def _jsonl_complaint(file: Path) -> str | None:
    with file.open("rb") as lines:
        first = [line for line in islice(lines, _ROWS) if line.strip()]
    if not first:
        return "has no rows"
    return next(
        (complaint for number, line in enumerate(first, 1) if (complaint := _row_complaint(number, line))), None
    )


def _row_complaint(number: int, line: bytes) -> str | None:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        return f"has no JSON in row {number}: {error}"
    if not isinstance(row, dict):
        return f"has no object in row {number}"
    missing = [name for name in COLUMNS if name not in row]
    if missing:
        return f"lacks {_columns(missing)} in row {number} (it has {', '.join(row)})"
    if not isinstance(row["reward_model"], dict) or "ground_truth" not in row["reward_model"]:
        return f"has reward_model without ground_truth in row {number}"
    return None


def _columns(names: list[str]) -> str:
    return f"column {names[0]}" if len(names) == 1 else f"columns {', '.join(names)}"
