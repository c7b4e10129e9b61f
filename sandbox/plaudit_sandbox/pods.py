"""Run an agent in a pod of Kubernetes, and its tests in a new pod with a copy of the files that it left.

Programs of the image cannot be changed in either pod: their roots are read only. What the provider reads of a machine,
it reads through the ``keeper``, a second container of the same image with processes of its own, which mounts the
agent's files read only. So no program that an agent's process could replace, trace or end is believed:

1. The keeper makes a file that the machine's first process waits for. The process ends, and the kernel ends all others.
   The agent's container cannot be started again, so its files stay as they are for every further verification.
2. The keeper archives the files. They travel through this process, which takes over files, folders and links alone,
   into a new pod in which nothing has run. Folders of programs, such as a virtual environment of the image in its
   ``PATH``, are the image's own there.
3. The tests run. Then their container ends in the same way, and its keeper archives ``/logs/verifier``.

An agent that takes over the first process of its container (it may trace it, for both have one user) can refuse to end.
It cannot touch the tests by this, but its files could change until a second verification; so this counts as a changed
program, and earns 0.

Commands are those of ``pod_commands``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final, cast

from plaudit_sandbox.archives import FilesTooLargeError, RewardArchive, copy_files, write_content
from plaudit_sandbox.machine import (
    AT_A_LIMIT,
    KILLED,
    LOG_FOLDERS,
    REWARD_FILES,
    CommandEnd,
    MachineLimits,
    SeparateTests,
    UnusableMachineError,
)
from plaudit_sandbox.pod_cluster import ClusterError, PodCluster, PodProcess, ProcessOutput
from plaudit_sandbox.pod_commands import (
    END_S,
    POLL_S,
    REPORTED_S,
    STEP_S,
    PodExecution,
    answer,
    ask_keeper,
    end_machine,
    extracted,
    in_thread,
    raise_if_lost,
    receiving,
    wait_for,
    wait_until_extracted,
)
from plaudit_sandbox.pod_manifests import (
    FILES,
    FILL,
    GIVEN,
    KEEPER,
    LABEL,
    LOADED,
    LOGS,
    MACHINE,
    ROLE_LABEL,
    STAGED,
    UNTIL_FILLED,
    PodSettings,
    agent_pod,
    ending_of,
    has_ended,
    is_running,
    is_used,
    placement,
    program_folders,
    ran_out_of_memory,
    renewal,
    reported_by_image,
    tests_pod,
)
from plaudit_wire.errors import InfrastructureError

_READY_S = 600.0
_NOT_ENDING: Final = "/proc/1 (the machine's first process does not end)"
_LINKS_A_CALL, _LONGEST_OF_IMAGES = 16, 400
"""A command travels in an address, whose length is limited. No image has links with longer names."""


class PodMachine:
    """One machine in a pod."""

    def __init__(
        self, cluster: PodCluster, name: str, settings: PodSettings, limits: MachineLimits, uid: str = ""
    ) -> None:
        """Take over a pod that exists; ``uid`` tells it from another of its name."""
        self.name = name
        self.uid = uid
        self.limits = limits
        self.settings = settings
        self._cluster = cluster
        self._receiver: PodProcess | None = None
        self._is_used = False
        """Something of its agent has run, by this object; else the pod's label tells."""
        self._unusable = ""
        """Why no further command can be started, by the agent's doing; empty if one may be."""

    @classmethod
    def new(cls, cluster: PodCluster, settings: PodSettings, limits: MachineLimits) -> PodMachine:
        """Make a new pod with a name of its own, and wait until it runs. Raises ``InfrastructureError``."""
        machine = cls(cluster, new_name(), settings, limits)
        machine.create()
        return machine

    def create(self) -> None:
        """Make the pod and wait until it runs; raise ``InfrastructureError`` in Kubernetes's words if it cannot."""
        try:
            made = self._cluster.create(agent_pod(self.name, self.settings, self.limits))
            self.uid = made["metadata"]["uid"]
            wait_for(self._cluster, self.name, _runs, _READY_S)
        except BaseException:
            self.remove()
            raise

    def reported_by_image(self) -> tuple[str, str]:
        """Return the image's workdir and its ``PATH``."""
        return reported_by_image(self._cluster.read(self.name))

    def found(self) -> dict[str, Any]:
        """Return the pod; raise ``InfrastructureError`` if it was lost, or another has taken its place and name."""
        pod = self._cluster.read(self.name)
        raise_if_lost(self.name, pod)
        if self.uid not in ("", pod["metadata"]["uid"]):
            raise InfrastructureError(f"the pod {self.name} was lost: another has taken its place")
        return pod

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] = {},
        directory: str = "/app",
        mounts: Mapping[str, Path] = {},
        stdin: bytes = b"",
    ) -> CommandEnd:
        """Run a command to its end or to a limit, which ends every process of the pod's agent.

        Args:
            environment: Added to the image's own.
            mounts: Copied into the pod before, to a place that the agent may write to or to ``/solution``.
        """
        if self._unusable:
            return CommandEnd("exited", KILLED, f"[{self._unusable}]\n", 0.0)
        for place, folder in mounts.items():
            await in_thread(self.upload, folder, place)
        run = PodExecution(
            self._cluster, self.name, self.settings, self.limits, is_agent_s=True, is_first=not self._is_used
        )
        executed = await run.finished(command, timeout_s, environment, directory, stdin)
        self._is_used, self._unusable = True, run.unusable
        return executed

    def upload(self, folder: Path, place: str) -> None:
        """Copy the files of a host's folder into the new pod, before the agent's first command."""
        with self.uploading(folder, place):
            pass

    @contextlib.contextmanager
    def uploading(self, folder: Path, place: str) -> Iterator[None]:
        """Send the files of a host's folder into the new pod; leaving waits until they are there."""
        receiver, self._receiver = self._receiver or receiving(self._cluster, self.name, MACHINE, place), None
        with contextlib.closing(receiver):
            with contextlib.suppress(ClusterError):  # whatever stands between may have closed the silent connection
                write_content(cast(IO[bytes], receiver), folder)
                receiver.end_input()
            yield
            try:
                wait_until_extracted(receiver)
            except InfrastructureError:
                _put(self._cluster, self.name, MACHINE, folder, place)

    def await_upload(self, place: str) -> None:
        """Start what receives files for a place already, which takes longer than sending them. Raises ``ClusterError``.

        It waits for ``uploading`` or ``forgo_upload``.
        """
        self._receiver = receiving(self._cluster, self.name, MACHINE, place)

    def forgo_upload(self) -> None:
        """End what waits for files."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def disk_bytes(self) -> int:
        """Return the space of the folders that the agent may write to, with what the image had there.

        More than the limit where Kubernetes has ended the pod for its size, and for what cannot be counted.
        """
        if ending_of(pod := self._cluster.read(self.name)) == "disk":
            return self.limits.disk_bytes + 1
        raise_if_lost(self.name, pod)
        if self._unusable:
            raise UnusableMachineError(self._unusable)
        counted = ask_keeper(self._cluster, self.name, f"du -sk {FILES} 2>/dev/null; :").split()
        is_counted = bool(counted) and counted[0].isdigit()
        return int(counted[0]) << 10 if is_counted else self.limits.disk_bytes + 1

    @contextlib.asynccontextmanager
    async def for_tests(self, tests: Path, separate: SeparateTests | None = None) -> AsyncIterator[PodCopy]:
        """End every process of the agent, and yield a new pod with its files. The agent's pod stays, without them."""
        copied = PodCopy(self, self._cluster, tests, separate)
        try:
            await in_thread(copied.prepare)
            yield copied
        finally:
            await in_thread(copied.remove)

    def remove(self) -> None:
        """Delete the pod, and what a killed process left of its tests."""
        self._cluster.remove({LABEL: self.name})

    def end(self) -> bool:
        """End every process of the agent for good; return False if the first one refuses to end."""
        if _end(self._cluster, self.name):
            return True
        if not is_used(self._cluster.read(self.name)):
            raise InfrastructureError(f"the first process of {self.name} does not end, and nothing else ran there")
        return False

    @contextlib.contextmanager
    def files(self, places: Sequence[str]) -> Iterator[IO[bytes]]:
        """Yield an archive of some of the folders that the agent may write to, as the keeper reads them.

        Raises ``FilesTooLargeError`` if the keeper has no memory for so many files, else ``InfrastructureError``.
        """
        # What the agent's user cannot read stays behind: the exit code of tar is then 1 or 2.
        reader = self._cluster.execute(
            self.name, KEEPER, f"exec tar -c -f - -C {FILES} -- {shlex.join(places)} 2>/dev/null"
        )
        try:
            yield cast(IO[bytes], ProcessOutput(reader, time.monotonic() + STEP_S))
        except InfrastructureError as error:
            _raise_if_short_of_memory(self._cluster, self.name, KEEPER, reader.exit_code, error)
            raise
        finally:
            reader.close()

    def keep(self, archive: Path) -> None:
        """End every process of the agent, and write all of its files to a new file of this host, for ``KeptPod``.

        Raises ``FilesTooLargeError`` if they are more than the machine may hold, ``InfrastructureError`` if they cannot
        be read or written.
        """
        if self.disk_bytes() > self.limits.disk_bytes:
            raise FilesTooLargeError(f"the machine holds more than its {self.limits.disk_bytes >> 20} MiB")
        if not self.end():
            raise InfrastructureError(f"the files of {self.name} may still change: {_NOT_ENDING}")
        places = self.settings.places()
        try:
            with archive.open("xb") as target, self.files(places) as source:
                copy_files(source, target, places, self.limits.disk_bytes)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            raise InfrastructureError(f"the files of {self.name} cannot be kept: {error.strerror or error}") from error


