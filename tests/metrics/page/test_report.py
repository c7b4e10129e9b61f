"""A report is the page in one file: it opens without a service, tells of unfinished runs, and fetches nothing."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from builders import make_group
from plaudit_metrics.sources.steps import append_step
from plaudit_metrics.terminal.commands import report, report_arguments
from plaudit_workers.stored_samples import store_groups

Tab = Any
RunBuilder = Any
LEDGER = {"admitted": 100, "trained": 93, "evaluated": 2, "dropped": 3, "dropped:too_few_scored": 3, "open": 2}


@pytest.fixture(scope="session")
def run_folder(built_run: RunBuilder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that goes on: its last line is torn, its last samples are stored."""
    folder = tmp_path_factory.mktemp("runs") / "digits-7"
    (folder / "samples").mkdir(parents=True)
    for record, samples, groups in built_run.steps:
        append_step(folder / "steps.jsonl", record)
        if record.step > 10:
            stored = [make_group(group, samples) for group in groups]
            store_groups(folder / "samples", record.step, 1, stored, {group.group: group for group in groups})
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 17, "incarn')
    (folder / "ledger.json").write_text(json.dumps(LEDGER | {"problems": [], "as_of": {"step": 16}}))
    return folder


def write(folder: Path, output: Path) -> Path:
    parser = argparse.ArgumentParser()
    report_arguments(parser)
    assert report(parser.parse_args([str(folder), "-o", str(output)])) == 0
    return output


@pytest.fixture(scope="session")
def html(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(run_folder, tmp_path_factory.mktemp("report") / "digits.html")


@pytest.fixture
def opened(kept_tab: Tab, html: Path) -> Tab:
    """The report, from its file."""
    kept_tab.go(f"{html.as_uri()}#/")
    kept_tab.until("document.querySelector('.verdict') && document.querySelectorAll('.uplot canvas').length >= 4")
    return kept_tab


def test_a_report_opens_from_a_file_and_fetches_nothing(opened: Tab, html: Path) -> None:
    assert opened.text("#verdict") == "Step 16 waited for scorers"
    assert opened.text("#status").startswith("Report of ")
    assert opened.complaints == []
    assert {url for url in opened.requests if not url.startswith("data:")} == {html.as_uri()}


def test_it_reasons_its_verdict_and_tells_the_ledger_and_every_step(opened: Tab) -> None:
    opened.until("document.querySelector('.reasons')")
    assert "the largest cause is score" in opened.text(".reasons tbody tr:last-child")
    told = opened.text("main")
    assert "The counts add up." in told
    assert "dropped: too few scored" in told
    rows = opened.ask("[...document.querySelectorAll('main section')].at(-1).querySelectorAll('tbody tr').length")
    assert rows == 16


def test_its_steps_open_with_samples_and_timeline(opened: Tab) -> None:
    opened.ask("location.hash = '#/step/16'")
    opened.until("document.querySelector('.timeline canvas')")
    assert opened.ask("document.querySelectorAll('.samples tbody tr').length") == 20
    opened.ask("location.hash = '#/step/3'")
    opened.until("document.querySelector('#verdict')?.innerText === 'Step 3 waited for a free reward worker'")
    assert "does not contain the samples of this step" in opened.text("main")
    assert opened.complaints == []


def test_its_texts_are_no_markup(opened: Tab) -> None:
    opened.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    opened.until("document.body?.innerText.includes('<img src=x onerror=')")
    assert opened.ask("document.title") == "digits-7 · Plaudit"


def test_axe_finds_nothing_wrong_with_it(opened: Tab) -> None:
    assert opened.axe() == []


def test_nothing_in_the_file_points_elsewhere(html: Path) -> None:
    text = re.sub(r"<script.*?</script>", "", html.read_text(), flags=re.DOTALL)
    addresses = re.findall(r"""(?:src|href)=["']?((?!#|data:)[^"'> ]+)""", text)
    assert addresses == []


def test_a_run_without_samples_or_ledger_is_reported_from_its_steps_alone(
    tab: Tab, run_folder: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "steps.jsonl").write_bytes((run_folder / "steps.jsonl").read_bytes())
    tab.open(write(bare, tmp_path / "bare.html").as_uri())
    tab.until("document.querySelector('.verdict')")
    assert "does not contain the samples" in tab.text("main")
    assert tab.complaints == []


def test_a_run_that_has_closed_no_step_yet_makes_a_report_that_says_so(tab: Tab, tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    (young / "steps.jsonl").touch()
    tab.open(write(young, tmp_path / "young.html").as_uri())
    tab.until("document.body?.innerText.includes('No step has closed: there are no figures.')")
    assert tab.complaints == []


def test_a_run_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    report_arguments(parser)
    assert report(parser.parse_args(["nobody"])) == 2
    assert "no run 'nobody'" in capsys.readouterr().err


def test_modules_are_joined_whole(html: Path, built_run: RunBuilder) -> None:
    """No import or export is left that a script inside a file could not have."""
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", html.read_text(), flags=re.S)
    assert len(scripts) == 3
    assert not re.search(r"^(import|export) ", scripts[2], flags=re.M)
    about = json.loads(scripts[0])
    assert about["report"]["steps"] == len(built_run.steps)
    assert {f"steps/{record.step}" for record, _, _ in built_run.steps} <= set(about["parts"])


def test_a_report_holds_samples_that_can_be_searched_and_read(
    tab: Tab, conversations: Path, built_run: RunBuilder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(conversations, tmp_path / conversations.name))
    append_step(folder / "steps.jsonl", built_run.steps[0][0])
    html = write(folder, tmp_path / "conversations.html")
    tab.open(f"{html.as_uri()}#/samples?outcome=timeout&first_step=6")
    rows = "document.querySelectorAll('.stored tbody tr').length"
    tab.until(f"0 < {rows} && {rows} < 8")
    tab.ask("document.querySelector('.stored a').click()")
    tab.until("document.querySelectorAll('.message').length === 5")
    assert tab.ask(rows) == 4
    assert "A report holds some samples" not in tab.text("main")
    tab.ask("location.hash = '#/sample/6/hostile/1'")
    tab.until("/more characters are stored/.test(document.querySelector('.message.assistant')?.innerText)")
    assert tab.complaints == []
    assert html.stat().st_size < 2_000_000
