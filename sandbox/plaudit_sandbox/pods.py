"""Run an agent in a pod of Kubernetes, and its tests in the same pod after every process of the agent has ended.

Commands travel through the API server (``exec``), 20-60 ms each. Everything that the provider itself does in a pod, it
does by the BusyBox of ``pod_manifests``, with no process of the agent alive beside it. A command and its variables
travel as input, because Kubernetes writes the arguments of an exec to its audit log.

The tests run in the agent's own pod, as nothing can copy one: a verification that is repeated after a crash finds what
the first one left. Programs of the image belong to root, which an agent is not by default; one that was changed all the
same is found by its time of change, which a program cannot set.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import os
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import urllib3
from kubernetes import client, config
from kubernetes.stream import stream
from websocket import WebSocketException

from plaudit_sandbox.archives import RewardArchive, write_content
from plaudit_sandbox.machine import REWARD_FILES, CommandEnd, Ending, KeptOutput, MachineLimits
from plaudit_sandbox.pod_manifests import (
    BUSYBOX,
    CONTAINER,
    LABEL,
    WRITABLE_VOLUMES,
    Network,
    PodSettings,
    network_policy,
    pod,
)
from plaudit_sandbox.tampering import PROGRAM_FOLDERS, PYCACHE_ELSEWHERE, changed_programs
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError

Answer = TypeVar("Answer")
_READY_S = 600.0
_POLL_S = 0.5
_STEP_S = 120.0
_CHUNK_BYTES = 1 << 16
_LARGEST_ANSWER_BYTES = 65 << 20
"""More than a ``RewardArchive`` reads, which then tells that it was too much."""
_KILLED = 128 + 9
_VOLUMES: Final = " ".join(f"/{name}" for name in WRITABLE_VOLUMES)
_EXECS: Final = concurrent.futures.ThreadPoolExecutor(256, "plaudit-pod")
"""Each command waits in a thread; the event loop's own pool is too small for hundreds, and others need it."""


class PodCluster:
    """A namespace of a cluster that machines may be made in."""

    def __init__(self, namespace: str) -> None:
        """Read the kubeconfig, or the service account of this pod. Raises ``ConfigurationError``."""
        self.namespace = namespace
        try:
            try:
                config.load_kube_config(os.environ.get("KUBECONFIG"))  # the package reads it when it is imported
            except config.ConfigException:
                config.load_incluster_config()
        except config.ConfigException as error:
            raise ConfigurationError(f"no cluster is configured: {error}. Set KUBECONFIG") from error
        self._configuration = client.Configuration.get_default_copy()
        self._api = client.ApiClient(self._configuration)
        self.pods = client.CoreV1Api(self._api)

    def ensure_policy(self, network: Network) -> None:
        """Create the network policy of a mode if the namespace has none. Raises ``InfrastructureError``."""
        try:
            client.NetworkingV1Api(self._api).create_namespaced_network_policy(self.namespace, network_policy(network))
        except client.ApiException as error:
            if error.status != 409:
                raise _failed("create a network policy", error) from error

    def opened(self, name: str, command: Sequence[str], *, stdin: bool) -> Any:
        """Open a connection to a new process of a machine. Raises ``InfrastructureError``."""
        # The client puts a websocket in place of its own requests while it connects, so each needs one of its own.
        api = client.CoreV1Api(client.ApiClient(self._configuration))
        try:
            connection = stream(
                api.connect_get_namespaced_pod_exec,
                name,
                self.namespace,
                container=CONTAINER,
                command=list(command),
                stdin=stdin,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
            )
            connection._all = _Nowhere()  # else the client keeps all output beside what it hands out
            return connection
        except (client.ApiException, WebSocketException, OSError, urllib3.exceptions.HTTPError) as error:
            raise _failed(f"start a command in {name}", error) from error

    def call(self, what: str, request: Callable[..., Answer], *arguments: object, **options: object) -> Answer:
        """Call the API. Raises ``InfrastructureError`` with what was tried."""
        try:
            return request(*arguments, **options)
        except (client.ApiException, OSError, urllib3.exceptions.HTTPError) as error:
            raise _failed(what, error) from error

    def remove(self, name: str) -> None:
        """Delete a pod without waiting for its programs; nothing happens if it is gone."""
        try:
            self.pods.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        except client.ApiException as error:
            if error.status != 404:
                raise _failed(f"delete the pod {name}", error) from error

    def remove_of(self, labels: Mapping[str, str]) -> None:
        """Delete every machine with these labels. Raises ``InfrastructureError``."""
        selector = ",".join([LABEL, *(f"{name}={value}" for name, value in labels.items())])
        self.call(
            "delete pods",
            self.pods.delete_collection_namespaced_pod,
            self.namespace,
            label_selector=selector,
            grace_period_seconds=0,
        )


