"""Machines of agents that were kept: tested again without their pods, by a user and by a Job of the page."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import images
import pyarrow
import pyarrow.parquet as parquet
import pytest
from machine_pods import IMAGE, restricted, write_task
from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML

from plaudit_job.tasks import Task
from plaudit_metrics.sources.sample_schema import COLUMNS
from plaudit_reward.machines import KEPT
from plaudit_reward.pod_provider import PodProvider
from plaudit_reward.providers import MachineChoice
from plaudit_sandbox.pod_cluster import PodCluster
from plaudit_sandbox.pod_manifests import LABEL
from plaudit_wire.errors import InfrastructureError
from plaudit_workers.cli import main

pytestmark = pytest.mark.timeout(900)


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
    words = {"REGISTRY/plaudit-worker:0.1.0": images.WORKER, "runs/training/RUN": f"runs/{namespace}/{run.name}"}
    done = cluster.apply(restricted(namespace), *documented(namespace, tmp_path, **words))
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
