"""The page shows what an auditor says as ``plaudit audit`` computes it, one click from the conversations."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plaudit_metrics.sources.audits import AuditHistory, append_audit, audits_file
from plaudit_metrics.sources.sample_schema import samples_file
from plaudit_metrics.sources.steps import RunEnding, append_step, write_ending
from plaudit_metrics.statistics.audits import AuditedGroup, AuditedSample
from plaudit_metrics.terminal.commands import report, report_arguments
from plaudit_wire.records import ScorerRecord
from plaudit_workers.launch.redis import RedisServer

Tab = Any
Site = Any
RunBuilder = Any
STEPS, GROUPS, SIZE = 6, 4, 4
WIDEST = (6, "t-26-1.0", 2)
"""The sample that the reward ranks highest and the auditor lowest: step, group, index."""
AUDITS = "document.querySelector('#audits section')"


@pytest.fixture
def audited(conversations: Path, built_run: RunBuilder, tmp_path: Path) -> Path:
    """A run whose groups have all been audited; the auditor falls while the reward rises."""
    folder = Path(shutil.copytree(conversations, tmp_path / conversations.name))
    drift = {"drift/judge/value": 0.2, "drift/judge/value_low": 0.1, "drift/judge/value_high": 0.3}
    record, *_ = built_run.steps[5]
    append_step(folder / "steps.jsonl", msgspec.structs.replace(record, statistics=record.statistics | drift))
    for step in range(1, STEPS + 1):
        for number in range(GROUPS):
            group = f"t-{step * GROUPS + number}-1.0"
            rewards = [step + 0.1 * index + 0.01 * number for index in range(SIZE)]
            values = [1.0 - 0.1 * step - 0.01 * index for index in range(SIZE)]
            if (step, group) == WIDEST[:2]:
                rewards[WIDEST[2]], values[WIDEST[2]] = 9.0, -3.0
            samples = [
                AuditedSample(index, rewards[index], {"honest": ScorerRecord("scored", values[index], "not asked for")})
                for index in range(SIZE)
            ]
            path = audits_file(folder, samples_file(folder / "samples", step, 1))
            append_audit(path, AuditedGroup(group, step, "sums", samples))
    return folder


def shows_the_auditor(tab: Tab, folder: Path) -> None:
    tab.until(AUDITS)
    (found,) = AuditHistory(folder).reports(20)
    assert found.late.value is not None
    text = tab.text("#audits section")
    assert f"{found.groups} groups audited" in text
    assert f"{found.late.value.value:.3f}".rstrip("0") in text
    tab.until("/reward [0-9.]+, honest /.test(document.querySelector('#audits .plot')?.ariaLabel)")
    tab.until("/judge 0.200/.test(document.querySelector('#drift .plot')?.ariaLabel)")
    assert tab.text("#audits a") == "step {} · {} #{}".format(*WIDEST)
    tab.ask("document.querySelector('#audits a').click()")
    tab.until("document.querySelectorAll('.message').length > 0 && /Auditors/.test(document.body.innerText)")
    assert "not asked for" in tab.text("main")
    assert tab.complaints == []


def test_the_live_page_leads_from_an_auditor_to_the_conversation(
    tab: Tab, audited: Path, make_site: Callable[..., Site]
) -> None:
    site = make_site([], audited)
    for width in (1280, 390):
        tab.look_like(width, 900)
        tab.open("about:blank")
        tab.open(site.url)
        shows_the_auditor(tab, audited)
        assert tab.ask("document.documentElement.scrollWidth") <= width


def test_a_report_leads_there_too(tab: Tab, audited: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    report_arguments(parser)
    output = tmp_path / "audited.html"
    assert report(parser.parse_args([str(audited), "-o", str(output)])) == 0
    tab.open(output.as_uri())
    shows_the_auditor(tab, audited)


@pytest.mark.long
def test_axe_finds_nothing_wrong_with_an_auditor(tab: Tab, audited: Path, make_site: Callable[..., Site]) -> None:
    tab.open(make_site([], audited).url)
    tab.until(AUDITS)
    tab.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert tab.axe() == []


def test_why_a_run_ended_stands_on_top_of_the_live_page(
    tab: Tab, tmp_path: Path, make_site: Callable[[Sequence[str], Path], Site]
) -> None:
    site = make_site([], tmp_path)
    tab.open(site.url)
    tab.until("document.querySelector('#content .now')?.innerText === 'The trainer is at work'")
    write_ending(tmp_path, RunEnding(3, "trainer-0: <b>the model</b> cannot be loaded", 1_780_000_000.0))
    tab.until("document.querySelector('.ended')")
    assert tab.text(".ended").startswith("The run failed\n\ntrainer-0: <b>the model</b> cannot be loaded")
    assert "The trainer is at work" not in tab.text("main")
    assert "will appear here" not in tab.text("main")
    assert tab.complaints == []


def test_while_redis_is_away_nothing_old_is_shown_as_new(
    tab: Tab, tmp_path: Path, make_site: Callable[..., Site]
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        site = make_site(["generation"], redis=server)
        site.queue("samples", 5)
        tab.open(site.url)
        tab.until("document.querySelector('[aria-label=\"In flight now\"]')?.innerText.includes('4')")
    tab.until("document.querySelector('#content .now')?.innerText.includes('Redis has not responded for')")
    tab.until("document.querySelector('#status').innerText === 'Redis does not respond'")
    assert tab.ask("document.querySelectorAll('[aria-label=\"In flight now\"], [aria-label=Processes]').length") == 0
    assert "nobody knows what is in work" in tab.text("main")