class KeptPod(PodMachine):
    """The files of a machine whose pod is gone, of which nothing but tests can run.

    Args:
        archive: What ``PodMachine.keep`` wrote; None: the agent left more than its machine may hold.
        path_variable: The image's ``PATH``.
    """

    def __init__(
        self,
        cluster: PodCluster,
        settings: PodSettings,
        limits: MachineLimits,
        archive: Path | None,
        path_variable: str,
    ) -> None:
        super().__init__(cluster, new_name(), settings, limits)
        self._archive = archive
        self._path_variable = path_variable

    def reported_by_image(self) -> tuple[str, str]:
        """Return what the pod reported."""
        return self.settings.workdir, self._path_variable

    def found(self) -> dict[str, Any]:
        """Return what the pods of its tests must know."""
        return {"metadata": {"name": self.name}}

    def end(self) -> bool:
        """Return True: nothing of the agent runs."""
        return True

    def disk_bytes(self) -> int:
        """Return more than the limit for files that cannot be tested."""
        return self.limits.disk_bytes + 1 if self._archive is None else 0

    @contextlib.contextmanager
    def files(self, places: Sequence[str]) -> Iterator[IO[bytes]]:
        """Yield the archive, which may hold more than these places. Raises ``InfrastructureError``."""
        assert self._archive is not None  # its disk was full, and no test runs
        try:
            source = self._archive.open("rb")
        except OSError as error:
            raise InfrastructureError(f"{self._archive} cannot be read: {error.strerror or error}") from error
        with source:
            yield source


