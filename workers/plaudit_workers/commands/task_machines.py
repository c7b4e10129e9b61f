"""Make the machines of Harbor tasks, by the provider that the user chose."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from plaudit_job.tasks import Task, TaskError
from plaudit_sandbox import machine as folders
from plaudit_sandbox.container import ContainerMachine, ContainerSettings
from plaudit_sandbox.container_engine import find_engine
from plaudit_sandbox.machine import Machine, MachineLimits
from plaudit_sandbox.verification import AgentMachine

_PROCESSES = 1024
"""Of a container; images bring programs with many threads."""


@dataclass(frozen=True)
class TaskMachine:
    """A machine of a task."""

    machine: AgentMachine
    directory: str
    """Where its commands and its tests run."""


class TaskMachines(Protocol):
    """A provider, as the user set it up."""

    def require(self, task: Task) -> None:
        """Raise ``TaskError`` for a task that this provider cannot run."""

    def made(self, task: Task) -> AbstractAsyncContextManager[TaskMachine]:
        """Yield a new machine of a task, and remove it."""


class ProcessMachines:
    """Folders and namespaces of this host, for tasks without an image."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raise ``ConfigurationError`` if this host cannot run them."""
        folders.require()

    def require(self, task: Task) -> None:
        """Refuse a task that needs an image."""
        if needed := task.needed_image:
            raise TaskError(
                f"task {task.name} needs {needed}. Machines of this host run tasks without an image: files "
                "of environment/ are copied to its workdir. Use --provider container"
            )
        _require_no_gpu(task)

    @contextlib.asynccontextmanager
    async def made(self, task: Task) -> AsyncIterator[TaskMachine]:
        """Yield a machine in a temporary folder."""
        workdir = task.config.environment.workdir
        with tempfile.TemporaryDirectory(prefix="plaudit-task-", ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o711)  # noqa: S103 (the user of the machines passes through it)
            machine = Machine(Path(folder) / "machine", _limits(task, MachineLimits.processes))
            try:
                if (given := task.folder / "environment").is_dir():
                    machine.upload(given, workdir)
                yield TaskMachine(machine, workdir)
            finally:
                await asyncio.to_thread(machine.remove)


class ContainerMachines:
    """Containers of docker or podman on this host."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Find the engine, and remove what killed commands left. Raises ``ConfigurationError``."""
        self._engine = find_engine()
        self._engine.remove_orphans()
        self._given = _Given(arguments)

    def require(self, task: Task) -> None:
        """Refuse a task without an image, whose image was not built, or with a network or GPUs that we cannot give."""
        image = self._given.image(task)
        if task.has_dockerfile and image != task.config.environment.docker_image and not self._engine.has_image(image):
            raise TaskError(f"task {task.name} needs the image {image}: build it with plaudit images-of {task.folder}")
        if self._given.network(task) == "allowlist":
            hosts = ", ".join(task.config.environment.allowed_hosts)
            raise TaskError(
                f"task {task.name} opens the network to {hosts} alone, which containers cannot do: use --network none"
            )
        _require_no_gpu(task)

    @contextlib.asynccontextmanager
    async def made(self, task: Task) -> AsyncIterator[TaskMachine]:
        """Yield a new container."""
        image = self._given.image(task)
        await asyncio.to_thread(self._engine.ensure_image, image)
        workdir = _workdir(task, await asyncio.to_thread(self._engine.image_workdir, image))
        network: Literal["none", "public"] = "public" if self._given.network(task) == "public" else "none"
        settings = ContainerSettings(image, network, task.config.environment.cpus, workdir)
        limits = _limits(task, _PROCESSES)
        machine = await asyncio.to_thread(ContainerMachine.create, self._engine, settings, limits)
        try:
            if not task.image() and (given := task.folder / "environment").is_dir():
                await asyncio.to_thread(machine.upload, given, workdir)
            yield TaskMachine(machine, workdir)
        finally:
            await asyncio.to_thread(machine.remove)


class _Given:
    """What the user said about images and the network."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._image: str = arguments.image
        self._registry: str = arguments.registry
        self._network: str = arguments.network

    def image(self, task: Task) -> str:
        """Return the image of a task; raise ``TaskError`` if it has none."""
        image = task.image(self._registry) or self._image
        if not image:
            raise TaskError(
                f"task {task.name} names no docker_image and has no environment/Dockerfile: name one with --image"
            )
        return image

    def network(self, task: Task) -> Literal["none", "allowlist", "public"]:
        """Return the narrower of the user's network and the task's."""
        if self._network == "none" or task.config.environment.network == "no-network":
            return "none"
        return "public" if task.config.environment.network == "public" else "allowlist"


def _workdir(task: Task, of_image: str) -> str:
    environment = task.config.environment
    return environment.workdir if "workdir" in environment.model_fields_set or not of_image else of_image


def _limits(task: Task, processes: int) -> MachineLimits:
    environment = task.config.environment
    return MachineLimits(
        memory_bytes=environment.memory_mb << 20, disk_bytes=environment.storage_mb << 20, processes=processes
    )


def _require_no_gpu(task: Task) -> None:
    if task.config.environment.gpus:
        raise TaskError(f"task {task.name} needs {task.config.environment.gpus} GPUs, which no provider gives")


PROVIDERS: Final[Mapping[str, Callable[[argparse.Namespace], TaskMachines]]] = {
    "process": ProcessMachines,
    "container": ContainerMachines,
}
"""By name."""
