"""What the metrics service says of a scoring service, and a report and ``plaudit top`` of a run that failed."""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console

from plaudit_metrics.service.api import RunApi
from plaudit_metrics.service.series.run import SERVICE, RunInfo, RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.snapshot import RunSnapshot
from plaudit_metrics.sources.steps import KeptSteps, RunEnding, read_ending, write_ending
from plaudit_metrics.terminal.commands import report, report_arguments
from plaudit_metrics.terminal.overview import source_of
from plaudit_metrics.terminal.top import frame
from plaudit_wire.records import NO_STEP, SampleRecord, ScorerRecord
from stage_records import build_sample


def client_of(schedule: str, records: list[SampleRecord], now: float = 6130.0) -> httpx.AsyncClient:
    """Return a client of the API over these samples, at a point in time of their clock."""
    view = RunView(RunSeries(info=RunInfo("math", schedule, None)), KeptSteps())
    view.handle(list(records), True)
    view.observe(RunSnapshot(time=now, judge_requests={("big", "200"): 7}, judge_tokens={("big", "prompt"): 90}))
    transport = httpx.ASGITransport(RunApi("math", view, lambda: "").application())
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def scored(caller: str, number: int, *, score: float, outcome: str = "scored") -> SampleRecord:
    record: SampleRecord = build_sample(
        f"s:http.{caller}:job-{number}", step=NO_STEP, admitted=6000.0 + 30 * number, score=score, outcome=outcome
    )
    exact = ScorerRecord(record.scoring.outcome, record.scoring.value, call_s=score)
    scoring = msgspec.structs.replace(record.scoring, scorers={"exact": exact})
    return msgspec.structs.replace(record, scoring=scoring)


async def test_a_service_says_how_much_it_scores_for_whom_and_how_fast() -> None:
    records = [scored("alice", number, score=1.0 + number) for number in range(3)]
    records.append(scored("bob", 3, score=9.0, outcome="timeout"))
    async with client_of(SERVICE, records) as client:
        found = (await client.get("/api/v1/service")).json()
        assert (await client.get("/api/v1/queues")).json()["service"]
    assert [(each["caller"], each["samples"], each["unscored"]) for each in found["callers"]] == [
        ("alice", 3, 0),
        ("bob", 1, 1),
    ]
    assert found["callers"][0]["p50_s"] == 2.0
    assert found["outcomes"] == {"scored": 3, "timeout": 1}
    (scorer,) = found["scorers"]
    assert (scorer["scorer"], scorer["outcomes"], scorer["max_s"]) == ("exact", {"scored": 3, "timeout": 1}, 9.0)
    assert sum(minute["scored"] + minute["unscored"] for minute in found["minutes"]) == 4
    assert [(each["id"], each["outcome"]) for each in found["newest"]][:2] == [
        ("job-3", "timeout"),
        ("job-2", "scored"),
    ]
    assert found["judges"] == [
        {"judge": "big", "requests": {"200": 7}, "tokens": {"prompt": 90}, "circuit_open": False}
    ]


async def test_an_idle_service_scores_nothing_now() -> None:
    records = [scored("alice", number, score=1.0) for number in range(3)]
    async with client_of(SERVICE, records, now=6130.0 + 1800) as client:
        half_an_hour_later = (await client.get("/api/v1/service")).json()["minutes"]
    assert [each["scored"] for each in half_an_hour_later[:2]] == [2, 1]
    assert [each["scored"] for each in half_an_hour_later[2:]] == [0] * 31
    async with client_of(SERVICE, records, now=6130.0 + 5 * 3600) as client:
        later = (await client.get("/api/v1/service")).json()
    assert (later["samples"], len(later["minutes"])) == (3, 60)
    assert all(each["scored"] == 0 for each in later["minutes"])


async def test_a_run_that_trains_is_no_service() -> None:
    async with client_of("on-policy", [build_sample()]) as client:
        assert (await client.get("/api/v1/service")).json()["samples"] == 0
        assert not (await client.get("/api/v1/queues")).json()["service"]


@pytest.fixture
def failed_run(tmp_path: Path) -> Path:
    """A run that was refused before its first step."""
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "job.yaml").touch()
    write_ending(folder, RunEnding(2, "reward.py: SyntaxError <line 3>", 1_780_000_000.0))
    return folder


def test_the_reason_of_a_failed_run_is_in_its_report(failed_run: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    report_arguments(parser)
    assert report(parser.parse_args([str(failed_run), "-o", str(tmp_path / "digits.html")])) == 0
    html = (tmp_path / "digits.html").read_text()
    assert "reward.py: SyntaxError \\u003cline 3>" in html


def test_the_reason_of_a_failed_run_stands_first_in_top(failed_run: Path) -> None:
    console = Console(width=100, record=True)
    console.print(frame(source_of(str(failed_run), None, "runs").read()))
    assert "the run failed (2): reward.py: SyntaxError <line 3>" in console.export_text()
    write_ending(failed_run, RunEnding(130, "stopped; --resume continues", 6000.0))  # by its user
    console.print(frame(source_of(str(failed_run), None, "runs").read()))
    assert "the run was stopped (130): stopped; --resume continues" in console.export_text()


def test_a_run_that_goes_on_has_no_ending(failed_run: Path) -> None:
    write_ending(failed_run, None)
    assert read_ending(failed_run) is None
    write_ending(failed_run, None)