class PodCopy:
    """A new pod, with the files of an agent's."""

    def __init__(
        self, agent: PodMachine, cluster: PodCluster, tests: Path, separate: SeparateTests | None = None
    ) -> None:
        """Name it; ``prepare`` makes it."""
        self._separate = separate
        self._limits, self._settings = agent.limits, agent.settings
        if separate is not None:
            self._limits = separate.limits
            self._settings = replace(
                agent.settings,
                image=separate.image,
                network=separate.network,
                cpus=separate.cpus,
                workdir=separate.directory,
            )
        self.changed_programs: Sequence[str] = ()
        self._agent = agent
        self._cluster = cluster
        self._tests = tests
        self._name = f"{agent.name}-{secrets.token_hex(3)}"
        self._waiting: list[tuple[str, str]] = []
        """Path and target of links in the agent's files at which a reader may wait for ever."""
        self._rewards: RewardArchive | None = None

    def prepare(self) -> None:
        """Make the pod, end the agent, and copy its files. Raises ``FilesTooLargeError``, ``InfrastructureError``."""
        self.remove()  # what a killed process left
        agent = self._agent.found()
        is_separate = self._separate is not None
        self._cluster.create(tests_pod(self._name, agent, self._settings, self._limits, is_separate=is_separate))
        if not self._agent.end():
            self.changed_programs = [_NOT_ENDING]
            return
        wait_for(self._cluster, self._name, _fills, _READY_S)
        if self._separate is None:
            places = [place for place in self._settings.places() if place != "logs"]
            self._copy_files(places, FILES)
            programs = program_folders(self._agent.reported_by_image()[1], self._settings)
            placed = renewal(programs, self._settings)
        else:
            answer(self._cluster, self._name, FILL, UNTIL_FILLED)
            if self._separate.given is not None:
                _put(self._cluster, self._name, FILL, self._separate.given, FILES + self._separate.directory)
            self._copy_files([path[1:] for path in self._separate.artifacts], STAGED)
            placed = placement(self._separate.artifacts)
        _put(self._cluster, self._name, FILL, self._tests, f"{GIVEN}/tests")
        folders = " ".join(f"{LOGS}/{name}" for name in LOG_FOLDERS)
        answer(self._cluster, self._name, FILL, f"mkdir {folders} && chmod 777 {folders} || exit\n{placed}")
        with contextlib.suppress(InfrastructureError):  # it ends the container, which may end it first
            answer(self._cluster, self._name, FILL, LOADED)
        wait_for(self._cluster, self._name, _runs, _READY_S)

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Run the tests, end all that they left, and read what they left in ``/logs/verifier``."""
        run = PodExecution(self._cluster, self._name, self._settings, self._limits, is_agent_s=False)
        executed = await run.finished(command, timeout_s, environment, directory, b"")
        if executed.ending != "exited":
            return executed
        if not await in_thread(_end, self._cluster, self._name):
            return CommandEnd("timeout", AT_A_LIMIT, executed.output, executed.seconds)
        self._rewards = await in_thread(self._read_logs)
        return executed

    def may_block(self) -> bool:
        """Look for links that the agent has left and the image has not; pipes and devices are never copied."""
        # The keepers of both pods see the image itself; of a machine that was kept, only that of the tests is there.
        keeper = self._name if isinstance(self._agent, KeptPod) else self._agent.name
        texts = [f"/{path}{target}" for path, target in self._waiting]
        if not all(text.isprintable() and len(text) < _LONGEST_OF_IMAGES for text in texts):
            return True
        for first in range(0, len(self._waiting), _LINKS_A_CALL):
            some = self._waiting[first : first + _LINKS_A_CALL]
            same = (f'[ "$(readlink {shlex.quote(f"/{path}")})" = {shlex.quote(target)} ]' for path, target in some)
            if answer(self._cluster, keeper, KEEPER, f"{' && '.join(same)} || echo differs"):
                return True
        return False

    def reward_file(self, name: str) -> str | None:
        """Return the text of a file that the tests left; None if there is none. Raises ``DataError``."""
        return self._rewards.text(name) if self._rewards else None

    def remove(self) -> None:
        """Delete the pods of the agent's tests."""
        self._cluster.remove({LABEL: self._agent.name, ROLE_LABEL: "tests"})

    def _copy_files(self, places: Sequence[str], to: str) -> None:
        """Copy the agent's files into a folder of the new pod."""
        target, are_artifacts = None, self._separate is not None
        try:
            with (
                self._agent.files(places) as source,
                extracted(receiving(self._cluster, self._name, FILL, to)) as target,
            ):
                room_bytes = self._limits.disk_bytes
                copy_files(source, target, places, room_bytes, are_artifacts=are_artifacts, waiting=self._waiting)
        except InfrastructureError as error:
            code = target.exit_code if target else None
            _raise_if_short_of_memory(self._cluster, self._name, FILL, code, error)
            raise

    def _read_logs(self) -> RewardArchive:
        reader = self._cluster.execute(self._name, KEEPER, f"exec tar -c -f - -C {LOGS} verifier 2>/dev/null")
        try:
            return RewardArchive(cast(IO[bytes], ProcessOutput(reader, time.monotonic() + STEP_S)), REWARD_FILES)
        finally:
            reader.close()


