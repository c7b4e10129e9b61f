"""Stored samples are found page by page: every matching sample once, in order, by any conditions."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plaudit_metrics.sources import search
from plaudit_metrics.sources.sample_schema import surviving_files
from plaudit_metrics.sources.samples import LISTED_COLUMNS, UnreadableFileError
from plaudit_metrics.sources.search import Place, SampleFile, SampleQuery, SampleSearch
from plaudit_workers.stored_samples import store_groups, write_samples

Row = dict[str, Any]

QUERIES = [
    SampleQuery(),
    SampleQuery(outcome="failed"),
    SampleQuery(outcome="timeout"),
    SampleQuery(lowest=0.25, highest=0.5, data_source="sums"),
    SampleQuery(group="g3", order="lowest"),
    SampleQuery(prompt_id="p1", order="highest"),
    SampleQuery(split="validation", lowest=-1.0),
    SampleQuery(data_source="no such source"),
]


def drawn_row(draw: random.Random, step: int, index: int) -> Row:
    score = draw.choice([None, 0.0, 0.25, 0.5, 1.0])
    return {
        "step": step,
        "group": f"g{index // 4}",
        "index": index % 4,
        "split": draw.choice(["train", "train", "validation"]),
        "data_source": draw.choice(["sums", "words"]),
        "prompt_id": f"p{index // 4 % 3}",
        "prompt": "1 + 1",
        "response": f"step {step} row {index}",
        "outcome": "scored" if score is not None else draw.choice(["timeout", "poison", None]),
        "score": score,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def stored(folder: Path) -> dict[int, list[Row]]:
    """Step → its rows, stored in ``folder``; steps of one row group and of several, and one without rows."""
    draw = random.Random(3)
    schema = pyarrow.parquet.read_schema(store_groups(folder / "empty", 1, 1, [], {}))
    sizes = {1: 5, 2: 600, 3: 0, 4: 256, 5: 257, 6: 1}
    rows = {step: [drawn_row(draw, step, index) for index in range(size)] for step, size in sizes.items()}
    for step, of_step in rows.items():
        write_samples(pyarrow.Table.from_pylist(of_step, schema=schema), folder / f"step-{step:06d}-i1.parquet")
    return rows


def matches(query: SampleQuery, row: Row) -> bool:
    score, outcome = row["score"], row["outcome"]
    return (
        (not query.outcome or outcome == query.outcome or (query.outcome == "failed" and outcome != "scored"))
        and (query.lowest is None or (score is not None and score >= query.lowest))
        and (query.highest is None or (score is not None and score <= query.highest))
        and all(
            row[name] == value
            for name in ("group", "data_source", "split", "prompt_id")
            if (value := getattr(query, name))
        )
    )


def expected(query: SampleQuery, stored: Mapping[int, list[Row]]) -> list[str]:
    found = []
    for step in sorted(stored, reverse=True):
        of_step = [row for row in stored[step] if matches(query, row)]
        sign = {"lowest": 1.0, "highest": -1.0}.get(query.order)
        if sign is not None:
            of_step.sort(key=lambda row: (row["score"] is None, sign * (row["score"] or 0.0)))
        found += [row["response"] for row in of_step]
    return found


@pytest.mark.alike
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(("most", "files", "size"), [(50, 128, 1 << 25), (7, 2, 1 << 25), (100, 128, 9_000)])
def test_the_pages_of_a_search_hold_each_matching_sample_once_in_order(
    stored: dict[int, list[Row]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    query: SampleQuery,
    most: int,
    files: int,
    size: int,
) -> None:
    monkeypatch.setattr(search, "MOST_FILES", files)
    monkeypatch.setattr(search, "MOST_BYTES", size)
    searched, found = SampleSearch(LISTED_COLUMNS), []
    start: Place | None = None
    for _ in itertools.count():
        page = searched.page(surviving_files(folder), query, start, most)
        assert len(page.rows) <= most
        found += [row["response"] for row in page.rows]
        start = page.next
        if start is None:
            break
    assert found == expected(query, stored)


def test_files_that_cannot_match_are_not_opened_twice(
    stored: dict[int, list[Row]], folder: Path, tmp_path: Path
) -> None:
    searched = SampleSearch(LISTED_COLUMNS)
    for path in surviving_files(folder).values():
        shutil.copy(path, tmp_path)
    files = surviving_files(tmp_path)
    query = SampleQuery(lowest=2.0)
    assert searched.page(files, query, None, 10).rows == []
    for path in files.values():
        path.unlink()
    assert searched.page({step: path for step, path in files.items() if stored[step]}, query, None, 10).next is None


def test_a_row_is_read_without_the_other_row_groups(stored: dict[int, list[Row]], folder: Path) -> None:
    with SampleFile(folder / "step-000002-i1.parquet", ["response"]) as file:
        whole = sum(file.cost_bytes(row) for row in (0, 256, 512))
        assert file.read(599)["response"] == "step 2 row 599"
        assert file.cost_bytes(599) == file.cost_bytes(512) == 0
        assert 0 < file.cost_bytes(0) < whole / 2


@pytest.mark.parametrize(
    ("incarnations", "surviving"),
    [
        ({1: [1, 2, 3]}, {1: 1, 2: 1, 3: 1}),
        ({1: [1, 2, 3, 4], 2: [3]}, {1: 1, 2: 1, 3: 2}),
        ({1: [1, 2, 3], 2: [3, 4, 5], 3: [5]}, {1: 1, 2: 1, 3: 2, 4: 2, 5: 3}),
        ({1: [1, 2, 3, 4], 2: [4, 5], 3: [2]}, {1: 1, 2: 3}),
        ({}, {}),
    ],
)
def test_files_of_steps_that_a_resume_rolled_back_are_left_out(
    tmp_path: Path, incarnations: dict[int, list[int]], surviving: dict[int, int]
) -> None:
    for incarnation, steps in incarnations.items():
        for step in steps:
            (tmp_path / f"step-{step:06d}-i{incarnation}.parquet").touch()
    (tmp_path / "step-000009-i1.parquet.tmp").touch()
    names = {step: f"step-{step:06d}-i{incarnation}.parquet" for step, incarnation in surviving.items()}
    assert {step: path.name for step, path in surviving_files(tmp_path).items()} == names


def _table_without_scores(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"group": ["g"]}), path)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: path.write_bytes(b"PAR1 torn"), "cannot be read"),
        (_table_without_scores, "it lacks outcome, score"),
    ],
)
def test_a_file_that_holds_no_samples_is_named(tmp_path: Path, write: Callable[[Path], Any], problem: str) -> None:
    path = tmp_path / "step-000001-i1.parquet"
    write(path)
    with pytest.raises(UnreadableFileError, match=f"step-000001-i1.parquet .*{problem}"):
        SampleFile(path)
