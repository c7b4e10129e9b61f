"""Machines of agents as pods, as the tests make, use and verify them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import images
from real_cluster import Cluster

from machine_attacks import TEST
from plaudit_job.tasks import Task, read_task
from plaudit_sandbox.machine import CommandEnd, MachineLimits, SeparateTests
from plaudit_sandbox.pod_cluster import PodCluster
from plaudit_sandbox.pod_manifests import LABEL, ROLE_LABEL, PodSettings
from plaudit_sandbox.pods import PodMachine
from plaudit_sandbox.verification import Verdict, verify

NAMESPACE, IMAGE = "machines", images.MACHINE
LIMITS = MachineLimits(memory_bytes=128 << 20, disk_bytes=128 << 20, processes=48, output_bytes=2000)


def restricted(name: str) -> dict[str, Any]:
    """Return a namespace under Pod Security restricted."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def namespaces(cluster: Cluster, *names: str) -> list[PodCluster]:
    """Make namespaces in which machines may be made, of the cluster that KUBECONFIG names."""
    done = cluster.apply(*map(restricted, names))
    assert done.returncode == 0, done.stderr
    for name in names:  # no pod is admitted before
        cluster.until(f"the account of {name}", lambda name=name: cluster.get("serviceaccount", "default", name))  # type: ignore[misc]
    made = [PodCluster(name) for name in names]
    for each in made:
        each.require(["none", "public"])
    return made


@contextlib.contextmanager
def new_machine(pods: PodCluster, **changes: Any) -> Iterator[PodMachine]:
    """Yield a new machine; ``changes`` are of its settings."""
    made = PodMachine.new(pods, settings(**changes), LIMITS)
    try:
        yield made
    finally:
        made.remove()


def settings(**changes: Any) -> PodSettings:
    """Return settings of small machines."""
    return PodSettings(IMAGE, **{"cpus": 0.1, **changes})


async def shell(machine: PodMachine, command: str, timeout_s: float = 300.0, **more: Any) -> CommandEnd:
    """Run a text of bash in a machine."""
    return await machine.run(["bash", "-c", command], timeout_s=timeout_s, **more)


def bash(machine: PodMachine, command: str, timeout_s: float = 300.0, **more: Any) -> CommandEnd:
    """Run a text of bash in a machine, where nothing else runs meanwhile."""
    return asyncio.run(shell(machine, command, timeout_s, **more))


def folder_of_tests(folder: Path, test: str) -> Path:
    """Write a folder of tests and return it."""
    tests = folder / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    (tests / "test.sh").write_text(test)
    return tests


def verified(machine: PodMachine, folder: Path, test: str = TEST, *, timeout_s: float = 300.0) -> Verdict:
    """Return what a test says of a machine."""
    return asyncio.run(
        verify(machine, folder_of_tests(folder, test), timeout_s=timeout_s, environment={"GIVEN": "yes"})
    )


def roles(pods: PodCluster, machine: PodMachine) -> list[str]:
    """Return the roles of a machine's pods."""
    return sorted(each["metadata"]["labels"][ROLE_LABEL] for each in pods.find({LABEL: machine.name}))


def played(
    pods: PodCluster,
    tests: Path,
    agents: Sequence[str],
    separate: SeparateTests | None = None,
    further: int = 0,
    **changes: Any,
) -> list[tuple[str, Verdict]]:
    """Return what tests say of agents that each run one script in a machine of its own, six at a time.

    Args:
        further: Commands after the script, each of which must be started or refused.
        changes: Of the machines' settings.
    """
    places = asyncio.Semaphore(6)

    async def play(script: str) -> tuple[str, Verdict]:
        async with places:
            machine = await asyncio.to_thread(PodMachine.new, pods, settings(**changes), LIMITS)
            try:
                await shell(machine, script, timeout_s=20.0)
                for _ in range(further):
                    await shell(machine, "echo alive", timeout_s=20.0)
                return script, await verify(machine, tests, timeout_s=60.0, separate=separate)
            finally:
                await asyncio.to_thread(machine.remove)

    async def play_all() -> list[tuple[str, Verdict]]:
        return await asyncio.gather(*map(play, agents))

    return asyncio.run(play_all())


def write_task(folder: Path, config: str = "") -> Task:
    """Write a task and read it."""
    files = {
        "instruction.md": "Write 42.",
        "task.toml": f"{config}[environment]\ncpus = 0.1\nmemory_mb = 128",
        "environment/given": "42",
        "tests/test.sh": TEST.replace("/app/answer", "answer"),
        "solution/solve.sh": "cp given answer",
    }
    for name, content in files.items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return read_task(folder)
