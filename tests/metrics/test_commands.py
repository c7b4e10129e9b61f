"""``plaudit steps`` and ``plaudit trace`` tell of a run what the trainer wrote into its folder."""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import make_group, make_sample_record
from plaudit_metrics.sources.samples import read_step_samples
from plaudit_metrics.sources.steps import append_step
from plaudit_metrics.statistics.steps import step_record
from plaudit_metrics.terminal.commands import steps, steps_arguments, trace, trace_arguments
from plaudit_wire.records import GroupRecord, SampleRecord, ScorerRecord, ScoringRecord, Stamps
from plaudit_workers.cli import main
from plaudit_workers.stored_samples import store_groups
from stage_records import build_group, build_sample

Build = Callable[..., Any]
ID = "t-0-1.0"


@pytest.fixture
def samples() -> list[SampleRecord]:
    """Two scored samples and one that was never generated."""
    scorers = {
        "judge": ScorerRecord(
            "scored",
            0.5,
            "well said",
            limiter_s=1.0,
            call_s=2.0,
            wait_s=0.5,
            attempts=2,
            extra={"acc": 1.0, "answer": "score: 5"},
        )
    }
    scored = [
        build_sample(ID, index, generation=2.0, limiter=1.0, score=2.0 + index, scorers=scorers) for index in range(2)
    ]
    admitted = scored[0].stamps.admitted
    stamps = Stamps(admitted, committed=admitted + 30.0)
    given_up = ScoringRecord("given_up", reason="the deadline passed")
    return [*scored, make_sample_record(stamps, given_up, index=2, deliveries=0)]


@pytest.fixture
def run(tmp_path: Path, samples: list[SampleRecord]) -> Path:
    """The folder of a run of one step, as the trainer leaves it."""
    folder = tmp_path / "runs" / "demo-1"
    (folder / "samples").mkdir(parents=True)
    record: GroupRecord = build_group(samples, num_scored=2)
    store_groups(folder / "samples", 1, 1, [make_group(record, samples)], {ID: record})
    opened = samples[0].stamps.admitted
    append_step(
        folder / "steps.jsonl", step_record(1, 1, samples, groups=[record], opened=opened, closed=opened + 40.0)
    )
    return folder


def parsed(add_arguments: Callable[[argparse.ArgumentParser], None], *texts: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(texts)


def test_stored_samples_come_back_as_the_records_they_were(run: Path, samples: list[SampleRecord]) -> None:
    stored = read_step_samples(run, 1, 1)
    assert stored.samples == samples
    assert stored.groups == [build_group(samples, num_scored=2)]


def test_steps_are_shown_as_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(parsed(steps_arguments, "demo-1", "--runs-folder", str(run.parent))) == 0
    heading, row, reasons = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["step", "reward"]
    assert row.split()[0] == "1"
    assert row.split()[-1] == "trainer"
    assert "33.3%" in row
    assert reasons == "(no scorer): 1 × the deadline passed"


def test_steps_are_printed_in_full_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(parsed(steps_arguments, str(run), "--json")) == 0
    (step,) = json.loads(capsys.readouterr().out)
    assert step["reward/mean"] == 1.0
    assert step["reward_pipeline/scorer/judge/value/mean"] == 0.5


def test_steps_are_printed_in_full_as_csv(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(parsed(steps_arguments, str(run), "--csv")) == 0
    (step,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert float(step["reward/mean"]) == 1.0
    assert step["verdict"] == "trainer"


def test_a_steps_timeline_is_written_to_a_file(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    assert trace(parsed(trace_arguments, str(run), "--step", "1", "-o", str(output))) == 0
    drawn = json.loads(output.read_text())["traceEvents"]
    assert sorted(event["dur"] / 1e6 for event in drawn if event["name"] == "score") == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (steps, parsed(steps_arguments, "nobody"), "no run 'nobody'"),
        (trace, parsed(trace_arguments, "nobody", "--step", "1"), "no run 'nobody'"),
    ],
)
def test_an_unknown_run_is_named(
    command: Build, arguments: argparse.Namespace, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_step_that_is_not_closed_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace(parsed(trace_arguments, str(run), "--step", "7")) == 2
    assert "has no closed step 7" in capsys.readouterr().err


def test_a_run_without_stored_samples_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stored in (run / "samples").iterdir():
        stored.unlink()
    assert trace(parsed(trace_arguments, str(run), "--step", "1")) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("no samples of step 1 are stored")
    assert "step-000001-i1.parquet" in complaint


@pytest.mark.alike
@pytest.mark.parametrize("command", [["report"], ["trace", "--step", "1"]], ids=lambda each: each[0])
def test_a_file_that_cannot_be_written_is_named_with_the_remedy(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Of a full disk the system does not say which file it was."""
    for output, words in (("/no/such/file", "No such file or directory. Correct the path"), ("/dev/full", "Make room")):
        assert main([*command, str(run), "-o", output]) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith(f"plaudit {command[0]}: {output}: ")
        assert words in complaint
    monkeypatch.chdir(run)
    (default := run / f"{run.name}{'.html' if command == ['report'] else '-step-1.json'}").symlink_to("/dev/full")
    assert main([*command, str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"plaudit {command[0]}: {default.name}: No space left on device")


@pytest.mark.long
def test_a_closed_pipe_ends_the_table_of_steps_quietly(run: Path) -> None:
    program = f"{sys.executable} -m plaudit_workers.cli steps {run} --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("141", "")