class PodMachine:
    """One machine in a pod."""

    def __init__(self, cluster: PodCluster, name: str, settings: PodSettings, limits: MachineLimits) -> None:
        """Take over a pod that exists."""
        self.name = name
        self.limits = limits
        self._cluster = cluster
        self._settings = settings

    @classmethod
    def create(cls, cluster: PodCluster, settings: PodSettings, limits: MachineLimits) -> PodMachine:
        """Make a new pod and wait until it runs. Raises ``InfrastructureError``, with the reason if it cannot."""
        cluster.ensure_policy(settings.network)
        machine = cls(cluster, f"plaudit-{secrets.token_hex(8)}", settings, limits)
        manifest = pod(machine.name, settings, limits)
        cluster.call("create a pod", cluster.pods.create_namespaced_pod, cluster.namespace, manifest)
        try:
            machine._wait_until_ready()
        except BaseException:
            machine.remove()
            raise
        return machine

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
        """Run a command to its end or to a limit, which ends every process of the pod.

        Args:
            environment: Added to the image's own.
            mounts: Copied into the pod before, to a place that its user may write to.
        """
        for place, folder in mounts.items():
            await _in_thread(self._put, folder, place)
        script = _script(command, environment, directory)
        began_s = time.monotonic()
        output = KeptOutput(self.limits.output_bytes)
        stopped = threading.Event()
        try:
            ending, code = await _in_thread(self._execute, script, stdin, timeout_s, output, stopped)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return CommandEnd(ending, 124 if ending != "exited" else code, output.text(), time.monotonic() - began_s)

    def upload(self, folder: Path, place: str) -> None:
        """Copy the files of a host's folder into the new pod."""
        self._put(folder, place)

    def disk_bytes(self) -> int:
        """Return 0, or more than the limit where Kubernetes has ended the pod for it."""
        return self.limits.disk_bytes + 1 if self._ended() == "disk" else 0

    @contextlib.asynccontextmanager
    async def for_tests(self, tests: Path) -> AsyncIterator[PodForTests]:
        """End every process of the agent, empty ``/tests``, ``/logs`` and ``/run``, and yield the pod for tests."""
        prepared = PodForTests(self)
        await _in_thread(self.end_processes)
        prepared.changed_programs = await _in_thread(self._find_changes)
        if not prepared.changed_programs:
            await _in_thread(self._renew, tests)
        yield prepared

    def remove(self) -> None:
        """Delete the pod."""
        self._cluster.remove(self.name)

    def end_processes(self) -> None:
        """End every process of the pod but the first one, which only waits."""
        self._trusted([BUSYBOX, "kill", "-9", "-1"])  # which spares the first process and itself

    def logs(self) -> RewardArchive:
        """Read ``/logs/verifier``, when no process is left."""
        archive = self._trusted(f"{BUSYBOX} tar -c -f - -C /logs verifier")
        return RewardArchive(io.BytesIO(archive), REWARD_FILES)

    def _renew(self, tests: Path) -> None:
        self._trusted(
            f"{BUSYBOX} chmod -R u+rwX {_VOLUMES} 2>/dev/null; {BUSYBOX} find {_VOLUMES} -mindepth 1 -maxdepth 1 -exec {BUSYBOX} rm -rf {{}} + && "
            f"{BUSYBOX} mkdir /logs/verifier /logs/agent /logs/artifacts"
        )
        self._put(tests, "/tests")

    def _put(self, folder: Path, place: str) -> None:
        with tempfile.TemporaryFile() as archive:
            write_content(archive, folder)
            size = archive.tell()
            archive.seek(0)
            where = shlex.quote(place)
            self._trusted(
                f"{BUSYBOX} mkdir -p {where} && {BUSYBOX} head -c {size} | {BUSYBOX} tar -x -o -f - -C {where}", archive
            )

    def _find_changes(self) -> list[str]:
        """Return the programs of the image that changed after the machine's container had started."""
        state = self._container()
        started_s = int(state.state.running.started_at.timestamp())
        folders = " ".join(PROGRAM_FOLDERS)
        listing = self._trusted(
            f"for each in {folders}; do [ -e $each ] && echo $each; done | {BUSYBOX} xargs -I % "
            f"{BUSYBOX} find -H % -xdev -exec {BUSYBOX} stat -c '%Z %n' {{}} + | {BUSYBOX} awk '$1 > {started_s}'"
        )
        paths = [line.partition(" ")[2] for line in listing.decode(errors="replace").splitlines()]
        return changed_programs(paths, "", self._settings.workdir, lambda _: False)

    def _trusted(self, script: str | Sequence[str], stdin: IO[bytes] | None = None) -> bytes:
        """Run a script or a command of BusyBox; return what it printed. Raises ``InfrastructureError`` if it fails."""
        command = [BUSYBOX, "sh", "-c", script] if isinstance(script, str) else script
        connection = self._cluster.opened(self.name, command, stdin=stdin is not None)
        answer, errors = bytearray(), bytearray()
        until_s = time.monotonic() + _STEP_S
        try:
            while stdin is not None and (data := stdin.read(_CHUNK_BYTES)):
                connection.write_stdin(data)
            while _receive(connection, answer.extend, errors.extend):
                if len(answer) > _LARGEST_ANSWER_BYTES:
                    return bytes(answer)
                if time.monotonic() > until_s:
                    raise InfrastructureError(f"the pod {self.name} did not answer within {_STEP_S:g} s")
            if _exit_code(connection) != 0:
                why = errors.decode(errors="replace").strip()[-300:]
                raise InfrastructureError(f"the pod {self.name} cannot be prepared: {why}")
        except (WebSocketException, OSError) as error:
            raise _failed(f"reach the pod {self.name}", error) from error
        finally:
            connection.close()
        return bytes(answer)

    def _execute(
        self, script: bytes, stdin: bytes, timeout_s: float, output: KeptOutput, stopped: threading.Event
    ) -> tuple[Ending, int]:
        until_s = time.monotonic() + timeout_s
        # The first program reads the script to its last byte, so that the rest is the command's own input.
        reader = f'script=$({BUSYBOX} dd bs=1 count={len(script)} 2>/dev/null); eval "$script"'
        if not stdin:
            reader = f'script=$({BUSYBOX} head -c {len(script)}); eval "$script" </dev/null'
        if ended := self._ended():
            return ended, _KILLED
        connection = self._cluster.opened(self.name, [BUSYBOX, "sh", "-c", reader], stdin=True)
        try:
            for start in range(0, len(given := script + stdin), _CHUNK_BYTES):
                connection.write_stdin(given[start : start + _CHUNK_BYTES])
            if stdin:
                connection.close_channel(0)
            while _receive(connection, output.add, output.add):
                if time.monotonic() > until_s or stopped.is_set():
                    self.end_processes()
                    return "timeout", _KILLED
            code = _exit_code(connection)
        except (WebSocketException, OSError) as error:
            if ended := self._ended():
                return ended, _KILLED
            raise _failed(f"reach the pod {self.name}", error) from error
        finally:
            connection.close()
        if code is None or code == _KILLED:
            ended = self._ended()
            if code is None and not ended:
                raise InfrastructureError(f"the connection to the pod {self.name} ended before its command")
            return ended or "memory", _KILLED
        return "exited", code

    def _container(self) -> Any:
        """Return the state of the machine's container; raise ``InfrastructureError`` if it is lost."""
        read = self._cluster.pods.read_namespaced_pod
        found = self._cluster.call(f"read the pod {self.name}", read, self.name, self._cluster.namespace)
        states = found.status.container_statuses or []
        if not states or not states[0].state.running:
            why = found.status.message or found.status.reason or found.status.phase
            raise InfrastructureError(f"the pod {self.name} does not run: {why}")
        return states[0]

    def _ended(self) -> Ending | None:
        """Return the limit at which Kubernetes ended the pod; None while it runs. Raises ``InfrastructureError``."""
        read = self._cluster.pods.read_namespaced_pod
        found = self._cluster.call(f"read the pod {self.name}", read, self.name, self._cluster.namespace)
        if found.status.phase == "Running" and not found.metadata.deletion_timestamp:
            return None
        states = found.status.container_statuses or []
        ended = states[0].state.terminated if states else None
        if ended and ended.reason == "OOMKilled":
            return "memory"
        if found.status.reason == "Evicted" and "ephemeral" in (found.status.message or "").lower():
            return "disk"
        why = found.status.message or found.status.reason or (ended and ended.reason) or found.status.phase
        raise InfrastructureError(f"the pod {self.name} was lost: {why}")

    def _wait_until_ready(self) -> None:
        read, until_s = self._cluster.pods.read_namespaced_pod, time.monotonic() + _READY_S
        while True:
            found = self._cluster.call(f"read the pod {self.name}", read, self.name, self._cluster.namespace)
            if found.status.phase == "Running":
                break
            if (problem := _problem(found)) and (found.status.phase == "Failed" or time.monotonic() > until_s):
                raise InfrastructureError(f"the pod {self.name} cannot start: {problem}")
            if _is_hopeless(found):
                raise InfrastructureError(f"the pod {self.name} cannot start: {problem}")
            time.sleep(_POLL_S)
        started_s = int(self._container().state.running.started_at.timestamp())
        # Times of change are compared in whole seconds: nothing of the agent may run in the first one.
        self._trusted(f"while [ $({BUSYBOX} date +%s) -le {started_s} ]; do {BUSYBOX} sleep 0.1; done")