def new_name() -> str:
    """Return a name that no pod has."""
    return f"plaudit-{secrets.token_hex(8)}"


def _runs(pod: Mapping[str, Any]) -> bool:
    return is_running(pod, MACHINE) and is_running(pod, KEEPER)


def _fills(pod: Mapping[str, Any]) -> bool:
    return is_running(pod, FILL)


def _end(cluster: PodCluster, name: str) -> bool:
    """End the machine of a pod, and wait until its node reports so; return False if it does not end."""
    until_s = time.monotonic() + END_S
    if not has_ended(cluster.read(name), MACHINE):
        end_machine(cluster, name)
    while not has_ended(pod := cluster.read(name), MACHINE):
        raise_if_lost(name, pod)
        if time.monotonic() > until_s:
            end_machine(cluster, name)  # the node answers, so that it is the machine that does not end
            return False
        time.sleep(POLL_S)
    raise_if_lost(name, pod)
    return True


def _raise_if_short_of_memory(
    cluster: PodCluster, name: str, container: str, exit_code: int | None, error: Exception
) -> None:
    """Raise ``FilesTooLargeError`` if the agent left so many files that a program that copies them had no memory."""
    until_s = time.monotonic() + REPORTED_S
    while exit_code != KILLED and not ran_out_of_memory(cluster.read(name), container):
        if time.monotonic() > until_s:
            return
        time.sleep(POLL_S)
    raise FilesTooLargeError("the machine holds more files than its memory can list") from error


def _put(cluster: PodCluster, name: str, container: str, folder: Path, place: str) -> None:
    with extracted(receiving(cluster, name, container, place)) as target:
        write_content(target, folder)
