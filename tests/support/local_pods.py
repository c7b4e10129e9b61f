"""Pods of machines without a cluster: their scripts run in shells of this host, an agent's in a machine of namespaces.

``LocalCluster`` stands in for the API server at ``PodCluster``'s own methods. What the provider says to a pod, it says
in scripts, and these run as they are, but for the place of the volumes: the tar that lists an agent's files and the one
that receives them are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from plaudit_sandbox.machine import Machine, MachineLimits
from plaudit_sandbox.pod_cluster import PodCluster, PodProcess
from plaudit_sandbox.pod_manifests import LABEL, MACHINE, ROLE_LABEL
from plaudit_sandbox.privileges import NOBODY

VOLUMES = "/plaudit/"


class LocalCluster:
    """Some pods, each a folder of this host with its volumes."""

    def __init__(self, folder: Path, limits: MachineLimits) -> None:
        self._folder, self._limits = folder, limits
        self._pods: dict[str, Any] = {}

    def as_cluster(self) -> PodCluster:
        """Return it as what the provider expects."""
        return cast(PodCluster, self)

    def create(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Make a pod's volumes."""
        name = pod["metadata"]["name"]
        self._pods[name] = {**pod, "metadata": {**pod["metadata"], "uid": f"uid of {name}"}}
        machine = Machine(self._folder / name / "plaudit", self._limits)
        for volume in ("control", "given", "logs"):
            machine.own(machine.folder / volume)
        machine.own(machine.folder / "files")
        (machine.folder / "control" / "filled").touch()  # with nothing: there is no image
        return self.read(name)

    def read(self, name: str) -> dict[str, Any]:
        """Return a pod with its status, which follows from what lies in its volumes."""
        pod = self._pods[name]
        control = self._folder / name / "plaudit" / "control"
        is_loaded = pod["metadata"]["labels"][ROLE_LABEL] == "agent" or (control / "loaded").exists()
        ended = {"terminated": {"reason": "Completed", "exitCode": 0, "message": "/app\n/usr/bin:/bin"}}
        running: dict[str, Any] = {"running": {}} if is_loaded else {"waiting": {"reason": "PodInitializing"}}
        states: dict[str, dict[str, Any]] = {
            "fill": ended if is_loaded else {"running": {}},
            "machine": ended if (control / "end").exists() else running,
            "keeper": running,
        }
        found = [{"name": container, "state": state} for container, state in states.items()]
        return {**pod, "status": {"phase": "Running", "containerStatuses": found}}

    def label(self, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
        """Add labels to a pod."""
        self._pods[name]["metadata"]["labels"] |= labels
        return self.read(name)

    def find(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the pods with these labels."""
        return [
            self.read(name) for name, pod in self._pods.items() if labels.items() <= pod["metadata"]["labels"].items()
        ]

    def remove(self, labels: Mapping[str, str]) -> None:
        """Remove the pods with these labels."""
        for pod in self.find(labels):
            name = self._pods.pop(pod["metadata"]["name"])["metadata"]["name"]
            Machine(self._folder / name / "plaudit", self._limits).remove()

    def execute(self, name: str, container: str, script: str) -> PodProcess:
        """Start a script of a container."""
        volumes = self._folder / name / "plaudit"
        if container == MACHINE:
            is_agent_s = self._pods[name]["metadata"]["labels"][LABEL] == name
            return cast(PodProcess, _MachineShell(Machine(volumes, self._limits), script, is_agent_s=is_agent_s))
        return cast(PodProcess, _Shell(volumes.parent, script.replace(VOLUMES, VOLUMES[1:]), f"{name}/{container}"))


class _Shell:
    """A script beside a machine, as the user that a pod's containers share."""

    def __init__(self, folder: Path, script: str, where: str) -> None:
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._process = subprocess.Popen(
            ["sh", "-c", script],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **cast(Any, user),
        )
        self.where, self.problem, self.is_over, self.is_refused = where, "", False, False
        self.exit_code: int | None = None
        self.errors = bytearray()
        self._errors = threading.Thread(target=self._take_errors, daemon=True)
        self._errors.start()

    def _take_errors(self) -> None:
        while data := cast(io.BufferedReader, self._process.stderr).read1():
            self.errors += data

    def write(self, data: bytes) -> int:
        """Give it more input."""
        assert self._process.stdin is not None
        return self._process.stdin.write(data)

    def end_input(self) -> None:
        """Close its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def receive(self, wait_s: float) -> bytes:
        """Return more of its output."""
        data: bytes = cast(io.BufferedReader, self._process.stdout).read1(1 << 16)
        if not data:
            self.exit_code = self._process.wait()
            self._errors.join()
            self.is_over = True
        return data

    def close(self) -> None:
        """End it, so that nothing of it outlives a test."""
        self._process.kill()
        self._process.wait()
        self._errors.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                cast(IO[bytes], stream).close()


class _MachineShell:
    """A command in a machine, which begins once all of its input is there; its exit code tells how it ended."""

    def __init__(self, machine: Machine, script: str, *, is_agent_s: bool) -> None:
        volumes = machine.folder
        self._run = {"mounts": {"/tests": volumes / "given" / "tests"}, "writable": {"/logs": volumes / "logs"}}
        self._run = {} if is_agent_s else self._run
        self._machine, self._script, self._input = machine, script, b""
        self.problem, self.is_over, self.is_refused = "", False, False
        self.exit_code: int | None = None
        self.errors = bytearray(b"\n")

    def write(self, data: bytes) -> int:
        """Keep its input."""
        self._input += data
        return len(data)

    def receive(self, wait_s: float) -> bytes:
        """Return all of its output."""
        running = self._machine.run(
            ["sh", "-c", f"{{ {self._script}\n}} 2>/dev/null"],
            timeout_s=60.0,
            environment={"HOME": "/root"},
            stdin=self._input,
            **cast(Any, self._run),
        )
        ended = asyncio.run(running)
        self.is_over, self.exit_code = True, ended.exit_code
        return ended.output.encode()

    def close(self) -> None:
        """Nothing of it is left."""
