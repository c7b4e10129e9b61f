"""Make the machines of tasks, by the provider that the job or the user names (``PROVIDERS``).

A machine has a folder, which ``make`` fills and every process of the host finds it by. Whoever removes the folder has
the provider remove the machine; a container whose folder is gone belongs to nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, Protocol

from plaudit_job.processes import machines_run
from plaudit_job.spec.rljob import SandboxesSpec
from plaudit_job.tasks import EnvironmentSection, Task
from plaudit_sandbox import machine as folders
from plaudit_sandbox.container import ContainerMachine, ContainerSettings, new_name
from plaudit_sandbox.container_engine import ContainerEngine, find_engine
from plaudit_sandbox.machine import WRITABLE, Machine, MachineLimits, SeparateTests
from plaudit_sandbox.verification import AgentMachine, Verdict, verify
from plaudit_wire.errors import ConfigurationError, InfrastructureError

WORKDIR: Final = "/app"
"""Where commands begin in a machine of a row without a task."""
_CONTAINER_PROCESSES = 1024
"""Images bring programs with many threads."""
_CONTAINER: Final = "container.json"
"""In a machine's folder: which container it is. Written before the container is made, so that it can be found."""


@dataclass(frozen=True)
class TaskMachine:
    """A machine of a task."""

    machine: AgentMachine
    directory: str
    """Where its commands and its tests run."""
    waited_s: float = 0.0
    """The part of the seconds that it took in which a broker had no place for it."""
    cpus: float = 0.0
    """CPUs that it holds while it exists; 0: only its commands hold one."""
    separate: SeparateTests | None = None
    """The machine of its tests; None: a copy of this one."""

    async def verify(self, task: Task, *, timeout_s: float, environment: Mapping[str, str]) -> Verdict:
        """Run the task's tests as the task wants it. Raises as ``verification.verify`` does."""
        return await verify(
            self.machine,
            task.folder / "tests",
            timeout_s=timeout_s,
            environment=environment,
            directory=self.directory,
            separate=self.separate,
        )


@dataclass(frozen=True)
class MachineChoice:
    """What the job or the user says about machines. A task may ask for less."""

    image: str = ""
    """For tasks that name no image, and for rows without a task."""
    registry: str = "localhost"
    """Where ``plaudit images-of`` has put images."""
    network: Literal["none", "public"] = "none"
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    """None: what the task says."""
    run: str = ""
    """Labels what belongs to a run; empty outside of one."""
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """For ``pods``: ``metadata`` and ``spec`` of their pods."""

    def image_of(self, task: Task | None) -> str:
        """Return the image of a task's machine; empty if nobody names one."""
        return (task.image(self.registry) if task else "") or self.image

    def network_of(self, environment: EnvironmentSection | None) -> Literal["none", "public"]:
        """Return the network of a machine: public where it is asked for and may be had."""
        return "public" if environment and self.network == environment.network == "public" else "none"

    def separate(self, task: Task | None, directory: str, processes: int) -> SeparateTests | None:
        """Return the machine of a task's tests; None for tests in the agent's.

        Args:
            directory: Where the agent works. Tests with a machine like the agent's begin there as well.
            processes: As in ``limits``.
        """
        if task is None or (environment := task.tests_environment) is None:
            return None
        of_tests = task.tests_image(self.registry)
        return SeparateTests(
            artifacts=task.artifacts,
            limits=self.limits(environment, processes),
            directory=environment.workdir if "workdir" in environment.model_fields_set else directory,
            given=None if of_tests else task.given_files,
            image=of_tests or self.image_of(task),
            cpus=environment.cpus,
            network=self.network_of(environment),
        )

    def problem(self, task: Task, machines: str) -> str:
        """Return why no machine with an image can run a task, empty if one can; ``machines`` is what they are."""
        if not self.image_of(task):
            return (
                f"task {task.name} names no docker_image and has no environment/Dockerfile: name one with --image, or "
                "sandboxes.image"
            )
        for environment in filter(None, (task.config.environment, task.tests_environment)):
            if self.network != "none" and environment.network == "allowlist":
                hosts = ", ".join(environment.allowed_hosts)
                return (
                    f"task {task.name} opens the network to {hosts} alone, which {machines} cannot do: use network none"
                )
        return _problem(task)

    def limits(self, environment: EnvironmentSection | None, processes: int) -> MachineLimits:
        """Return the smaller ones of these limits and those of a task's machine."""
        memory = [] if self.memory_bytes is None else [self.memory_bytes]
        disk = [] if self.disk_bytes is None else [self.disk_bytes]
        if environment is not None:
            memory.append(environment.memory_mb << 20)
            disk.append(environment.storage_mb << 20)
        return MachineLimits(
            memory_bytes=min(memory, default=MachineLimits.memory_bytes),
            disk_bytes=min(disk, default=MachineLimits.disk_bytes),
            processes=processes,
        )


def read_about(folder: Path, name: str) -> dict[str, Any]:
    """Read what a file in a machine's folder tells of it; raise ``InfrastructureError`` if the machine is gone."""
    try:
        written: dict[str, Any] = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"the machine {folder.parent.name}/{folder.name} is gone") from error
    return written


