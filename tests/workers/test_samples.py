"""``plaudit samples``: the texts, scores and reasons of stored samples, on a terminal."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plaudit_workers.cli import main
from plaudit_workers.stored_samples import store_groups
from stored_conversations import write_conversations

Capture = pytest.CaptureFixture[str]


def row(
    step: int, index: int, score: float | None, response: str = "four", reason: str | None = None
) -> dict[str, Any]:
    outcome = "data_error" if score is None else "scored"
    return {
        "step": step,
        "group": f"g{step}",
        "index": index,
        "data_source": "sums",
        "prompt": "2 + 2",
        "response": response,
        "ground_truth_json": '"4"',
        "outcome": outcome,
        "score": score,
        "reason": reason,
        "scorer/mine/value": score,
        "scorer/mine/outcome": outcome,
        "scorer/mine/reason": reason,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two steps; its files have the columns that the trainer writes."""
    samples = tmp_path / "runs" / "j-1" / "samples"
    samples.mkdir(parents=True)
    columns = pyarrow.parquet.read_schema(store_groups(tmp_path, 1, 1, [], {})).names
    for step, rows in {
        1: [row(1, 0, 0.5), row(1, 1, None, "fo\x1b[2Jur [/x]", "KeyError: 'answer' (reward.py:2)")],
        2: [row(2, 0, -1.0), row(2, 1, 1.0)],
    }.items():
        table = pyarrow.Table.from_pylist([dict.fromkeys(columns) | each for each in rows])
        pyarrow.parquet.write_table(table, samples / f"step-{step:06d}-i1.parquet")
    return tmp_path / "runs" / "j-1"


def printed(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    assert main(["samples", run.name, "--runs-folder", str(run.parent), *arguments]) == 0
    return capsys.readouterr().out


def test_samples_are_found_by_the_outcome_of_one_scorer(run: Path, capsys: Capture) -> None:
    (file,) = (run / "samples").glob("step-000002-*")
    rows = pyarrow.parquet.read_table(file).to_pylist()
    rows[0] |= {
        "scorer/other/outcome": "data_error",
        "scorer/other/reason": "KeyError: 'x'",
        "scorer/other/value": None,
    }
    rows[1] |= {"scorer/other/outcome": "skipped", "scorer/other/reason": None, "scorer/other/value": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for condition in (["--failed"], ["--outcome", "data_error"]):
        shown = printed(capsys, run, "--scorer", "other", *condition)
        assert "group g2 sample 0" in shown
        assert "other: data_error: KeyError: 'x'" in shown
        assert shown.count("group g") == 1
    assert "group g2 sample 1" in printed(capsys, run, "--scorer", "other", "--outcome", "skipped")
    assert "no stored sample" in printed(capsys, run, "--scorer", "another", "--failed")
    assert main(["samples", run.name, "--runs-folder", str(run.parent), "--scorer", "other"]) == 2
    assert "--scorer names the scorer of --outcome or --failed" in capsys.readouterr().err


def test_failed_samples_come_with_reason_and_texts_that_cannot_control_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, run, "--failed").splitlines()
    assert lines == [
        "step 1 · group g1 sample 1 · sums · no score",
        "  reason: data_error: KeyError: 'answer' (reward.py:2)",
        "  mine: data_error: KeyError: 'answer' (reward.py:2)",
        "  prompt: 2 + 2",
        r"  response: fo\x1b[2Jur [/x]",
        "  ground truth: 4",
        "",
    ]


def test_the_lowest_scores_come_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, run, "--lowest", "-n", "2", "--json").splitlines()
    assert [json.loads(line)["score"] for line in shown] == [-1.0, 0.5]


def test_conditions_narrow_the_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scores(*arguments: str) -> list[float | None]:
        return [json.loads(line)["score"] for line in printed(capsys, run, "--json", *arguments).splitlines()]

    assert scores("--lowest-score", "0.5") == [0.5, 1.0]
    assert scores("--highest-score", "0.5", "--group", "g2") == [-1.0]
    assert scores("--outcome", "data_error") == [None]
    assert scores("--lowest", "--lowest-score", "0") == [0.5, 1.0]
    assert "no stored sample fulfils these conditions" in printed(capsys, run, "--data-source", "other")


def test_a_conversation_is_printed_turn_by_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_conversations(tmp_path / "runs" / "j-2")
    lines = printed(capsys, run, "--step", "6", "--group", "t-25-1.0", "-n", "1").splitlines()
    assert lines[0] == "step 6 · group t-25-1.0 sample 0 · products · score 0.9"
    assert "  judge: 1: The steps are shown; the result was compared., completion_tokens 87, verdict A" in lines
    shown = "\n".join(lines)
    assert re.search(
        r"  assistant \([\d.]+ s, reward 0\): I will compute this.\n    calls calculator \(ok, 0.3 s\)", shown
    )
    assert "  tool calculator: 912\n  assistant (0.6 s, reward 1): The answer is 912." in shown


def test_hostile_texts_are_printed_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(
        capsys, write_conversations(tmp_path / "runs" / "j-3"), "--step", "6", "--group", "hostile", "--full"
    )
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert r"\x1b[2J\x1b]0;title\x07 abc\u202etxt.exe\u202c" in shown


def test_a_step_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, run, "--step", "2", "--json").splitlines()
    assert [json.loads(line)["step"] for line in shown] == [2, 2]
    assert "every stored sample has a score" in printed(capsys, run, "--step", "2", "--failed")
    assert main(["samples", "j-1", "--runs-folder", str(run.parent), "--step", "7"]) == 2
    assert "--step 7: no samples of that step are stored (steps 1 to 2 are)" in capsys.readouterr().err


def test_the_validation_before_the_first_step_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples" / "step-000001-i1.parquet").rename(run / "samples" / "step-000000-i1.parquet")
    assert printed(capsys, run, "--step", "0").count("sample 0") == 1


def test_long_texts_are_cut_unless_they_are_wanted_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "samples" / "step-000001-i1.parquet"
    table = pyarrow.Table.from_pylist([row(1, 0, 0.5, "x" * 5000)])
    columns = {name: [None] for name in pyarrow.parquet.read_schema(file).names if name not in table.column_names}
    pyarrow.parquet.write_table(pyarrow.table({**table.to_pydict(), **columns}), file)
    assert f"response: {'x' * 1000}… (--full)\n" in printed(capsys, run, "--step", "1")
    assert "x" * 5000 in printed(capsys, run, "--step", "1", "--full")
    failed = row(1, 0, None, reason="Traceback" + "x" * 5000 + "HTTP Error 400")
    pyarrow.parquet.write_table(pyarrow.table({**pyarrow.Table.from_pylist([failed]).to_pydict(), **columns}), file)
    assert re.search(
        r"reason: data_error: Trace\w+… \(--full\) …x+HTTP Error 400\n", printed(capsys, run, "--step", "1")
    )
