"""Machines of agents as pods: admitted by restricted Pod Security, limited, and not believed by their tests."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_sandbox
import images
import pyarrow
import pyarrow.parquet as parquet
import pytest
from pod_processes import main_process
from real_cluster import ROOT, Cluster, harness
from ruamel.yaml import YAML

from machine_attacks import (
    ARTIFACT_ATTACKS,
    ATTACKS,
    CONTAINS_TEST,
    DENIALS,
    HONEST_LINKS,
    LINK_ATTACKS,
    POD_ATTACKS,
    SEPARATE_TEST,
    STOPS_ALL,
    TAKEN_OVER,
    TEST,
)
from plaudit_job.tasks import Task, read_task
from plaudit_metrics.sources.sample_schema import COLUMNS
from plaudit_reward.machines import KEPT
from plaudit_reward.pod_provider import NAMESPACE_VARIABLE, RUN_LABEL, PodProvider
from plaudit_reward.providers import MachineChoice
from plaudit_sandbox.machine import CommandEnd, MachineLimits, SeparateTests, UnusableMachineError
from plaudit_sandbox.pod_cluster import ClaimCluster, PodCluster
from plaudit_sandbox.pod_manifests import LABEL, ROLE_LABEL, PodSettings, label_value
from plaudit_sandbox.pods import PodMachine
from plaudit_sandbox.verification import Verdict, verify
from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_workers.cli import main

pytestmark = pytest.mark.timeout(900)
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
NAMESPACE, IMAGE = "machines", images.MACHINE
LIMITS = MachineLimits(memory_bytes=128 << 20, disk_bytes=128 << 20, processes=48, output_bytes=2000)
AT_ONCE = 12


@pytest.fixture(scope="module")
def pods(with_images: Cluster) -> Iterator[PodCluster]:
    cluster = with_images
    if not cluster.own:
        pytest.skip("images can be loaded into a cluster of the harness alone")
    cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    cluster.kubectl("label", "namespace", NAMESPACE, RESTRICTED, "--overwrite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", cluster.kubeconfig)
        patch.setenv(NAMESPACE_VARIABLE, NAMESPACE)
        made = PodCluster(NAMESPACE)
        made.require(["none", "public"])
        yield made


@pytest.fixture
def machine(pods: PodCluster) -> Iterator[PodMachine]:
    made = PodMachine.new(pods, settings(), LIMITS)
    yield made
    made.remove()


def settings(**changes: Any) -> PodSettings:
    return PodSettings(IMAGE, **{"cpus": 0.1, **changes})


async def shell(machine: PodMachine, command: str, timeout_s: float = 300.0, **more: Any) -> CommandEnd:
    return await machine.run(["bash", "-c", command], timeout_s=timeout_s, **more)


def bash(machine: PodMachine, command: str, timeout_s: float = 300.0, **more: Any) -> CommandEnd:
    return asyncio.run(shell(machine, command, timeout_s, **more))


def folder_of_tests(folder: Path, test: str) -> Path:
    tests = folder / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    (tests / "test.sh").write_text(test)
    return tests


def verified(machine: PodMachine, folder: Path, test: str = TEST, *, timeout_s: float = 300.0) -> Verdict:
    return asyncio.run(
        verify(machine, folder_of_tests(folder, test), timeout_s=timeout_s, environment={"GIVEN": "yes"})
    )


def roles(pods: PodCluster, machine: PodMachine) -> list[str]:
    return sorted(each["metadata"]["labels"][ROLE_LABEL] for each in pods.find({LABEL: machine.name}))


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


def played(
    pods: PodCluster, tests: Path, agents: Sequence[str], separate: SeparateTests | None = None, further: int = 0
) -> list[tuple[str, Verdict]]:
    """Return what tests say of agents that each run one script in a machine of its own, six at a time.

    Args:
        further: Commands after the script, each of which must be started or refused.
    """
    places = asyncio.Semaphore(6)

    async def play(script: str) -> tuple[str, Verdict]:
        async with places:
            machine = await asyncio.to_thread(PodMachine.new, pods, settings(), LIMITS)
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


def test_an_agent_that_stops_every_process_earns_nothing(pods: PodCluster, tmp_path: Path) -> None:
    # Now and then it stops what containerd 1.6 starts commands with, which then starts none in this pod any more.
    ((_, verdict),) = played(pods, folder_of_tests(tmp_path, TEST), [STOPS_ALL])
    assert verdict.reward == 0.0, verdict
    assert pods.find({}) == []


def test_a_pod_that_starts_no_process_earns_nothing_where_its_node_starts_others(
    machine: PodMachine, pods: PodCluster, cluster: Cluster, tmp_path: Path
) -> None:
    bash(machine, "true")
    shim = shim_of(pods, machine)
    os.kill(shim, signal.SIGSTOP)  # as if its agent had stopped what starts commands in its pod
    try:
        cluster.kubectl("--namespace", NAMESPACE, "create", "quota", "no-witness", "--hard=pods=1")
        try:
            with pytest.raises(InfrastructureError, match="does not do as it should within 60 s") as raised:
                machine.disk_bytes()
            assert not isinstance(raised.value, UnusableMachineError)
        finally:
            cluster.kubectl("--namespace", NAMESPACE, "delete", "quota", "no-witness")
        ended = bash(machine, "true", timeout_s=5.0)
        assert (ended.ending, bash(machine, "true").exit_code) == ("timeout", 137)
        found = verified(machine, tmp_path)
    finally:
        os.kill(shim, signal.SIGCONT)
    assert (found.outcome, found.reward) == ("tampered", 0.0)
    assert "others of its node start them" in found.reason
    assert roles(pods, machine) == ["agent"]


def shim_of(pods: PodCluster, machine: PodMachine) -> int:
    """Return the process that starts commands in a pod."""
    first = Path(f"/proc/{main_process(pods.read(machine.name))}/status").read_text()
    return int(first.partition("PPid:")[2].split()[0])


def test_a_pod_whose_first_command_never_starts_is_an_error(
    machine: PodMachine, pods: PodCluster, tmp_path: Path
) -> None:
    shim = shim_of(pods, machine)
    os.kill(shim, signal.SIGSTOP)  # of this pod alone, while others of its node start commands
    try:
        with pytest.raises(InfrastructureError, match="did not start: it did not begin within 60 s"):
            bash(machine, "true")
        with pytest.raises(InfrastructureError, match="does not do as it should within 60 s") as raised:
            verified(machine, tmp_path)
        assert not isinstance(raised.value, UnusableMachineError)
    finally:
        os.kill(shim, signal.SIGCONT)


def test_an_agent_that_ends_every_command_or_leaves_no_room_for_one_gets_no_other_machine(
    pods: PodCluster, tmp_path: Path
) -> None:
    found = played(pods, folder_of_tests(tmp_path, TEST), DENIALS, further=2)
    assert [each for each in found if each[1].reward != 0.0] == []
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


def test_an_agent_that_holds_its_machine_s_first_process_earns_nothing(machine: PodMachine, tmp_path: Path) -> None:
    if "0" not in bash(machine, f"echo 42 > /app/answer; {TAKEN_OVER}").output.split():
        pytest.skip("this node's kernel lets nobody trace")
    found = verified(machine, tmp_path)
    assert (found.outcome, found.reward) == ("tampered", 0.0)
    assert "the machine's first process does not end" in found.reason


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


def test_a_lost_pod_and_an_image_that_is_nowhere_are_errors_in_kubernetes_s_words(
    machine: PodMachine, pods: PodCluster
) -> None:
    threading.Timer(3.0, lambda: pods.remove({LABEL: machine.name})).start()
    began_s = time.monotonic()
    with pytest.raises(InfrastructureError, match=machine.name):
        bash(machine, "sleep 300", timeout_s=300.0)
    assert time.monotonic() - began_s < 250.0
    with pytest.raises(InfrastructureError, match="not found"):
        bash(machine, "true")
    with pytest.raises(InfrastructureError, match=r"cannot start: .*pull.*plaudit-nowhere"):
        PodMachine.new(pods, PodSettings("localhost/plaudit-nowhere:1"), LIMITS)
    template = {"spec": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}}
    with pytest.raises(InfrastructureError, match="violates PodSecurity"):
        PodMachine.new(pods, settings(template=template), LIMITS)
    assert pods.find({}) == []


def test_a_lost_node_costs_the_machines_that_were_on_it_alone(
    pods: PodCluster, cluster: Cluster, tmp_path: Path
) -> None:
    lost, other = (
        PodMachine.new(pods, settings(template={"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}), LIMITS)
        for node in ("node2", "node1")
    )
    bash(lost, "echo 42 > /app/answer")
    with ThreadPoolExecutor() as threads:
        in_it = threads.submit(bash, lost, "sleep 600", 600.0)
        subprocess.run(harness("kill-node", "2"), check=True)
        try:
            assert bash(other, "echo 42 > /app/answer; cat /app/answer").output.strip() == "42"
            with pytest.raises(InfrastructureError, match=lost.name):
                in_it.result()
            with pytest.raises(InfrastructureError, match=lost.name):
                verified(lost, tmp_path)
            new = PodMachine.new(pods, settings(), LIMITS)
            assert {each["spec"]["nodeName"] for each in pods.find({LABEL: new.name})} == {"node1"}
            assert verified(other, tmp_path).reward == 1.0
            for machine in (lost, other, new):
                machine.remove()
            assert pods.find({}) == []
        finally:
            subprocess.run(harness("start-node", "2"), check=True)
    cluster.kubectl("wait", "--for=condition=Ready", "node/node2", "--timeout=300s")


def test_what_was_kept_is_tested_again_when_its_pod_is_gone(pods: PodCluster, tmp_path: Path) -> None:
    provider = PodProvider(MachineChoice(IMAGE, memory_bytes=128 << 20, disk_bytes=32 << 20, run="of kept"))
    own_tests = 'artifacts = ["/repo/answer"]\n[verifier.environment]\ncpus = 0.1\nmemory_mb = 128\n'
    tasks = {"shared": write_task(tmp_path / "shared"), "separate": write_task(tmp_path / "separate", own_tests)}
    scripts = {
        "right": "cp given answer; cp /bin/false /opt/tools/bin/cat; echo 1 > /logs/verifier/reward.txt",
        "wrong": "echo 1 > /logs/verifier/reward.txt",
        "full": "head -c 40000000 /dev/zero > large",
        "lost": "cp given answer",
    }

    async def lived(kind: str, name: str) -> list[float | None]:
        task, folder, to = tasks[kind], tmp_path / f"{kind}-{name}", tmp_path / KEPT / "g" / f"{kind}-{name}"
        folder.mkdir()
        to.mkdir(parents=True)
        made = await asyncio.to_thread(provider.make, folder, task)
        try:
            await made.machine.run(["sh", "-c", scripts[name]], timeout_s=60.0, directory=made.directory)
            before = await made.verify(task, timeout_s=300.0, environment={})
            if name == "lost":
                await asyncio.to_thread(made.machine.remove)
            await asyncio.to_thread(provider.keep, folder, made, to)
        except InfrastructureError:
            assert not [*to.iterdir()]
            return []
        finally:
            await asyncio.to_thread(provider.remove, folder)
        kept = [await asyncio.to_thread(provider.find, to, task) for _ in range(2)]
        again = [await each.verify(task, timeout_s=300.0, environment={}) for each in kept]
        return [verdict.reward for verdict in (before, *again)]

    async def all_lived() -> dict[tuple[str, str], list[float | None]]:
        names = [*(("shared", name) for name in scripts), ("separate", "right")]
        return dict(zip(names, await asyncio.gather(*(lived(*name) for name in names)), strict=True))

    found = asyncio.run(all_lived())
    assert found.pop(("shared", "lost")) == []
    assert found == {name: [float(name[1] == "right")] * 3 for name in found}
    assert pods.find({}) == []


KEEPS = """
import os, signal, sys
from pathlib import Path
from plaudit_reward import pod_provider
from plaudit_reward.providers import MachineChoice
from plaudit_sandbox import pods

