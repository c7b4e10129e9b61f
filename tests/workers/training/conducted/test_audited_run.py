"""A whole run with an auditor: its figures reach the steps, and kills of each role lose nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from plaudit_job.spec.rewards import AuditSpec
from plaudit_metrics.sources.audits import FOLDER, is_audited, run_audits
from plaudit_metrics.sources.sample_schema import surviving_files
from plaudit_metrics.sources.steps import read_steps
from simulated_run import Simulation, make_plan
from waiting import until

# Trainers that are killed leave connections that Python closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
AUDIT = """
async def audit(data_source, solution_str, ground_truth, extra_info=None):
    return -float(ground_truth)
"""


@pytest.fixture
def audited(simulation: Simulation) -> Callable[[float], dict[str, AuditSpec]]:
    """Add an auditor that says the opposite of the reward."""

    def add(share: float) -> dict[str, AuditSpec]:
        path = simulation.folder / "audit.py"
        path.write_text(AUDIT)
        python = {"path": str(path), "function": "audit"}
        simulation.auditor = {"name": "opposite", "kind": "python", "python": python, "audit": {"share": share}}
        return {"opposite": AuditSpec(share=share)}

    return add


def drawn_groups(folder: Path, share: float) -> set[str]:
    """The groups of all surviving steps that an auditor is to score."""
    drawn: set[str] = set()
    for path in surviving_files(folder / "samples").values():
        table = pyarrow.parquet.read_table(path, columns=["group", "step", "split", "outcome"]).to_pylist()
        drawn |= {
            row["group"]
            for row in table
            if row["split"] == "train"
            and row["outcome"] == "scored"
            and is_audited(row["group"], row["step"], share, 1)
        }
    return drawn


@pytest.mark.long
async def test_audits_reach_the_figures_of_later_steps(
    simulation: Simulation, audited: Callable[[float], dict[str, AuditSpec]]
) -> None:
    plan = make_plan(steps=8, auditors=audited(1.0))

    def slow_until_audited(groups: Any) -> float:
        return 0.01 if run_audits(simulation.folder) else 1.0

    simulation.update_s = slow_until_audited
    async with simulation.workers():
        done, _ = await simulation.train(plan)
        wanted = drawn_groups(simulation.folder, 1.0)
        await until(lambda: {group.group for group in run_audits(simulation.folder)} == wanted, within_s=60)
    assert done
    steps = read_steps(simulation.folder / "steps.jsonl")
    first, last = steps[0].statistics, steps[-1].statistics
    assert "audit/opposite/value" not in first
    assert first["audit/opposite/waiting"] == 4
    assert last["audit/opposite/value"] == pytest.approx(-last["audit/opposite/reward"])
    assert last["audit/opposite/groups"] + last["audit/opposite/waiting"] == 8 * 4


@pytest.mark.long
async def test_kills_of_each_role_lose_no_audit_and_repeat_none(
    simulation: Simulation, audited: Callable[[float], dict[str, AuditSpec]]
) -> None:
    plan = make_plan(steps=8, auditors=audited(0.6))
    chance = random.Random(4)
    simulation.update_s = lambda groups: 0.2

    async def audits(least: int) -> bool:
        return len(run_audits(simulation.folder)) >= least

    async with simulation.workers(reward_workers=2):
        for least in (1, 5):
            trainer = asyncio.create_task(simulation.train(plan))
            await until(lambda least=least: audits(least), within_s=60)
            await simulation.kill_worker(chance)
            trainer.cancel()
            await asyncio.wait([trainer])
        done, _ = await simulation.train(plan)
        wanted = drawn_groups(simulation.folder, 0.6)
        await until(lambda: {group.group for group in run_audits(simulation.folder)} == wanted, within_s=60)
    assert done
    for path in (simulation.folder / FOLDER).iterdir():
        groups = [json.loads(line)["group"] for line in path.read_text().splitlines()]
        assert len(set(groups)) == len(groups)
    for group in run_audits(simulation.folder):
        assert [sample.index for sample in group.samples] == list(range(4))
        assert all(each.audits["opposite"].value == -each.score for each in group.samples if each.score is not None)