class Provider(Protocol):
    """One kind of machines. All methods block."""

    def require(self) -> None:
        """Raise ``ConfigurationError`` where this host cannot run them."""

    def problem(self, task: Task) -> str:
        """Return why it cannot run a task, with the remedy; empty if it can."""

    def make(self, folder: Path, task: Task | None) -> TaskMachine:
        """Make a machine, with the files of its task's environment, in an empty folder.

        Raises ``InfrastructureError``, and then has left nothing outside of the folder.
        """

    def find(self, folder: Path, task: Task | None) -> TaskMachine:
        """Return the machine of a folder; raise ``InfrastructureError`` if it is gone."""

    def remove(self, *places: Path) -> None:
        """Remove the machines of folders, with the folders; nothing happens for those that are gone."""

    def end(self) -> None:
        """Remove what belongs to the run and has no folder."""


class WarmProvider(Provider, Protocol):
    """A provider whose machines can be started before it is known which task they are for: ``make`` in two parts."""

    def shape(self, task: Task | None) -> str:
        """Return all that a machine of this task is started with: one of equal shape can be filled for it."""

    def start(self, folder: Path, task: Task | None) -> None:
        """Make a machine without its task's files. Raises as ``make`` does."""

    def fill(self, folder: Path, task: Task | None) -> TaskMachine:
        """Copy a task's files into a machine that was started for a task of the same shape. Raises as ``make`` does."""

    def keep(self, folder: Path, made: TaskMachine, to: Path) -> None:
        """Put what tests need to run again into another folder, in which ``find`` finds it: whole or not at all.

        The machine runs no command after this. Raises ``InfrastructureError`` if it cannot be kept.
        """

    def reap(self, machines: Iterable[Path]) -> None:
        """Remove what a killed process of the run made for none of these folders. Raises ``InfrastructureError``."""


class ProcessProvider:
    """Folders and namespaces of this host, for tasks without an image."""

    def __init__(self, choice: MachineChoice) -> None:
        self._choice = choice

    def require(self) -> None:
        """Try a machine, once in each process."""
        folders.require()

    def problem(self, task: Task) -> str:
        """Refuse a task that needs an image, or a workdir that no machine has."""
        if image := task.tests_image():
            return (
                f"task {task.name}: its tests have the image {image}, and the provider process runs tasks without an "
                "image: use the provider container"
            )
        if needed := task.needed_image:
            return (
                f"task {task.name} needs {needed}, and the provider process runs tasks without an image: put what it "
                f"needs into environment/, which is copied to {task.config.environment.workdir}, or use the provider "
                "container"
            )
        return outside_problem(task) or _problem(task)

    def make(self, folder: Path, task: Task | None) -> TaskMachine:
        """Make the folder's parts, and copy the task's files."""
        return self.fill(folder, task)

    def shape(self, task: Task | None) -> str:
        """Return that all are alike: limits are those of each command."""
        return "process"

    def start(self, folder: Path, task: Task | None) -> None:
        """Make the folder's parts."""
        self._of(folder, task)

    def keep(self, folder: Path, made: TaskMachine, to: Path) -> None:
        """Move its files."""
        try:
            (folder / "files").rename(to / "files")
        except OSError as error:
            raise InfrastructureError(f"{folder} cannot be kept: {error.strerror or error}") from error

    def reap(self, machines: Iterable[Path]) -> None:
        """Do nothing: a machine is its folder."""

    def fill(self, folder: Path, task: Task | None) -> TaskMachine:
        """Copy the files."""
        made = self._of(folder, task)
        if task is not None and (given := task.given_files):
            made.machine.upload(given, made.directory)
        return made

    def find(self, folder: Path, task: Task | None) -> TaskMachine:
        """Look for the folder's files."""
        if not (folder / "files").is_dir():
            raise InfrastructureError(f"the machine {folder.parent.name}/{folder.name} is gone")
        return self._of(folder, task)

    def remove(self, *places: Path) -> None:
        """Remove the folders."""
        folders.remove(*places)

    def end(self) -> None:
        """Do nothing: a machine is its folder."""

    def _of(self, folder: Path, task: Task | None) -> TaskMachine:
        environment, processes = task.config.environment if task else None, MachineLimits.processes
        directory = environment.workdir if environment else WORKDIR
        separate = self._choice.separate(task, directory, processes)
        return TaskMachine(Machine(folder, self._choice.limits(environment, processes)), directory, separate=separate)