class PodForTests:
    """The agent's pod, ready for tests."""

    def __init__(self, machine: PodMachine) -> None:
        """Run the tests in this pod."""
        self.changed_programs: Sequence[str] = ()
        self._machine = machine
        self._rewards: RewardArchive | None = None

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Run the tests, end all that they left, and read ``/logs/verifier``."""
        variables = {**PYCACHE_ELSEWHERE, **environment}
        executed = await self._machine.run(command, timeout_s=timeout_s, environment=variables, directory=directory)
        if executed.ending == "exited":
            await _in_thread(self._machine.end_processes)
            self._rewards = await _in_thread(self._machine.logs)
        return executed

    def reward_file(self, name: str) -> str | None:
        """Return the text of a file that the tests left; None if there is none. Raises ``DataError``."""
        return self._rewards.text(name) if self._rewards else None


class _Nowhere:
    """What a connection writes its copy of all output to."""

    def write(self, data: bytes) -> None:
        """Forget it."""


async def _in_thread(function: Callable[..., Answer], *arguments: object) -> Answer:
    return await asyncio.get_running_loop().run_in_executor(_EXECS, partial(function, *arguments))


def _script(command: Sequence[str], environment: Mapping[str, str], directory: str) -> bytes:
    """Return the shell's way to a command: its folder, its variables, and itself."""
    words = [*command, *environment, *environment.values()]
    if any("\0" in word for word in words) or not all(name.isidentifier() for name in environment):
        raise DataError("the command or a variable holds a NUL, or a variable's name is none of a shell")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines = [f"cd {shlex.quote(directory)} 2>/dev/null || cd /", *exports, f"exec {shlex.join(command)}"]
    return "\n".join(lines).encode()