image, folder, to = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])


def count(frame, event, _):
    global left
    if frame.f_code.co_name != "keep" or frame.f_code.co_filename not in (pod_provider.__file__, pods.__file__):
        return None
    if event == "line":
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    return count


for text in sys.stdin:
    left = int(text)
    if (keeper := os.fork()):
        print(os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]), flush=True)
        continue
    choice = MachineChoice(image, memory_bytes=128 << 20, disk_bytes=32 << 20, run="of kept")
    provider = pod_provider.PodProvider(choice)
    made = provider.find(folder, None)
    sys.settrace(count)
    provider.keep(folder, made, to)
    os._exit(0)
"""
"""Keeps a machine in one process after the other, each of which is killed at the line of it that the input names."""


RESCORES = f"""
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: keeps}}
spec:
  model: {{source: model}}
  data: {{train: {{tasks: /tasks}}}}
  algorithm: {{steps: 1}}
  trainer: {{}}
  rollout: {{agent: {{kind: tools, tools: [{{sandbox: bash}}], toolParser: hermes}}}}
  sandboxes: {{provider: pods, image: "{IMAGE}", memory: 128Mi, disk: 32Mi, keep: all}}
  reward: {{scorers: [{{name: tests, kind: verifier, timeoutSeconds: 300}}]}}
