"""Machines of agents as pods: admitted by restricted Pod Security, limited, and not believed by their tests."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import images
import pytest
from real_cluster import Cluster, harness

from machine_attacks import ATTACKS, TEST
from plaudit_sandbox.machine import CommandEnd, MachineLimits
from plaudit_sandbox.pod_manifests import LABEL, PodSettings
from plaudit_sandbox.pods import PodCluster, PodMachine
from plaudit_sandbox.verification import Verdict, verify
from plaudit_workers.cli import main

pytestmark = pytest.mark.timeout(900)
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
NAMESPACE, TOOLS_IMAGE = "machines", "localhost/plaudit-tools:e2e"
LIMITS = MachineLimits(memory_bytes=128 << 20, disk_bytes=64 << 20)


@pytest.fixture(scope="module")
def pods(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    if not cluster.own:
        pytest.skip("images can be loaded into a cluster of the harness alone")
    folder = tmp_path_factory.mktemp("machines")
    busybox = shutil.which("busybox")
    assert busybox, "busybox-static is not installed"
    shutil.copy(busybox, folder / "busybox")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY busybox /bin/busybox\n")
    subprocess.run(["buildah", "bud", "-q", "-t", TOOLS_IMAGE, str(folder)], check=True, capture_output=True)
    for image in (TOOLS_IMAGE, images.REDIS):  # the second has bash and python3
        archive = folder / f"{image.partition('/')[2].partition(':')[0]}.tar"
        subprocess.run(["buildah", "push", "-q", image, f"docker-archive:{archive}:{image}"], check=True)
        subprocess.run(harness("load", str(archive)), check=True)
    cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    cluster.kubectl("label", "namespace", NAMESPACE, RESTRICTED, "--overwrite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", cluster.kubeconfig)
        yield PodCluster(NAMESPACE)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)


@pytest.fixture
def machine(pods: PodCluster) -> Iterator[PodMachine]:
    made = PodMachine.create(pods, settings(), LIMITS)
    yield made
    made.remove()


def settings(**changes: Any) -> PodSettings:
    return PodSettings(images.REDIS, has_own_image=False, cpus=0.2, tools_image=TOOLS_IMAGE, **changes)


def bash(machine: PodMachine, command: str, timeout_s: float = 60.0, **more: Any) -> CommandEnd:
    return asyncio.run(machine.run(["bash", "-c", command], timeout_s=timeout_s, **more))


def verified(machine: PodMachine, folder: Path, test: str = TEST, *, timeout_s: float = 60.0) -> Verdict:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    return asyncio.run(verify(machine, tests, timeout_s=timeout_s, environment={"GIVEN": "yes"}))


def test_commands_files_and_limits(machine: PodMachine, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("of the task")
    machine.upload(tmp_path, "/app")
    first = bash(machine, 'cat given; echo kept > a; echo "$A"; exit 3', environment={"A": " 'x\" y"})
    assert (first.ending, first.exit_code, first.output) == ("exited", 3, "of the task 'x\" y\n")
    assert bash(machine, "cat a -; id -u", stdin=b"read\n").output == "kept\nread\n1000\n"
    assert bash(machine, "sleep 300", timeout_s=2.0).ending == "timeout"
    assert bash(machine, "touch /usr/bin/new || rmdir /tests || mv /logs /l || touch /plaudit/x").exit_code != 0
    assert bash(machine, "exec python3 -c 'x = bytearray(256 << 20)'").ending == "memory"


def test_rewards_are_read_and_tests_begin_without_the_agent(machine: PodMachine, tmp_path: Path) -> None:
    assert verified(machine, tmp_path).reward == 0.0
    bash(machine, "echo 42 > answer; nohup sleep 987 >/dev/null 2>&1 &")
    found = verified(machine, tmp_path, TEST + "cat /proc/[0-9]*/cmdline | grep -c 987")
    assert (found.outcome, found.reward, found.executed.output) == ("scored", 1.0, "the answer is judged\n0\n")
    hung = verified(machine, tmp_path, "sleep 300", timeout_s=2.0)
    assert (hung.outcome, hung.reward) == ("timeout", None)
    nothing = verified(machine, tmp_path, "ln -s /etc/passwd /logs/verifier/reward.txt")
    assert nothing.reason.startswith("reward.txt is no file")


def test_what_an_agent_plants_earns_nothing(pods: PodCluster, tmp_path: Path) -> None:
    for attack in ATTACKS:
        machine = PodMachine.create(pods, settings(), LIMITS)
        bash(machine, attack, timeout_s=20.0)
        found = verified(machine, tmp_path)
        machine.remove()
        assert found.reward == 0.0, (attack, found)
        assert found.outcome in ("scored", "tampered")


def test_programs_that_root_replaced_are_found(pods: PodCluster, tmp_path: Path, cluster: Cluster) -> None:
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=baseline", "--overwrite")
    template = {"spec": {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}}}
    machine = PodMachine.create(pods, settings(template=template), LIMITS)
    cluster.kubectl("label", "namespace", NAMESPACE, RESTRICTED, "--overwrite")
    bash(machine, "cp /bin/true /usr/bin/cat")
    found = verified(machine, tmp_path)
    assert (found.outcome, found.reward) == ("tampered", 0.0)
    assert "/usr/bin/cat" in found.reason
    machine.remove()


def test_a_run_s_pods_are_removed_by_its_label(pods: PodCluster, cluster: Cluster) -> None:
    for run in ("one", "two"):
        PodMachine.create(pods, settings(labels={"plaudit.dev/run": run}), LIMITS)
    pods.remove_of({"plaudit.dev/run": "one"})

    def left() -> list[str]:
        found = json.loads(cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", LABEL, "-o", "json").stdout)["items"]
        return [each["metadata"]["labels"].get("plaudit.dev/run", "") for each in found]

    cluster.until("the pods of run one are gone", lambda: "one" not in left(), 120)
    assert "two" in left()
    pods.remove_of({"plaudit.dev/run": "two"})


def test_plaudit_tasks_in_pods(pods: PodCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "instruction.md": "Write 42.",
        "task.toml": "[environment]\ncpus = 0.2\nmemory_mb = 128",
        "environment/given": "42",
        "tests/test.sh": TEST,
        "solution/solve.sh": "cp given answer",
    }
    for name, content in files.items():
        (path := tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    options = ["--provider", "pods", "--namespace", NAMESPACE, "--image", images.REDIS, "--tools-image", TOOLS_IMAGE]
    assert main(["tasks", str(tmp_path / "task"), *options]) == 0, capsys.readouterr().out