def _receive(connection: Any, out: Callable[[bytes], object], errors: Callable[[bytes], object]) -> bool:
    """Hand on what has arrived, after a short wait; tell whether more may come."""
    is_open = connection.is_open()
    connection.update(timeout=_POLL_S)
    for channel, take in ((1, out), (2, errors)):
        if data := connection.read_channel(channel):
            take(data)
    return bool(is_open)


def _exit_code(connection: Any) -> int | None:
    """Return the exit code that Kubernetes told before it closed the connection; None if it told none."""
    try:
        code: int | None = connection.returncode
    except (TypeError, ValueError, LookupError):
        return None
    return code


def _problem(found: Any) -> str:
    """Return what keeps a pod from running, as far as Kubernetes says."""
    status = found.status
    states = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    waiting = [each.state.waiting for each in states if each.state and each.state.waiting]
    reasons = [
        f"{each.reason}: {each.message or ''}".strip(": ") for each in waiting if each.reason != "PodInitializing"
    ]
    unscheduled = [each.message for each in status.conditions or () if each.type == "PodScheduled" and each.message]
    return "; ".join([*reasons, *unscheduled]) or status.message or status.reason or str(status.phase)


def _is_hopeless(found: Any) -> bool:
    return any(
        word in _problem(found) for word in ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
    )


def _failed(what: str, error: BaseException) -> InfrastructureError:
    why = getattr(error, "body", None) or getattr(error, "reason", None) or error
    return InfrastructureError(f"cannot {what}: {str(why)[:500]}")