class ContainerProvider:
    """Containers of docker or podman on this host."""

    def __init__(self, choice: MachineChoice) -> None:
        self.run = choice.run
        """The value of the label ``plaudit.dev/run`` of its containers; empty outside of a run."""
        self._choice = choice

    def require(self) -> None:
        """Find an engine, and remove what nobody holds any more."""
        find_engine().remove_orphans()

    def problem(self, task: Task) -> str:
        """Refuse a task without an image, whose image was not built, or with a network that we cannot give."""
        if problem := self._choice.problem(task, "containers"):
            return problem
        with suppress(ConfigurationError):  # a machine without an engine may check jobs as well
            for image in task.images_to_build(self._choice.registry):
                if not find_engine().has_image(image):
                    return f"task {task.name} needs the image {image}: build it with plaudit images-of {task.folder}"
        return ""

    def make(self, folder: Path, task: Task | None) -> TaskMachine:
        """Make a container; pull its image if it is not here."""
        engine, image = find_engine(), self._choice.image_of(task)
        engine.ensure_image(image)
        of_image = engine.image_workdir(image)
        workdir = of_image or WORKDIR
        if task is not None and ("workdir" in task.config.environment.model_fields_set or not of_image):
            workdir = task.config.environment.workdir
        name = new_name()
        (folder / _CONTAINER).write_text(
            json.dumps({"engine": engine.program, "name": name, "image": image, "workdir": workdir})
        )
        machine = self._machine(folder, task)
        try:
            machine.create()
            if task is not None and (given := task.given_files):
                machine.upload(given, workdir)
            if not folder.is_dir():
                raise InfrastructureError(f"the machine {folder.parent.name}/{folder.name} was removed meanwhile")
        except BaseException:
            machine.remove()
            raise
        return self._of(machine, task)

    def find(self, folder: Path, task: Task | None) -> TaskMachine:
        """Read which container it is."""
        return self._of(self._machine(folder, task), task)

    def remove(self, *places: Path) -> None:
        """Remove the containers, the copies of their tests, and the folders."""
        for folder in places:
            with suppress(InfrastructureError):  # no container was made, or ``end`` removes it
                self._machine(folder, None).remove()
        folders.remove(*places)

    def end(self) -> None:
        """Remove what a killed process made for a folder that was gone."""
        if self.run:
            find_engine().remove_of(self.run)

    def _of(self, machine: ContainerMachine, task: Task | None) -> TaskMachine:
        settings = machine.settings
        separate = self._choice.separate(task, settings.workdir, _CONTAINER_PROCESSES)
        return TaskMachine(machine, settings.workdir, cpus=settings.cpus, separate=separate)

    def _machine(self, folder: Path, task: Task | None) -> ContainerMachine:
        written = read_about(folder, _CONTAINER)
        environment = task.config.environment if task else None
        settings = ContainerSettings(
            image=written["image"],
            network=self._choice.network_of(environment),
            cpus=environment.cpus if environment else 1.0,
            workdir=written["workdir"],
            labels={"run": self.run} if self.run else {},
            holder=folder,
            has_separate_tests=task is not None and task.tests_environment is not None,
        )
        limits = self._choice.limits(environment, _CONTAINER_PROCESSES)
        return ContainerMachine(ContainerEngine(written["engine"]), written["name"], settings, limits)


def outside_problem(task: Task, workdir: str = WORKDIR) -> str:
    """Return which artifact of separate tests no agent can write, in a machine of read-only programs; empty if none."""
    places = [*(f"/{name}" for name in WRITABLE), workdir]
    for path in task.artifacts if task.tests_environment else ():
        if not any(PurePosixPath(path).is_relative_to(place) for place in places):
            return f"task {task.name}: the artifact {path} is in none of the folders that an agent can write to: " + (
                ", ".join(dict.fromkeys(places))
            )
    return ""


ROOT: Final = ("root", "0", 0)
"""The user of a machine of the providers process and container, as a task may name it."""


def _problem(task: Task) -> str:
    """Return what no provider can give."""
    tests = task.tests_environment
    gpus = max(task.config.environment.gpus, tests.gpus if tests else 0)
    if gpus:
        return f"task {task.name} needs {gpus} GPUs, which no provider gives"
    for section, user in (("agent", task.config.agent.user), ("verifier", task.config.verifier.user)):
        if user not in (None, *ROOT):
            return (
                f"task {task.name}: [{section}].user is {user!r}, and the user of a machine cannot be chosen: "
                "remove it, or let commands that need it begin with su"
            )
    for section, environment in (("environment", task.config.environment), ("verifier.environment", tests)):
        if environment is not None and environment.healthcheck is not None:
            return (
                f"task {task.name}: [{section}.healthcheck] waits for a program that the image starts, and a machine "
                "starts none: remove it, and start what the task needs in a command"
            )
    return ""


def _pods(choice: MachineChoice, *, claims: bool = False) -> Provider:
    from plaudit_reward.pod_provider import PodProvider  # needs the client of Kubernetes, as nothing else here does

    return PodProvider(choice, claims)


PROVIDERS: Final[Mapping[str, Callable[[MachineChoice], Provider]]] = {
    "process": ProcessProvider,
    "container": ContainerProvider,
    "pods": _pods,
    "agentSandbox": partial(_pods, claims=True),
}
"""By name."""


def provider_of(spec: SandboxesSpec, run_folder: Path) -> Provider:
    """Return the provider of a job's run."""
    choice = MachineChoice(
        image=spec.image,
        registry=spec.registry,
        network=spec.network,
        memory_bytes=spec.memory_bytes,
        disk_bytes=spec.disk_bytes,
        pod_template=spec.pod.template,
        run=machines_run(run_folder),
    )
    return PROVIDERS[spec.provider](choice)
