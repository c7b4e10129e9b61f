"""The machines of a run's samples: folders below the run's folder, which every process of the run sees.

A machine is ``sandboxes/<group>/<index>-<random>``, whatever its provider. The trainer makes ``sandboxes`` when it
begins and removes it when all steps are done, so nobody makes a machine after the run. A rollout makes a machine for a
sample and gives its name to the sample; a reward worker finds it by that name; the trainer removes those of ended
groups. A redelivered prompt gets new machines: what a killed rollout had begun is in nobody's sample.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

from plaudit_job.spec.rljob import RLJob
from plaudit_job.tasks import Task, TaskError, expand, read_task
from plaudit_reward.providers import Provider, TaskMachine
from plaudit_reward.served_machines import ServedMachine, ServedProvider, run_provider
from plaudit_sandbox.verification import Verdict
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.records import Sample

SANDBOXES: Final = "sandboxes"
"""The folder of the machines in use, below the run's."""
KEPT: Final = "kept-sandboxes"
"""The folder of the machines that ``sandboxes.keep`` keeps."""
VERDICTS: Final = "verdict-*.json"
"""The verdicts in a machine's folder, one for each scorer."""
_NAME = re.compile(r"([\w.-]+)/(\d+)-[0-9a-f]+", re.ASCII)


@dataclass(frozen=True)
class RunMachines:
    """Make and find the machines of a run."""

    folder: Path
    """``sandboxes`` of the run."""
    provider: Provider

    @classmethod
    def of_job(cls, job: RLJob, run_folder: Path) -> Self | None:
        """Return the machines of a job's run; None for a job without."""
        if not job.spec.uses_sandboxes:
            return None
        return cls(run_folder / SANDBOXES, run_provider(job.spec.sandboxes, run_folder))

    def make(self, group: str, index: int, task: Task | None) -> tuple[str, TaskMachine]:
        """Make a machine for a sample, with the files of its task's environment; return its name and the machine.

        Raises ``InfrastructureError`` if it cannot be made, such as after the run's end.
        """
        name, folder = self._new_folder(group, index)
        try:
            return name, self.provider.make(folder, task)
        except BaseException:
            self.provider.remove(folder)
            raise

    async def claim(self, group: str, index: int, task: Task | None) -> tuple[str, TaskMachine]:
        """Make a machine as ``make`` does, and hold no thread while the run's broker has no place for it."""
        if not isinstance(self.provider, ServedProvider):
            return await asyncio.to_thread(self.make, group, index, task)
        name, folder = await asyncio.to_thread(self._new_folder, group, index)
        try:
            return name, await self.provider.claim(folder, task)
        except BaseException:
            await self.remove(name)
            raise

    async def remove(self, name: str) -> None:
        """Remove the machine of a sample that needs no tests."""
        if isinstance(self.provider, ServedProvider):
            with suppress(InfrastructureError):  # the broker removes it when the sample has ended
                await self.provider.release(self.folder / name)
        else:
            await asyncio.to_thread(self.provider.remove, self.folder / name)

    async def verify(
        self, found: TaskMachine, task: Task, *, timeout_s: float, environment: Mapping[str, str]
    ) -> Verdict:
        """Run a task's tests in a machine that ``find`` returned. Raises as ``verification.verify`` does."""
        if isinstance(found.machine, ServedMachine):
            return await found.machine.verify(task, timeout_s=timeout_s, environment=environment)
        return await found.verify(task, timeout_s=timeout_s, environment=environment)

    async def close(self) -> None:
        """Close the connections to a broker."""
        if isinstance(self.provider, ServedProvider):
            await self.provider.close()

    def _new_folder(self, group: str, index: int) -> tuple[str, Path]:
        name = f"{group}/{index}-{secrets.token_hex(4)}"
        folder = self.folder / name
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
        except OSError as error:
            raise InfrastructureError(f"the machine {name} cannot be made: {error.strerror or error}") from error
        return name, folder

    def task_of(self, sample: Sample) -> Task | None:
        """Return a sample's task as the run read it. Raises as the function ``task_of`` does."""
        return task_of(sample.extra_info)

    def name_of(self, sample: Sample) -> str:
        """Return the name of a sample's machine. Raises ``DataError`` for a sample without."""
        if not sample.machine:
            raise DataError("the sample has no machine: its agent had no tool with sandbox")
        return sample.machine

    def find(self, name: str, group: str, index: int, task: Task | None) -> TaskMachine:
        """Return the machine that a sample's agent left behind.

        Raises ``DataError`` for a name that is not of this sample, ``InfrastructureError`` for a machine that is gone.
        """
        if sample_of(name) != (group, index):
            raise DataError(f"the sample names the machine {name!r}, which is not its own")
        return self.provider.find(self.folder / name, task)


@dataclass(frozen=True)
class KeptMachines(RunMachines):
    """The machines that ``sandboxes.keep`` kept of a run, whose tests run again as the tasks are now.

    ``folder`` is ``kept-sandboxes`` of the run.
    """

    def task_of(self, sample: Sample) -> Task | None:
        """Return a sample's task as it is now. Raises ``DataError`` if it cannot be read."""
        folder = sample.extra_info.get("task")
        return _read_again(folder) if isinstance(folder, str) else None

    def find(self, name: str, group: str, index: int, task: Task | None) -> TaskMachine:
        """Return what was kept of a machine. Raises ``DataError`` where its verdict alone was."""
        try:
            return super().find(name, group, index, task)
        except InfrastructureError as error:
            raise DataError("the sample's machine could not be kept: the log of the run's broker says why") from error

    def name_of(self, sample: Sample) -> str:
        """Return the name of a sample's machine: of several, one that was tested. Raises ``DataError`` without one."""
        found = sorted(self.folder.glob(f"{sample.group}/{sample.index}-*"))
        if not found:
            raise DataError("the sample's machine was not kept: set sandboxes.keep in the job of the run")
        tested = [machine for machine in found if any(machine.glob(VERDICTS))]
        return f"{sample.group}/{(tested or found)[-1].name}"


def sample_of(name: str) -> tuple[str, int] | None:
    """Return the group and the index that a machine's name begins with; None if it is none."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def task_of(extra_info: dict[str, Any]) -> Task | None:
    """Return the task of a row's ``extra_info``; None for a row that is no task.

    Raises ``DataError`` if it cannot be read, or is not what it was when the run read its rows.
    """
    folder, digest = extra_info.get("task"), extra_info.get("digest")
    if not isinstance(folder, str) or not isinstance(digest, str):
        return None
    task = _read_again(folder)
    if task.digest != digest:
        raise DataError(f"task {task.name} has changed since the run read it: start the run again")
    return task


def _read_again(folder: str) -> Task:
    try:
        return _task(folder)
    except TaskError as error:
        raise DataError(str(error)) from error


@lru_cache(maxsize=4096)
def _task(folder: str) -> Task:
    """Read a task once: its digest is over all of its files."""
    return read_task(Path(folder))


def task_problem(provider: Provider, task: Task) -> str:
    """Return why machines of a provider cannot run a task here, with the remedy; empty if they can."""
    if problem := provider.problem(task):
        return problem
    try:
        expand(task.config.environment.env)
        expand(task.config.verifier.env)
    except TaskError as error:
        return f"task {task.name}: {error}"
    return ""
