"""The machines of a run's samples: folders below the run's folder, which every process of the run sees.

A machine is ``sandboxes/<group>/<index>-<random>``. The trainer makes ``sandboxes`` when it begins and removes it when
all steps are done, so nobody makes a machine after the run. A rollout makes a machine for a sample and gives its name
to the sample; a reward worker finds it by that name; the trainer removes those of ended groups. A redelivered prompt
gets new machines: what a killed rollout had begun is in nobody's sample.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

from plaudit_job.spec.rljob import RLJob
from plaudit_job.tasks import Task, TaskError, expand, read_task
from plaudit_sandbox.machine import Machine, MachineLimits
from plaudit_wire.errors import DataError, InfrastructureError

SANDBOXES: Final = "sandboxes"
"""The folder of the machines in use, below the run's."""
KEPT: Final = "kept-sandboxes"
"""The folder of the machines that ``sandboxes.keep`` keeps."""
WORKDIR: Final = "/app"
"""Where commands begin in a machine of a row without a task."""
_NAME = re.compile(r"[\w.-]+/(\d+)-[0-9a-f]+", re.ASCII)


@dataclass(frozen=True)
class RunMachines:
    """Make and find the machines of a run."""

    folder: Path
    """``sandboxes`` of the run."""
    memory_bytes: int
    disk_bytes: int

    @classmethod
    def of_job(cls, job: RLJob, run_folder: Path) -> Self | None:
        """Return the machines of a job's run; None for a job without."""
        spec = job.spec.sandboxes
        return cls(run_folder / SANDBOXES, spec.memory_bytes, spec.disk_bytes) if job.spec.uses_sandboxes else None

    def make(self, group: str, index: int, task: Task | None) -> tuple[str, Machine]:
        """Make a machine for a sample, with the files of its task's environment; return its name and the machine.

        Raises ``InfrastructureError`` if it cannot be made, such as after the run's end.
        """
        name = f"{group}/{index}-{secrets.token_hex(4)}"
        folder = self.folder / name
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
        except OSError as error:
            raise InfrastructureError(f"the machine {name} cannot be made: {error.strerror or error}") from error
        machine = Machine(folder, self._limits(task))
        try:
            if task is not None and (given := task.folder / "environment").is_dir():
                machine.upload(given, task.config.environment.workdir)
        except BaseException:
            machine.remove()
            raise
        return name, machine

    def find(self, name: str, group: str, index: int, task: Task | None) -> Machine:
        """Return the machine that a sample's agent left behind.

        Raises ``DataError`` for a name that is not of this sample, ``InfrastructureError`` for a machine that is gone.
        """
        found = _NAME.fullmatch(name)
        if found is None or name.partition("/")[0] != group or int(found[1]) != index:
            raise DataError(f"the sample names the machine {name!r}, which is not its own")
        folder = self.folder / name
        if not (folder / "files").is_dir():
            raise InfrastructureError(f"the machine {name} is gone")
        return Machine(folder, self._limits(task))

    def _limits(self, task: Task | None) -> MachineLimits:
        """Return the smaller ones of the job's limits and the task's."""
        memory, disk = self.memory_bytes, self.disk_bytes
        if task is not None:
            asked = task.config.environment
            memory, disk = min(memory, asked.memory_mb << 20), min(disk, asked.storage_mb << 20)
        return MachineLimits(memory_bytes=memory, disk_bytes=disk)


def task_of(extra_info: dict[str, Any]) -> Task | None:
    """Return the task of a row's ``extra_info``; None for a row that is no task.

    Raises ``DataError`` if it cannot be read, or is not what it was when the run read its rows.
    """
    folder, digest = extra_info.get("task"), extra_info.get("digest")
    if not isinstance(folder, str) or not isinstance(digest, str):
        return None
    try:
        task = _task(folder)
    except TaskError as error:
        raise DataError(str(error)) from error
    if task.digest != digest:
        raise DataError(f"task {task.name} has changed since the run read it: start the run again")
    return task


@lru_cache(maxsize=4096)
def _task(folder: str) -> Task:
    """Read a task once: its digest is over all of its files."""
    return read_task(Path(folder))


def task_problem(task: Task) -> str:
    """Return why machines of this host cannot run a task, with the remedy; empty if they can."""
    if needed := task.needed_image:
        return (
            f"task {task.name} needs {needed}, and sandboxes.provider process runs tasks without an image: put what it "
            f"needs into environment/, which is copied to {task.config.environment.workdir}"
        )
    try:
        expand(task.config.environment.env)
        expand(task.config.verifier.env)
    except TaskError as error:
        return f"task {task.name}: {error}"
    return ""
