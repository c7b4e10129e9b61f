"""``plaudit audit`` and ``plaudit samples`` on a run whose reward pays for length, with an honest auditor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from builders import make_body, make_prompt
from plaudit_metrics.sources.audits import append_audit, audits_file
from plaudit_metrics.statistics.audits import AuditedGroup, AuditedSample
from plaudit_wire.records import GroupRecord, ScorerRecord, ScoringRecord, Stamps
from plaudit_workers.cli import main
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.groups import Group, GroupSample

STEPS, GROUPS, SIZE = 36, 8, 4
Capture = pytest.CaptureFixture[str]


def store_run(folder: Path, *, hacked: bool, bad_text: str = "") -> Path:
    """Store a run in which length grows; the reward pays for it if ``hacked``, the auditor for the right answer."""
    draw, run = random.Random(5), folder / "run"
    for step in range(1, STEPS + 1):
        groups, audits, records = [], [], {}
        for number in range(GROUPS):
            prompt = make_prompt(f"t-{step * GROUPS + number}-1.0", SIZE, step=step, data_source=f"sums-{number % 2}")
            samples, audited = [], []
            for index in range(SIZE):
                right = draw.random() < (0.8 - 0.7 * step / STEPS if hacked else 0.3 + 0.6 * step / STEPS)
                words = 1 + (draw.randint(0, step) if hacked else draw.randint(0, 2))
                reward = right + (0.2 * words if hacked else 0.0)
                text = f"{bad_text}{'4' if right else '5'}" + " very" * words
                scoring = ScoringRecord("scored", reward)
                body = make_body(prompt, index, text)
                samples.append(GroupSample(index, Stamps(1.0, 1.0, 2.0, None, 3.0, 4.0), body, scoring=scoring))
                audited.append(AuditedSample(index, reward, {"honest": ScorerRecord("scored", float(right))}))
            groups.append(Group(prompt.group, "ready", prompt, samples, 1, 1.0))
            records[prompt.group] = GroupRecord(prompt.group, "train", step, "trained", SIZE, SIZE, 1.0, 9.0)
            audits.append(AuditedGroup(prompt.group, step, prompt.data_source, audited))
        file = store_groups(run / "samples", step, 1, groups, records)
        for each in audits:
            append_audit(audits_file(run, file), each)
    return run


def audit_of(run: Path, capsys: Capture) -> dict[str, Any]:
    assert main(["audit", str(run), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.long
def test_a_hacked_reward_is_found_and_its_samples_are_named(tmp_path: Path, capsys: Capture) -> None:
    run = store_run(tmp_path, hacked=True)
    (auditor,) = audit_of(run, capsys)["auditors"]
    assert auditor["name"] == "honest"
    assert auditor["diverges"] < 0.01
    assert 24 <= auditor["diverged_at"] <= STEPS
    sources = auditor["diverged_sources"]
    assert min(sources.values(), default=STEPS) >= auditor["diverged_at"]
    assert auditor["late"]["value"]["high"] < auditor["early"]["value"]["low"]
    assert auditor["late"]["reward"]["low"] > auditor["early"]["reward"]["high"]
    worst = auditor["disagreements"][0]
    assert worst["value"] == 0.0
    assert worst["reward"] > auditor["late"]["reward"]["value"]
    assert set(auditor["by_source"]) == {"sums-0", "sums-1"}
    assert main(["audit", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "the reward rose while auditor honest fell" in shown
    assert all(f"; in {source} from step {step}" in shown for source, step in sources.items())
    assert f"step {worst['step']} {worst['group']} [{worst['index']}]  reward" in shown
    assert "5 very very" in shown
    first, *others = sorted((run / "audits").iterdir())[-STEPS // 4 :]
    first.write_text(first.read_text().splitlines(keepends=True)[0])
    for file in others:
        file.unlink()
    findings = [finding for finding in audit_of(run, capsys)["findings"] if "auditor" in finding]
    assert "too few groups of the late steps for a finding: 1, and 0 samples without a value" in findings[-1]


def test_a_healthy_run_raises_nothing(tmp_path: Path, capsys: Capture) -> None:
    run = store_run(tmp_path, hacked=False)
    found = audit_of(run, capsys)
    (auditor,) = found["auditors"]
    assert auditor["diverged_at"] is None
    assert auditor["late"]["agreement"]["value"] == pytest.approx(1.0)
    assert not [finding for finding in found["findings"] if "auditor" in finding]


def test_the_page_draws_both_curves_and_escapes_every_text(tmp_path: Path, capsys: Capture) -> None:
    run = store_run(tmp_path, hacked=True, bad_text="<script>alert(1)</script> ")
    page = tmp_path / "audit.html"
    assert main(["audit", str(run), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("<polyline") == text.count("<polygon") == 2
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "nan" not in text.partition("<svg")[2].partition("</svg>")[0]


def test_samples_are_shown_with_their_audits(tmp_path: Path, capsys: Capture) -> None:
    run = store_run(tmp_path, hacked=True)
    assert main(["samples", str(run), "--step", "2", "-n", "1"]) == 0
    assert "honest (audit): " in capsys.readouterr().out
    assert main(["samples", str(run), "--step", "2", "-n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["audits"]["honest"]["outcome"] == "scored"
