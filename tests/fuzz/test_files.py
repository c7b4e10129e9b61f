"""The doors of files: a job's file and files of samples are read, or refused with what is wrong."""

from __future__ import annotations

import io
import itertools
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import job_document
from outside_values import BODIES, TEXTS, VALUES, with_member
from plaudit_job.load import examine_job
from plaudit_job.problem import JobError
from plaudit_workers.cli import main

quietly = settings(suppress_health_check=list(HealthCheck))
JOBS = [path.read_text() for path in sorted((Path(__file__).parents[2] / "examples").glob("*/job.yaml"))]
ALIASES = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklmnopqrstuv")
)
SCORER = {"name": "mine", "kind": "python", "python": {"path": "reward.py"}, "isolation": "thread"}
JOB = job_document("files", reward={"scorers": [SCORER], "workers": {"processes": 1}})
ROW = {"response": "4", "ground_truth": "4", "data_source": "plain", "extra_info": {"n": 1}, "prompt": "2 + 2?"}
ROWS = st.lists(st.just(ROW) | with_member(ROW), min_size=1, max_size=3)


def _paths(node: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [here, *(path for name, value in inner for path in _paths(value, (*here, name)))]


@st.composite
def job_texts(draw: st.DrawFn) -> str:
    """A job of the examples in which one value, or a few characters, are others."""
    text = draw(st.sampled_from(JOBS))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text)))
        inserted = draw(TEXTS | st.sampled_from(["*a", "&a ", "!!python/object ", "\t", "? ", "<<: ", ": [", ALIASES]))
        return text[:at] + inserted + text[at + draw(st.integers(0, 20)) :]
    job = yaml.safe_load(text)
    *way, last = draw(st.sampled_from(_paths(job)[1:]))
    section = job
    for part in way:
        section = section[part]
    section[last] = draw(VALUES)
    return json.dumps(job)


@quietly
@given(job_texts() | BODIES.map(lambda body: body.decode(errors="replace")) | st.just(ALIASES))
def test_a_job_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-job.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        said = list(map(str, examine_job(path).problems))
    except JobError as error:
        said = [str(error)]
    assert all(said)


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_jq(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False, indent=None) for row in rows).encode("utf-8", "replace")


def with_bom(rows: list[dict[str, Any]]) -> bytes:
    return b"\xef\xbb\xbf" + as_jq(rows)


def by_pyarrow(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written)
    return written.getvalue()


def with_dictionary(rows: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(rows)
    column = table.schema.get_field_index("response")
    written = io.BytesIO()
    pq.write_table(table.set_column(column, "response", table["response"].dictionary_encode()), written)
    return written.getvalue()


def as_pandas(rows: list[dict[str, Any]]) -> bytes:
    """As pandas writes: NaN where a value is missing, its own types of time, large texts, and the index as a column."""
    table = pa.Table.from_pylist(rows)
    more = {
        "score": pa.array([float("nan")] * len(rows)),
        "when": pa.array([1] * len(rows), pa.timestamp("ns", "UTC")),
        "span": pa.array([1] * len(rows), pa.duration("ns")),
        "kind": pa.array(["a"] * len(rows), pa.large_string()),
        "__index_level_0__": pa.array(range(len(rows))),
    }
    for name, column in more.items():
        table = table.append_column(name, column)
    written = io.BytesIO()
    pq.write_table(table, written)
    return written.getvalue()


WRITERS = {
    ".jsonl": [as_lines, as_jq, with_bom],
    ".parquet": [by_pyarrow, with_dictionary, as_pandas],
}
FILES = st.sampled_from([(suffix, writer) for suffix, writers in WRITERS.items() for writer in writers])


@quietly
@given(ROWS, FILES, st.integers(0, 200), st.booleans())
def test_a_file_of_samples_is_scored_or_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], file: tuple[str, Any], at: int, torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    suffix, write = file
    try:
        content = write(rows)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError, AttributeError):
        return  # the library itself writes no such file
    (folder / f"rows{suffix}").write_bytes(content[:at] if torn else content)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0"
    )
    (folder / "job.yaml").write_text(json.dumps(JOB))
    output = folder / "scores.jsonl"
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = main(
            [
                "score",
                "--job",
                str(folder / "job.yaml"),
                "--input",
                str(folder / f"rows{suffix}"),
                "--output",
                str(output),
            ]
        )
    assert code in {0, 1, 2}, said.getvalue()
    assert "Traceback" not in said.getvalue()
    if code == 0:
        scored = [json.loads(line) for line in output.read_bytes().splitlines()]
        assert torn or len(scored) == len(rows)
    else:
        assert said.getvalue().strip()
