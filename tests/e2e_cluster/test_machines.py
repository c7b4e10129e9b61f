"""Machines of agents as pods: admitted by restricted Pod Security, limited, and not believed by their tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_sandbox
import pytest
from machine_pods import (
    IMAGE,
    LIMITS,
    NAMESPACE,
    bash,
    folder_of_tests,
    played,
    roles,
    settings,
    verified,
    write_task,
)
from real_cluster import Cluster

from machine_attacks import (
    ARTIFACT_ATTACKS,
    ATTACKS,
    CONTAINS_TEST,
    HONEST_LINKS,
    LINK_ATTACKS,
    POD_ATTACKS,
    SEPARATE_TEST,
    TEST,
)
from plaudit_reward.pod_provider import NAMESPACE_VARIABLE, RUN_LABEL, PodProvider
from plaudit_reward.providers import MachineChoice
from plaudit_sandbox.machine import SeparateTests
from plaudit_sandbox.pod_cluster import ClaimCluster, PodCluster
from plaudit_sandbox.pod_manifests import LABEL, ROLE_LABEL, label_value
from plaudit_sandbox.pods import PodMachine
from plaudit_sandbox.verification import verify
from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_workers.cli import main

pytestmark = pytest.mark.timeout(900)
AT_ONCE = 12


def test_commands_files_and_limits(machine: PodMachine, tmp_path: Path) -> None:
    for text, ended in (("awaited", "true"), ("too late", "kill -9 -1"), ("of the task", "")):
        if ended:
            machine.await_upload("/app")
            bash(machine, ended)
        (tmp_path / "given").write_text(text)
        machine.upload(tmp_path, "/app")
        assert bash(machine, "cat given").output == text
    first = bash(machine, 'cat given; echo kept > a; echo "$A" >&2; exit 3', environment={"A": " 'x\" y"})
    assert (first.ending, first.exit_code, first.output) == ("exited", 3, "of the task 'x\" y\n")
    assert (
        bash(machine, "nohup sleep 987 >/dev/null 2>&1 & cat a -; test $(id -u) != 0", stdin=b"read\n").exit_code == 0
    )
    assert int(bash(machine, "grep -l 987 /proc/[0-9]*/cmdline 2>/dev/null | wc -l").output) >= 1
    left = bash(machine, "sleep 654 & echo started; exit 4")
    assert (left.ending, left.exit_code, left.output) == ("exited", 4, "started\n")
    long = bash(machine, "yes | head -c 40000000")
    assert (long.exit_code, len(long.output) < 2100) == (0, True)
    changes = (
        "touch /usr/bin/new",
        "rmdir /tests",
        "mv /logs /l",
        "touch /plaudit/x /plaudit/control/end",
        "mkdir /new",
    )
    assert [bash(machine, each).exit_code for each in changes] == [1] * len(changes)
    assert bash(machine, "sleep 300", timeout_s=2.0).ending == "timeout"
    assert bash(machine, "exec python3 -c 'x = bytearray(256 << 20)'").ending == "memory"
    bomb = bash(machine, "for i in $(seq 99); do sleep 60 & done; echo survived", timeout_s=5.0)
    assert "fork" in bomb.output
    assert bash(machine, "cat a; kill -9 -1").output == "kept\n"


def test_a_right_answer_is_rewarded_however_often_it_is_verified(
    machine: PodMachine, pods: PodCluster, tmp_path: Path
) -> None:
    bash(
        machine,
        "cd /app; echo 42 > answer; umask 077; echo 1 > $'odd \\n\\xff'; ln -s /etc/passwd link; mkdir -m 0500 d; "
        "ln -s /dev/zero endless",
    )
    eats = (
        TEST + "ls -l /app | wc -l; grep -c . /proc/[0-9]*/cmdline 2>/dev/null | grep -c 987; rm -rf /app/* /root/*\n"
    )
    for _ in range(2):
        found = verified(machine, tmp_path, eats)
        assert (found.outcome, found.reward) == ("scored", 1.0), found
        assert found.executed.output == "the answer is judged\n7\n0\n"
    assert roles(pods, machine) == ["agent"]
    assert "the machine has ended" in bash(machine, "true").output  # so that its files stay as they are
    hung = verified(machine, tmp_path, "cat /app/endless >/dev/null", timeout_s=2.0)
    assert (hung.outcome, hung.reward) == ("scored", 0.0)
    assert "or a link to /dev" in hung.reason
    link = verified(machine, tmp_path, "ln -s /etc/passwd /logs/verifier/reward.txt")
    assert link.reason.startswith("reward.txt is no file")


def test_what_an_agent_plants_earns_nothing(pods: PodCluster, tmp_path: Path) -> None:
    # All of ATTACKS are played in machines of the other providers: most of them end alike wherever a shell is.
    found = played(pods, folder_of_tests(tmp_path, TEST), [*ATTACKS[::3], *POD_ATTACKS])
    assert [each for each in found if each[1].reward != 0.0] == []
    assert pods.find({}) == []


def test_a_link_to_what_only_the_tests_have_is_no_answer(pods: PodCluster, tmp_path: Path) -> None:
    (_, honest), *found = played(pods, folder_of_tests(tmp_path, CONTAINS_TEST), [HONEST_LINKS, *LINK_ATTACKS[1::2]])
    assert honest.reward == 1.0, honest
    assert [each for each in found if (each[1].outcome, each[1].reward) != ("scored", 0.0)] == []
    assert pods.find({}) == []


def test_separate_tests_find_the_artifacts_and_nothing_else_of_the_agent(pods: PodCluster, tmp_path: Path) -> None:
    (given := tmp_path / "given" / "out").mkdir(parents=True)
    (given / "old").write_text("of the task")
    (given.parent / "data").write_text("of the task")
    limits = replace(LIMITS, disk_bytes=24 << 20)
    own = SeparateTests(["/logs/artifacts", "/app/out"], limits, "/app", given.parent, IMAGE, cpus=0.1)
    right = (
        "echo planted | tee /root/planted /tmp/planted /app/planted /app/data; mkdir -p /app/out/deep /logs/artifacts; "
        "echo 1 > /logs/verifier/reward.txt; echo 42 > /app/out/deep/found; ln -s deep/found /app/out/answer; "
        "echo log > /logs/artifacts/log"
    )
    test = SEPARATE_TEST + "cat /app/data /logs/artifacts/log; ls /app/out"
    (_, best), *others = played(pods, folder_of_tests(tmp_path, test), [right, *ARTIFACT_ATTACKS[::3]], own)
    assert (best.reward, best.executed.output) == (1.0, "of the tasklog\nanswer\ndeep\n"), best
    assert [each for each in others if each[1].reward != 0.0] == []
    assert pods.find({}) == []


@pytest.mark.parametrize(
    "filling",
    ["head -c 300000000 /dev/zero > /app/large", "cd /app; seq 40000 | xargs -n 1000 touch"],
    ids=["bytes", "inodes"],
)
def test_a_full_disk_ends_the_machine_and_is_no_error(machine: PodMachine, tmp_path: Path, filling: str) -> None:
    full = bash(machine, f"{filling}; sleep 400", timeout_s=300.0)
    assert full.ending == "disk"
    found = verified(machine, tmp_path)
    assert (found.outcome, found.reward) == ("scored", 0.0)


VERIFIES = """
import asyncio, sys
from pathlib import Path
from plaudit_sandbox.machine import MachineLimits
from plaudit_sandbox.pod_cluster import PodCluster
from plaudit_sandbox.pod_manifests import PodSettings
from plaudit_sandbox.pods import PodMachine
from plaudit_sandbox.verification import verify
name, image, tests = sys.argv[1:]
machine = PodMachine(PodCluster("machines"), name, PodSettings(image), MachineLimits(memory_bytes=128 << 20))
asyncio.run(verify(machine, Path(tests), timeout_s=600.0))
"""


def test_the_tests_of_a_killed_worker_run_again_on_the_same_files(
    machine: PodMachine, pods: PodCluster, cluster: Cluster, tmp_path: Path
) -> None:
    bash(machine, "echo 42 > /app/answer")
    slow = folder_of_tests(tmp_path / "slow", "rm /app/answer; echo 1 > /logs/verifier/reward.txt; sleep 1000")
    with subprocess.Popen([sys.executable, "-c", VERIFIES, machine.name, IMAGE, str(slow)]) as worker:
        cluster.until("the tests run", lambda: any(_runs_tests(each) for each in pods.find({LABEL: machine.name})))
        worker.send_signal(signal.SIGKILL)
    assert verified(machine, tmp_path).reward == 1.0
    cluster.until("the pods of tests are gone", lambda: roles(pods, machine) == ["agent"])


def _runs_tests(pod: dict[str, Any]) -> bool:
    return pod["metadata"]["labels"][ROLE_LABEL] == "tests" and pod["status"].get("phase") == "Running"


def test_many_machines_at_once_on_two_nodes(pods: PodCluster, tmp_path: Path) -> None:
    provider = PodProvider(MachineChoice(IMAGE, memory_bytes=128 << 20, disk_bytes=128 << 20, run="of many"))
    task = write_task(tmp_path / "task")

    async def lived(number: int) -> float | None:
        (folder := tmp_path / "sandboxes" / "group" / f"{number}-abcd").mkdir(parents=True)
        made = await asyncio.to_thread(provider.make, folder, task)
        assert made.directory == "/repo"
        answer = 42 if number % 2 else number
        await made.machine.run(
            ["bash", "-c", f"cat file given; echo {answer} > answer"], timeout_s=300.0, directory="/repo"
        )
        again = await asyncio.to_thread(provider.find, folder, task)
        return (await verify(again.machine, task.folder / "tests", timeout_s=600.0, directory="/repo")).reward

    async def all_lived() -> list[float | None]:
        return await asyncio.gather(*map(lived, range(AT_ONCE)))

    try:
        assert asyncio.run(all_lived()) == [float(number % 2) for number in range(AT_ONCE)]
        mine = pods.find({RUN_LABEL: label_value("of many")})
        assert len(mine) == AT_ONCE
        assert len({each["spec"]["nodeName"] for each in mine}) == 2
    finally:
        provider.remove(*(tmp_path / "sandboxes" / "group").iterdir())
    assert pods.find({RUN_LABEL: label_value("of many")}) == []


def test_machines_of_agent_sandbox(pods: PodCluster, cluster: Cluster, tmp_path: Path) -> None:
    if not agent_sandbox.is_served(cluster):
        with pytest.raises(ConfigurationError, match="serves no SandboxClaim"):
            ClaimCluster(NAMESPACE).require(["none"])
    choice = MachineChoice(IMAGE, memory_bytes=128 << 20, disk_bytes=128 << 20, run="of claims")
    provider, task = PodProvider(choice, claims=True), write_task(tmp_path / "task")
    kinds = "sandboxclaims,sandboxwarmpools,sandboxtemplates"

    def made() -> list[str]:
        return cluster.kubectl("get", kinds, "-n", NAMESPACE, "-o", "name").stdout.split()

    with agent_sandbox.installed(cluster, NAMESPACE) as is_real:
        provider.require()
        folders = [tmp_path / "sandboxes" / "group" / f"{number}-abcd" for number in range(2)]
        for folder in folders:
            folder.mkdir(parents=True)
        right, idle = (provider.make(folder, task) for folder in folders)
        kinds_made = [name.partition(".")[0] for name in made()]
        assert kinds_made.count("sandboxclaim") == 2
        # The first pod tells the image's workdir, for which it is made again.
        assert kinds_made.count("sandboxwarmpool") == kinds_made.count("sandboxtemplate") == 2
        ended = asyncio.run(right.machine.run(["cp", "given", "answer"], timeout_s=60.0, directory="/repo"))
        assert ended.exit_code == 0, ended
        found = provider.find(folders[0], task)
        verdicts = [asyncio.run(each.verify(task, timeout_s=120.0, environment={})) for each in (found, idle)]
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0], verdicts
        assert provider.cluster.reap({RUN_LABEL: label_value("of claims")}, {found.machine.name}.__contains__, 0.0)
        assert len(pods.find({RUN_LABEL: label_value("of claims")})) == 1
        if is_real:  # the stand-in makes no pod anew
            name = found.machine.name
            before = cluster.get("pod", name, NAMESPACE)["metadata"]["uid"]
            cluster.kubectl("delete", "pod", name, "-n", NAMESPACE)

            def is_anew() -> bool:
                pod = cluster.get("pod", name, NAMESPACE)
                return bool(pod) and pod["metadata"]["uid"] != before and pod["status"]["phase"] == "Running"

            cluster.until("the pod is made anew", is_anew, 120)
            with pytest.raises(InfrastructureError, match="was lost"):
                asyncio.run(found.verify(task, timeout_s=120.0, environment={}))
        provider.remove(*folders)
        provider.end()
        cluster.until("nothing is left", lambda: made() == [], 60)
        assert pods.find({}) == []


def test_pods_go_with_their_owner_and_those_that_nobody_holds_are_reaped(
    pods: PodCluster, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.kubectl("create", "configmap", "job", "-n", NAMESPACE)
    found = cluster.get("configmap", "job", NAMESPACE)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "job", "uid": found["metadata"]["uid"]}
    labels = {"plaudit.dev/run": "reaped"}
    owned, held, lost = (
        PodMachine.new(pods, settings(owner=given, labels=labels), LIMITS) for given in (owner, None, None)
    )
    assert pods.reap(labels, {held.name, owned.name}.__contains__, older_than_s=900.0) == []
    assert pods.reap(labels, {held.name, owned.name}.__contains__, older_than_s=0.0) == [lost.name]
    cluster.kubectl("delete", "configmap", "job", "-n", NAMESPACE)
    cluster.until("the owner took its pod along", lambda: roles(pods, owned) == [])
    assert roles(pods, held) == ["agent"]
    held.remove()
    assert pods.find({}) == []


def test_a_cluster_that_does_not_allow_machines_is_a_configuration_error(cluster: Cluster, pods: PodCluster) -> None:
    with pytest.raises(ConfigurationError, match="machines cannot be made in namespace nowhere"):
        PodCluster("nowhere").require(["none"])


def test_plaudit_tasks_in_pods(pods: PodCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "task")
    assert main(["tasks", str(tmp_path / "task"), "--provider", "pods", "--image", IMAGE, "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)
    assert (checked["nothing"], checked["solution"], checked["problems"]) == (0.0, 1.0, [])
    assert pods.find({}) == []
    assert os.environ[NAMESPACE_VARIABLE] == NAMESPACE
