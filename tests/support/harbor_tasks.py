"""Write Harbor tasks, and make machines for their samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from plaudit_job.tasks import Task, expand, read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_sandbox.machine import CommandEnd, Machine
from plaudit_wire.records import Sample

GROUP = "t-0-1.0"
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
    return write_files(folder, written)


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files by their paths in a folder; return the folder."""
    for name, content in files.items():
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
    name, made = machines.make(GROUP, index, task)
    assert isinstance(made.machine, Machine)
    return _sample(task, name, index), made.machine


def played_sample(
    machines: RunMachines, task_folder: Path, command: str, index: int = 0, timeout_s: float = 60.0
) -> tuple[Sample, CommandEnd]:
    """Return a sample of a task whose agent ran one command in a machine of any provider, and the command's end."""
    task = read_task(task_folder)
    name, made = machines.make(GROUP, index, task)
    running = made.machine.run(
        ["bash", "-c", command],
        timeout_s=min(timeout_s, task.agent_limit_s),
        environment=expand(task.config.environment.env),
        directory=made.directory,
    )
    return _sample(task, name, index), asyncio.run(running)


def _sample(task: Task, machine: str, index: int) -> Sample:
    row = task.row()
    return Sample(
        GROUP, index, row["data_source"], task.instruction, "done", extra_info=row["extra_info"], machine=machine
    )
