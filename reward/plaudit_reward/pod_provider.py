"""Make the machines of tasks as pods of Kubernetes: ``sandboxes.provider: pods``, and ``agentSandbox`` with claims.

A machine's folder names its pod, so whoever sees the folder finds it. A pod can be started before its task's files are
copied: ``make`` is ``start`` and ``fill``, and a pod started for one task can be filled for another of equal shape.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

from plaudit_job.tasks import Task
from plaudit_reward.providers import ROOT, WORKDIR, MachineChoice, TaskMachine, outside_problem, read_about
from plaudit_sandbox import machine as folders
from plaudit_sandbox.archives import FilesTooLargeError
from plaudit_sandbox.machine import MachineLimits
from plaudit_sandbox.pod_cluster import ClaimCluster, PodCluster
from plaudit_sandbox.pod_manifests import (
    LABEL,
    Network,
    PodSettings,
    is_writable,
    label_value,
    template_problem,
    workdir_problem,
)
from plaudit_sandbox.pods import KeptPod, PodMachine, new_name
from plaudit_wire.errors import ConfigurationError, InfrastructureError

NAMESPACE_VARIABLE: Final = "PLAUDIT_SANDBOXES_NAMESPACE"
"""The namespace of the pods; unset: that of this pod, or of the kubeconfig's context."""
POD_VARIABLE: Final = "PLAUDIT_SANDBOXES_POD"
"""The name of this process's own pod in that namespace. What made it takes the machines along when it is deleted."""
RUN_LABEL: Final = "plaudit.dev/run"
_PROCESSES = 512
"""Fewer than a node allows a pod (``podPidsLimit``, 1,024 on some): the keeper needs a few."""
_POD: Final = "pod.json"
"""In a machine's folder: which pod it is. Written before the pod is made, so that it can be found."""
_KEPT: Final = "kept.json"
_ARCHIVE: Final = "machine.tar"
"""In the folder of a machine that was kept: what its pod was, and its files. The first is written last."""


@dataclass(frozen=True)
class _Needs:
    """All that a pod is started with."""

    image: str
    network: Network
    cpus: float
    limits: MachineLimits
    workdir: str
    """Empty: the image's own."""
    takes_files: bool
    """The task's files are copied into it."""