"""


def write_samples(run: Path, task: str, number: int) -> None:
    """Write so many samples of a task as a run stores them, together with the job of ``RESCORES``."""
    about = {"step": 1, "split": "train", "group": "g", "data_source": "", "prompt": "", "ground_truth_json": "null"}
    extra = json.dumps({"task": task, "digest": "of the run"})
    about |= {"extra_info_json": extra, "response": "done", "outcome": "scored", "score": 1.0}
    (run / "samples").mkdir(exist_ok=True)
    rows = [about | {"index": index} for index in range(number)]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(COLUMNS))
    parquet.write_table(table, run / "samples" / "step-000001-i1.parquet")
    (run / "keeps.yaml").write_text(RESCORES)


def rescored(run: Path, task: Task) -> list[dict[str, Any]]:
    """Return what ``plaudit rescore`` writes of two samples of a run, the first of which had a machine."""
    write_samples(run, str(task.folder), 2)
    output = run / "again.jsonl"
    assert main(["rescore", str(run), "--job", str(run / "keeps.yaml"), "-o", str(output)]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_broker_that_is_killed_while_it_keeps_a_machine_leaves_all_of_it_or_nothing(
    pods: PodCluster, tmp_path: Path
) -> None:
    provider = PodProvider(MachineChoice(IMAGE, memory_bytes=128 << 20, disk_bytes=32 << 20, run="of kept"))
    task = write_task(tmp_path / "task")
    (folder := tmp_path / "machine").mkdir()
    (to := tmp_path / KEPT / "g" / "0-abcd").mkdir(parents=True)
    made = provider.make(folder, task)
    try:
        script = "cp given answer; head -c 20000000 /dev/urandom > large"
        asyncio.run(made.machine.run(["sh", "-c", script], timeout_s=300.0, directory=made.directory))
        command = [sys.executable, "-c", KEEPS, IMAGE, str(folder), str(to)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        with subprocess.Popen(command, **pipes) as keepers:
            for line in itertools.count(1):
                keepers.stdin.write(f"{line}\n")
                code = int(keepers.stdout.readline())
                if (to / "kept.json").exists():
                    break
                assert code == -signal.SIGKILL, line
                with pytest.raises(InfrastructureError, match="is gone"):
                    provider.find(to, task)
            keepers.stdin.close()
        with tarfile.open(to / "machine.tar") as archive:
            assert max(member.size for member in archive) == 20_000_000
        assert line > 10
    finally:
        provider.remove(folder)
    again, missing = rescored(tmp_path, task)
    assert (again["outcome"], again["score"]) == ("scored", 1.0), again
    assert "was not kept" in missing["scorer/tests/reason"]
    (to / "kept.json").unlink()  # as it is before the last line
    again, _ = rescored(tmp_path, task)
    assert (again["outcome"], "could not be kept" in again["scorer/tests/reason"]) == ("data_error", True), again
    assert pods.find({}) == []


def documented(namespace: str, volume: Path, **words: str) -> list[dict[str, Any]]:
    """Return the objects of docs/sandboxes.md that run ``plaudit rescore`` in a pod, with a volume of this machine."""
    page = (ROOT / "docs" / "sandboxes.md").read_text()
    (text,) = (
        block for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "kind: RoleBinding" in block
    )
    for word, given in {"namespace: training": f"namespace: {namespace}", **words}.items():
        assert word in text
        text = text.replace(word, given)
    metadata = {"name": "rescore", "namespace": namespace}
    data = {"job.yaml": RESCORES}
    of_volume = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "capacity": {"storage": "1Gi"}}
    of_volume |= {"hostPath": {"path": str(volume)}, "claimRef": {"name": "shared", "namespace": namespace}}
    of_claim = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "rescore"}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "rescore"}, "spec": of_volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "shared", "namespace": namespace},
            "spec": of_claim | {"resources": {"requests": {"storage": "1Gi"}}},
        },
        *YAML(typ="safe").load_all(text),
    ]


def test_a_pod_with_the_documented_rights_tests_kept_machines_again(
    pods: PodCluster, cluster: Cluster, tmp_path: Path
) -> None:
    namespace, run = "rescoring", tmp_path / "runs" / "rescoring" / "of-kept"
    provider = PodProvider(MachineChoice(IMAGE, memory_bytes=128 << 20, disk_bytes=32 << 20, run="of kept"))
    task = write_task(tmp_path / "task")
    for index, script in enumerate(("cp given answer", "echo 1 > /logs/verifier/reward.txt")):
        (folder := tmp_path / f"machine-{index}").mkdir()
        (to := run / KEPT / "g" / f"{index}-abcd").mkdir(parents=True)
        made = provider.make(folder, task)
        try:
            asyncio.run(made.machine.run(["sh", "-c", script], timeout_s=300.0, directory=made.directory))
            provider.keep(folder, made, to)
        finally:
            provider.remove(folder)
    write_samples(run, "/plaudit/task", 3)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o777)  # pods have another user
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    words = {"REGISTRY/plaudit-worker:0.1.0": images.WORKER, "runs/training/RUN": f"runs/{namespace}/{run.name}"}
    done = cluster.apply(*documented(namespace, tmp_path, **words))
    assert done.returncode == 0, done.stderr

    def ended() -> dict[str, int]:
        status = cluster.get("job", "rescore", namespace).get("status", {})
        return {name: status[name] for name in ("succeeded", "failed") if status.get(name)}

    cluster.until("the end of rescore", ended, 600)
    assert ended() == {"succeeded": 1}, cluster.kubectl("-n", namespace, "logs", "job/rescore").stdout
    rows = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    found = [(row["outcome"], row["score"]) for row in rows]
    assert found == [("scored", 1.0), ("scored", 0.0), ("data_error", None)], rows
    assert "was not kept" in rows[2]["reason"]
    assert cluster.get("networkpolicy", "plaudit-machines-none", namespace)
    assert cluster.pods(namespace, LABEL) == []
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    cluster.kubectl("delete", "pv", "rescore", "--wait=false")


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


def write_task(folder: Path, config: str = "") -> Any:
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


def test_plaudit_tasks_in_pods(pods: PodCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "task")
    assert main(["tasks", str(tmp_path / "task"), "--provider", "pods", "--image", IMAGE, "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)
    assert (checked["nothing"], checked["solution"], checked["problems"]) == (0.0, 1.0, [])
    assert pods.find({}) == []
    assert os.environ[NAMESPACE_VARIABLE] == NAMESPACE
