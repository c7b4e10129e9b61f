"""steps.jsonl survives crashes and resumes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit_metrics.sources.steps import append_step, decode_step, encode_step, read_steps
from plaudit_wire.records import StepRecord, WaitRecord

ROOT = Path(__file__).parents[2]


def record(step: int, incarnation: int = 1, reward: float = 0.5) -> StepRecord:
    return StepRecord(
        step=step,
        incarnation=incarnation,
        opened=10.0 * step,
        closed=10.0 * step + 9,
        num_samples=8,
        num_groups=2,
        statistics={"reward/mean": reward, "step_s": 9.0},
        verdict="reward",
        waits=[WaitRecord(10.0 * step, 10.0 * step + 3, ["t-1-1.0"])],
        labels={"reward_pipeline/slowest/group": "t-1-1.0"},
    )


def test_a_step_is_one_flat_object_with_the_keys_that_people_look_for(tmp_path: Path) -> None:
    append_step(tmp_path / "steps.jsonl", record(1))
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert json.loads(line)["reward/mean"] == 0.5
    assert json.loads(line)["verdict"] == "reward"
    assert json.loads(line)["step"] == 1


def test_appended_steps_are_read_back(tmp_path: Path) -> None:
    written = [record(step) for step in (1, 2, 3)]
    for each in written:
        append_step(tmp_path / "steps.jsonl", each)
    assert read_steps(tmp_path / "steps.jsonl") == written


def test_a_run_without_steps_reads_as_empty(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "steps.jsonl") == []


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cut=st.integers(2, 400))
def test_a_torn_last_line_costs_only_itself_and_the_next_append_starts_afresh(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("history") / "steps.jsonl"
    append_step(path, record(1))
    append_step(path, record(2))
    content = path.read_bytes()
    torn = content[: len(content) - min(cut, len(encode_step(record(2))))]
    path.write_bytes(torn)
    assert [each.step for each in read_steps(path)] == [1]
    append_step(path, record(2, incarnation=2))
    assert read_steps(path) == [record(1), record(2, incarnation=2)]


def test_the_newest_incarnation_of_a_step_wins_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for each in (record(1), record(2, reward=0.1), record(2, incarnation=2, reward=0.9), record(3, incarnation=2)):
        append_step(path, each)
    assert [(each.step, each.incarnation) for each in read_steps(path)] == [(1, 1), (2, 2), (3, 2)]


def test_steps_past_the_point_of_a_resume_are_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for step in (1, 2, 3, 4, 5):
        append_step(path, record(step))
    append_step(path, record(3, incarnation=2))
    assert [(each.step, each.incarnation) for each in read_steps(path)] == [(1, 1), (2, 1), (3, 2)]


def test_an_incarnation_between_two_resumes_keeps_only_its_surviving_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for step, incarnation in ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2), (3, 3)):
        append_step(path, record(step, incarnation))
    assert [(each.step, each.incarnation) for each in read_steps(path)] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b'{"step": 1}', b'"step"', b'{"step": 1, "waits": 3}'])
def test_a_line_that_is_no_step_is_none(line: bytes) -> None:
    assert decode_step(line) is None


def test_fields_that_a_later_version_adds_do_not_hurt() -> None:
    line = encode_step(record(1))[:-1] + b', "new/figure": 3, "new_name": "x", "new_list": [1]}'
    decoded = decode_step(line)
    assert decoded is not None
    assert decoded.statistics["new/figure"] == 3.0
    assert decoded.labels["new_name"] == "x"


def test_a_full_disk_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        append_step(tmp_path, record(1))


def test_every_figure_of_a_real_run_is_documented(observed_run: Any) -> None:
    steps = read_steps(observed_run.folder / "steps.jsonl")
    figures = {key for step in steps for key in (*step.statistics, *step.labels) if not key.startswith("scripted/")}
    forms = documented()
    assert {key for key in figures if not any(form.fullmatch(key) for form in forms)} == set()


def documented() -> list[re.Pattern[str]]:
    """The keys in tables of docs: ``<name>`` and ``…`` stand for any name, ``{mean,max}`` for one of these."""
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "schedules", "training")]
    tables = [
        table for page in pages for table in re.findall(r"^\| (?:key|figure) \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    ]
    cells = [cell for table in tables for cell in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)]
    forms = []
    for key in (key for cell in cells for key in cell.split("`")[1::2]):
        form = re.escape(key.replace("<d>", "{p50,p95,p99,max,mean}"))
        form = re.sub(r"\\{(.+?)\\}", lambda found: f"({found[1].replace(',', '|')})", form)
        forms.append(re.compile(re.sub(r"<.+?>|…", "[^/]+", form)))
    return forms
