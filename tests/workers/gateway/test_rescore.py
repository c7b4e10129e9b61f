"""``plaudit rescore``: stored samples are scored by a reward service, and a killed command continues."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plaudit_metrics.sources.sample_schema import COLUMNS
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import ScoringRecord
from plaudit_workers.cli import EXIT_REFUSED, main
from plaudit_workers.commands.rescore_rows import Progress, scorers_of_service

TOKEN = "token-of-one-caller"
RIGHT, WRONG = "4", "5"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """60 samples in groups of 4; every second one is right."""
    about = {"split": "train", "data_source": "d", "prompt": "?", "extra_info_json": "{}", "step": 1}
    about |= {"outcome": "scored", "score": 1.0, "ground_truth_json": f'"{RIGHT}"'}
    rows = [
        {**about, "group": f"g{number}", "index": index, "response": WRONG if index % 2 else RIGHT}
        for number in range(15)
        for index in range(4)
    ]
    file = tmp_path / "step-000001-i1.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(COLUMNS)), file)
    return file


async def test_a_service_scores_stored_samples(
    start_service: Any,
    start_gateway: Any,
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLAUDIT_TOKEN", TOKEN)
    output = stored.with_name("again.jsonl")
    async with start_service() as service, start_gateway(service) as gateway:
        command = ["rescore", str(stored), "--url", gateway.url, "--json", "-o", str(output)]
        assert await asyncio.to_thread(main, command) == 0
        monkeypatch.setenv("PLAUDIT_TOKEN", "wrong")
        assert await asyncio.to_thread(main, command) == EXIT_REFUSED
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["samples"], summary["mean_before"], summary["mean_after"]) == (60, 1.0, 0.5)
    assert "token" in captured.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["score"] for row in rows] == [float(row["response"] == RIGHT) for row in rows]
    assert [(row["group"], row["index"]) for row in rows] == [(f"g{n}", i) for n in range(15) for i in range(4)]
    assert "scorer/right/value" in rows[0]
    assert not output.with_name("again.jsonl.progress").exists()


async def test_a_service_with_group_scorers_gets_whole_groups(
    start_service: Any, start_gateway: Any, stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PLAUDIT_TOKEN", TOKEN)
    share = {"name": "share", "kind": "python", "scope": "group", "python": {"path": "reward.py", "function": "share"}}
    async with start_service(share) as service, start_gateway(service) as gateway:
        assert await asyncio.to_thread(main, ["rescore", str(stored), "--url", gateway.url, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["scored_both"], summary["mean_after"]) == (60, 0.25)


async def test_scores_of_two_versions_of_a_service_are_never_mixed(
    start_service: Any, start_gateway: Any, stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PLAUDIT_TOKEN", TOKEN)
    output = stored.with_name("again.jsonl")
    async with start_service() as service, start_gateway(service) as gateway:
        async with scorers_of_service(gateway.url, TOKEN) as scorers:
            head = scorers.version
        kept = output.with_name("again.jsonl.progress")
        with Progress(output, str(stored), head) as progress:
            progress.keep("1/g0/0", [ScoringRecord("scored", 1.0, version="earlier")])
            unfinished = kept.read_bytes()
        kept.write_bytes(unfinished)  # as after a kill
        command = ["rescore", str(stored), "--url", gateway.url, "-o", str(output)]
        assert await asyncio.to_thread(main, command) == EXIT_REFUSED
    refused = capsys.readouterr().err
    assert "the service's scorers have changed: samples so far were scored by version earlier, the next by " in refused
    assert f"Delete {output}.progress to score all samples anew" in refused
    assert not output.exists()


def test_a_service_whose_scorers_have_changed_gets_no_sample_and_may_be_changed_back(tmp_path: Path) -> None:
    output = tmp_path / "again.jsonl"
    kept_in = output.with_name("again.jsonl.progress")
    with Progress(output, "samples", "head", "former") as progress:
        first = progress.attempt
        progress.keep("1/g0/0", [ScoringRecord("scored", 1.0, version="former")])
        unfinished = kept_in.read_bytes()
    kept_in.write_bytes(unfinished)  # as after a kill
    with Progress(output, "samples", "head", "changed") as progress:
        with pytest.raises(RefusedError, match="by version former, the next by changed"):
            progress.scored("1/g0/0", 1)
        unfinished = kept_in.read_bytes()
    kept_in.write_bytes(unfinished)
    with Progress(output, "samples", "head", "former") as progress:
        kept = progress.scored("1/g0/0", 1)
        assert kept is not None
        assert kept[0].version == "former"
        assert progress.attempt != first  # under whose ids the changed service may have scored


def test_the_stored_samples_are_no_output(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stored.parent / "job.yaml").write_text(JOB)
    (stored.parent / "counted.py").write_text(COUNTED)
    linked, before = stored.with_name("linked.parquet"), stored.read_bytes()
    linked.hardlink_to(stored)
    for output in (stored, linked):
        assert (
            main(["rescore", str(stored), "--job", str(stored.parent / "job.yaml"), "-o", str(output)]) == EXIT_REFUSED
        )
        assert f"--output {output} is the input {stored}" in capsys.readouterr().err
    assert stored.read_bytes() == before


COUNTED = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1)
    with pathlib.Path(__file__).with_name("calls").open("a") as calls:
        calls.write("x")
    return float(solution_str == ground_truth)
"""
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: again}
spec:
  reward:
    workers: {processes: 1, maxConcurrentSamples: 2}
    scorers: [{name: counted, kind: python, python: {path: counted.py, function: compute_score}}]
"""


@pytest.mark.long
def test_a_killed_command_continues(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored.parent
    (folder / "counted.py").write_text(COUNTED)
    (folder / "job.yaml").write_text(JOB)
    output, progress = folder / "again.parquet", folder / "again.parquet.progress"
    command = ["rescore", str(stored), "--job", str(folder / "job.yaml"), "-o", str(output), "--json"]
    process = subprocess.Popen([sys.executable, "-m", "plaudit_workers.cli", *command], start_new_session=True)
    wait_for(lambda: progress.exists() and progress.read_bytes().count(b"\n") > 10)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()
    kept = progress.read_bytes().count(b"\n") - 1
    progress.write_bytes(progress.read_bytes() + b'{"id":"1/g')  # a kill cuts a line
    calls_before = len((folder / "calls").read_text())

    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["mean_after"] == 0.5
    assert len((folder / "calls").read_text()) - calls_before == 60 - kept
    assert pyarrow.parquet.read_table(output).num_rows == 60
    assert not progress.exists()


def test_progress_of_other_scorers_is_refused(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored.parent
    (folder / "counted.py").write_text(COUNTED)
    (folder / "job.yaml").write_text(JOB)
    progress = folder / "again.jsonl.progress"
    progress.write_text(json.dumps({"samples": str(stored), "version": "other", "attempt": "a"}) + "\n")
    command = ["rescore", str(stored), "--job", str(folder / "job.yaml"), "-o", str(folder / "again.jsonl")]
    assert main(command) == EXIT_REFUSED
    assert "unfinished rescore of other scorers (other, now" in capsys.readouterr().err
    assert progress.exists()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
