"""Machines of samples end with their groups, whoever was killed in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from plaudit_reward.machines import KEPT, SANDBOXES, RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_reward.verifier import Keep
from plaudit_wire.errors import InfrastructureError
from plaudit_workers.training.machines import EndedMachines
from plaudit_workers.training.schedule import GroupInFlight, TrainerLedger
from waiting import until

Make = Callable[[str, str], Path]
PROVIDER = ProcessProvider(MachineChoice())


@pytest.fixture
def ledger() -> TrainerLedger:
    ledger = TrainerLedger()
    for position, group in enumerate(("t-0-1.0", "t-1-1.0")):
        ledger.admit("train", GroupInFlight(group, position, 0, 1, 0))
    return ledger


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a machine whose tests gave an outcome, or "" for one without a verdict; return its folder."""
    (tmp_path / SANDBOXES).mkdir()
    made = iter(range(100))

    def machine(group: str, outcome: str) -> Path:
        folder = tmp_path / SANDBOXES / group / f"{next(made)}-ab"
        (folder / "files").mkdir(parents=True)
        if outcome:
            value = ',"value":0.0' if outcome == "scored" else ""
            (folder / "verdict-tests.json").write_text(f'{{"outcome":"{outcome}"{value}}}')
        return folder

    return machine


def kept(folder: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in (folder / KEPT).glob("*/*")}


async def test_machines_of_ended_groups_are_removed_and_of_others_not(
    tmp_path: Path, ledger: TrainerLedger, make: Make
) -> None:
    ended, running, unknown = make("t-0-1.0", "scored"), make("t-1-1.0", ""), make("t-9-1.0", "")
    machines = EndedMachines(tmp_path, "none", ledger, PROVIDER)
    removing = asyncio.ensure_future(machines.remove())
    try:
        await until(lambda: not unknown.exists())
        assert ended.exists()
        ledger.end("t-0-1.0", "trained")
        await until(lambda: not ended.parent.exists())
        await until(lambda: machines.count == 1)
    finally:
        removing.cancel()
    assert running.exists()
    assert set(machines.release_figures()) >= {"reward_pipeline/sandbox/release_s/p50"}
    assert machines.release_figures() == {}
    assert kept(tmp_path) == set()


@pytest.mark.parametrize(
    ("keep", "expected"),
    [("none", set()), ("failed", {"timeout", "none"}), ("all", {"scored", "timeout", "none"})],
)
async def test_the_job_says_which_machines_stay(
    tmp_path: Path, ledger: TrainerLedger, make: Make, keep: Keep, expected: set[str]
) -> None:
    folders = {"scored": make("t-0-1.0", "scored"), "timeout": make("t-0-1.0", "timeout"), "none": make("t-1-1.0", "")}
    copy = folders["none"].parent / ".2-ab-verify-x"
    copy.mkdir()
    await EndedMachines(tmp_path, keep, ledger, PROVIDER).end()
    assert kept(tmp_path) == {f"{folders[each].parent.name}/{folders[each].name}" for each in expected}
    assert not [path for path in tmp_path.iterdir() if path.name != KEPT]


async def test_nobody_makes_a_machine_after_the_run(tmp_path: Path, ledger: TrainerLedger) -> None:
    ended = EndedMachines(tmp_path, "none", ledger, PROVIDER)
    machines = RunMachines(tmp_path / SANDBOXES, PROVIDER)
    with pytest.raises(InfrastructureError, match="cannot be made"):
        machines.make("t-0-1.0", 0, None)
    ended.begin()
    name, made = machines.make("t-0-1.0", 0, None)
    assert machines.find(name, "t-0-1.0", 0, None).machine.name == made.machine.name
    await ended.end()
    with pytest.raises(InfrastructureError, match="cannot be made"):
        machines.make("t-0-1.0", 0, None)