@dataclass
class PodProvider:
    """Pods of one namespace."""

    choice: MachineChoice
    claims: bool = False
    """Agent Sandbox makes the pods of agents, for claims (``agentSandbox``)."""
    namespace: str = field(default_factory=lambda: os.environ.get(NAMESPACE_VARIABLE, ""))
    own_pod: str = field(default_factory=lambda: os.environ.get(POD_VARIABLE, ""))
    _workdirs: dict[str, Future[str]] = field(default_factory=dict)
    """Of images, as the first pod of each reports it."""
    _awaiting_files: dict[Path, PodMachine] = field(default_factory=dict)
    """By folder, until they are filled or removed."""

    @cached_property
    def cluster(self) -> PodCluster:
        """Return the cluster; raise ``ConfigurationError`` if there is none."""
        return (ClaimCluster if self.claims else PodCluster)(self.namespace)

    @cached_property
    def owner(self) -> Mapping[str, str] | None:
        """Return what takes the machines along when it is deleted. Raises ``InfrastructureError``."""
        return self.cluster.controller(self.own_pod) if self.own_pod else None

    def require(self) -> None:
        """Look for the cluster and the right to make machines, and make the network policies."""
        if problem := template_problem(self.choice.pod_template):
            raise ConfigurationError(f"sandboxes.pod.template: {problem}")
        self.cluster.require(["none", self.choice.network])

    def problem(self, task: Task) -> str:
        """Refuse a task without an image, with GPUs, a user, or with a network or a workdir that pods do not have."""
        if problem := self.choice.problem(task, "pods"):
            return problem
        if set(ROOT).intersection((task.config.agent.user, task.config.verifier.user)):
            return (
                f"task {task.name} names the user root, and pods run as a user of their own: remove user from task.toml"
            )
        environment = task.config.environment
        named = environment.workdir if "workdir" in environment.model_fields_set else WORKDIR
        problem = workdir_problem(named)
        if (tests := task.tests_environment) is not None:
            problem = problem or workdir_problem(tests.workdir)
        if problem or "workdir" not in environment.model_fields_set:  # the image's own may be anywhere
            return f"task {task.name}: {problem}" if problem else ""
        return outside_problem(task, named)

    def make(self, folder: Path, task: Task | None) -> TaskMachine:
        """Start a pod, and copy the task's files into it."""
        self.start(folder, task)
        return self.fill(folder, task)

    def shape(self, task: Task | None) -> str:
        """Return all that a task's pod is started with."""
        return repr(self._needs(task))

    def start(self, folder: Path, task: Task | None) -> None:
        """Start a pod without its task's files, and wait until it runs. Raises ``InfrastructureError``.

        The image's own workdir is known only when its first pod runs. Where the agent could not write to it, that pod
        is made a second time; others wait, to be made once.
        """
        needs = self._needs(task)
        workdir = needs.workdir or self._told_workdir(needs.image)
        machine = self._started(folder, needs, workdir) if workdir else self._started_first(folder, needs)
        if needs.takes_files:
            with suppress(InfrastructureError):  # it is started again when the files come
                machine.await_upload(machine.settings.workdir)
            self._awaiting_files[folder] = machine

    def fill(self, folder: Path, task: Task | None) -> TaskMachine:
        """Copy a task's files into the pod that was started in a folder. Raises ``InfrastructureError``."""
        given = task.given_files if task is not None else None
        machine = self._awaiting_files.pop(folder, None) or self._found(folder, task)
        try:
            if given is None:
                self._label(folder, machine)
            else:
                with machine.uploading(given, machine.settings.workdir):
                    self._label(folder, machine)
            if not folder.is_dir():
                raise InfrastructureError(f"the machine {folder.parent.name}/{folder.name} was removed meanwhile")
        except BaseException:
            machine.remove()
            raise
        return self._made(machine, task)

    def find(self, folder: Path, task: Task | None) -> TaskMachine:
        """Read which pod it is, which must be one of this run: users' code can write to the folder.

        It may be one that was kept. Raises ``InfrastructureError``.
        """
        is_kept = (folder / _KEPT).exists()
        return self._made(self._kept(folder, task) if is_kept else self._found(folder, task), task)

    def keep(self, folder: Path, made: TaskMachine, to: Path) -> None:
        """Archive the files that the agent has left; only that they are too many, where the machine's disk is full."""
        machine = cast(PodMachine, made.machine)
        part, is_full = folder / f"{_ARCHIVE}.{secrets.token_hex(4)}", False  # this folder goes with the pod
        try:
            try:
                machine.keep(part)
                part.rename(to / _ARCHIVE)
            except FilesTooLargeError:
                is_full = True
            settings, path = machine.settings, machine.reported_by_image()[1]
            about = {"image": settings.image, "workdir": settings.workdir, "path": path, "is_full": is_full}
            part.write_text(json.dumps(about))
            part.rename(to / _KEPT)
        except OSError as error:
            raise InfrastructureError(f"{machine.name} cannot be kept: {error.strerror or error}") from error

    def _kept(self, folder: Path, task: Task | None) -> KeptPod:
        written, needs = read_about(folder, _KEPT), self._needs(task)
        settings = self._settings(needs, written["image"], written["workdir"])
        archive = None if written["is_full"] else folder / _ARCHIVE
        return KeptPod(self.cluster, settings, needs.limits, archive, written["path"])

    def _found(self, folder: Path, task: Task | None) -> PodMachine:
        written = read_about(folder, _POD)
        if not self.cluster.find({LABEL: written["name"], **self._labels()}):
            raise InfrastructureError(f"the machine {folder.parent.name}/{folder.name} is gone")
        needs = self._needs(task)
        settings = self._settings(needs, written["image"], written["workdir"])
        return PodMachine(self.cluster, written["name"], settings, needs.limits, written.get("uid", ""))

    def remove(self, *places: Path) -> None:
        """Remove the pods, those of their tests, and the folders.

        Raises ``InfrastructureError`` if a pod may be left.
        """
        for folder in places:
            if (machine := self._awaiting_files.pop(folder, None)) is not None:
                machine.forgo_upload()
            try:
                name = read_about(folder, _POD)["name"]
            except InfrastructureError:  # no pod was made
                continue
            self.cluster.remove({LABEL: name, **self._labels()})
        folders.remove(*places)

    def end(self) -> None:
        """Remove what a killed process made for a folder that was gone."""
        if self.choice.run:
            self.cluster.remove(self._labels())

    def reap(self, machines: Iterable[Path]) -> None:
        """Remove the run's pods that none of these folders names; young ones may not have been written down yet."""
        held = set()
        for folder in machines:
            with suppress(InfrastructureError):
                held.add(read_about(folder, _POD)["name"])
        if self.choice.run:
            self.cluster.reap(self._labels(), held.__contains__)

    def _told_workdir(self, image: str) -> str:
        """Wait for the workdir of an image that a first pod tells; return an empty one if the caller's is the first."""
        own: Future[str] = Future()
        if (told := self._workdirs.setdefault(image, own)) is not own:
            with suppress(InfrastructureError):
                return told.result()
        return ""

    def _started_first(self, folder: Path, needs: _Needs) -> PodMachine:
        told = self._workdirs.setdefault(needs.image, Future())
        try:
            machine = self._started(folder, needs, WORKDIR)
            workdir = machine.reported_by_image()[0]
            if workdir in ("", "/") or workdir_problem(workdir):
                workdir = WORKDIR
        except BaseException as error:
            self._workdirs.pop(needs.image, None)
            with suppress(InvalidStateError):  # after a first one that failed, all others are first ones
                told.set_exception(InfrastructureError(str(error)))
            raise
        with suppress(InvalidStateError):
            told.set_result(workdir)
        if not is_writable(workdir, machine.settings):
            machine.remove()
            return self._started(folder, needs, workdir)
        machine.settings = replace(machine.settings, workdir=workdir)
        self._write(folder, machine, workdir)
        return machine

    def _started(self, folder: Path, needs: _Needs, workdir: str) -> PodMachine:
        settings = self._settings(needs, needs.image, workdir)
        machine = PodMachine(self.cluster, new_name(), settings, needs.limits)
        self._write(folder, machine, workdir)
        machine.create()
        self._write(folder, machine, workdir)  # with its uid
        return machine

    def _label(self, folder: Path, machine: PodMachine) -> None:
        """Let the pod tell its sample, where the folder's name does."""
        index, _, rest = folder.name.partition("-")
        if rest and index.isdigit():
            labels = {"plaudit.dev/group": label_value(folder.parent.name), "plaudit.dev/index": label_value(index)}
            self.cluster.label(machine.name, labels)

    def _made(self, machine: PodMachine, task: Task | None) -> TaskMachine:
        settings = machine.settings
        separate = self.choice.separate(task, settings.workdir, _PROCESSES)
        return TaskMachine(machine, settings.workdir, cpus=settings.cpus, separate=separate)

    def _write(self, folder: Path, machine: PodMachine, workdir: str) -> None:
        written = {"name": machine.name, "uid": machine.uid, "image": machine.settings.image, "workdir": workdir}
        try:
            (folder / _POD).write_text(json.dumps(written))
        except OSError as error:
            with suppress(InfrastructureError):
                self.cluster.remove({LABEL: machine.name, **self._labels()})
            raise InfrastructureError(f"the machine {folder.parent.name}/{folder.name} is gone") from error

    def _settings(self, needs: _Needs, image: str, workdir: str) -> PodSettings:
        return PodSettings(
            image=image,
            network=needs.network,
            cpus=needs.cpus,
            workdir=workdir,
            labels=self._labels(),
            template=self.choice.pod_template,
            owner=self.owner,
            shares_template=self.claims,
        )

    def _labels(self) -> dict[str, Any]:
        return {RUN_LABEL: label_value(self.choice.run)} if self.choice.run else {}

    def _needs(self, task: Task | None) -> _Needs:
        environment = task.config.environment if task else None
        return _Needs(
            image=self.choice.image_of(task),
            network=self.choice.network_of(environment),
            cpus=environment.cpus if environment else 1.0,
            limits=self.choice.limits(environment, _PROCESSES),
            workdir=environment.workdir if environment and "workdir" in environment.model_fields_set else "",
            takes_files=task is not None and task.given_files is not None,
        )
