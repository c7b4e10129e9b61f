"""Write Harbor tasks, and make machines for their samples."""

from __future__ import annotations

from pathlib import Path

from plaudit_job.tasks import read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_sandbox.machine import Machine
from plaudit_wire.records import Sample

TEST = 'if [ "$(cat sum)" = 7 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


def write_sum_task(folder: Path, test: str = TEST, config: str = "", **files: str) -> Path:
    """Write a task that asks for the sum of two files; return its folder."""
    written = {
        "instruction.md": "Write the sum of a and b to sum.",
        "task.toml": config,
        "environment/a": "3",
        "environment/b": "4",
        "tests/test.sh": test,
        "solution/solve.sh": "echo 7 > sum",
        **files,
    }
    for name, content in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def run_machines(folder: Path, disk_mb: int = 64) -> RunMachines:
    """Return the machines of a run in a folder, as a trainer lets rollouts make them."""
    (folder / SANDBOXES).mkdir(exist_ok=True)
    choice = MachineChoice(memory_bytes=256 << 20, disk_bytes=disk_mb << 20)
    return RunMachines(folder / SANDBOXES, ProcessProvider(choice))


def sample_with_machine(machines: RunMachines, task_folder: Path, index: int = 0) -> tuple[Sample, Machine]:
    """Return a sample of a task, and the machine of its agent."""
    task = read_task(task_folder)
    name, made = machines.make("t-0-1.0", index, task)
    assert isinstance(made.machine, Machine)
    row = task.row()
    sample = Sample(
        "t-0-1.0", index, row["data_source"], task.instruction, "done", extra_info=row["extra_info"], machine=name
    )
    return sample, made.machine
