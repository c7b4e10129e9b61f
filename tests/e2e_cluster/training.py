"""The jobs of the tests, and their prerequisites in a cluster: a volume with models and data, torch and vLLM.

torch and vLLM take 5 GB, and no image of these tests contains them. A cluster on this machine mounts the checkout's own
environment as a read-only volume, with what `make install` compiled; on another cluster ``images.gpu`` provides them.
"""

from __future__ import annotations

import json
import os
import sysconfig
from typing import Any

from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML

NAMESPACE = "training"
CLASS = os.environ.get("PLAUDIT_E2E_STORAGE_CLASS", "")
EXAMPLE = ROOT / "examples" / "01-copy-digits"
_MODELS = ROOT / "examples" / "05-reward-model"
_TOOLS = ROOT / "examples" / "08-tools"
_PREPARE = """\
import runpy, sys
for example, folder in (
    ("copy-digits", "/plaudit"), ("reward-model", "/plaudit/reward-model"), ("tools", "/plaudit/tools")
):
    sys.argv = ["prepare.py", "--folder", folder]
    runpy.run_path(f"/examples/{example}/prepare.py", run_name="__main__")
"""


def prepare(cluster: Cluster, image: str) -> None:
    """Create the volume, fill it from a pod of ``image``, and create the ConfigMap with the reward function."""
    manifests = [_claim("shared", {"storageClassName": CLASS} if CLASS else {}), _examples(), _reward(), _pod(image)]
    if cluster.own:
        manifests = [*_packages(), *manifests]
    done = cluster.apply(*manifests)
    assert done.returncode == 0, done.stderr

    def phase() -> str:
        return str(cluster.get("pod", "prepare", NAMESPACE).get("status", {}).get("phase", ""))

    cluster.until("prepared volume", lambda: phase() in ("Succeeded", "Failed"), 600)
    said = cluster.kubectl("--namespace", NAMESPACE, "logs", "prepare", check=False).stdout
    assert phase() == "Succeeded", said
    cluster.kubectl("--namespace", NAMESPACE, "delete", "pod/prepare", "--wait=false")


def heavy(own: bool = "PLAUDIT_E2E_KUBECONFIG" not in os.environ) -> dict[str, Any]:
    """Return the ``pod`` section of roles that need torch."""
    if not own:
        return {}
    variables = {
        "PYTHONPATH": "/packages",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return {
        "resources": {"limits": {"nvidia.com/gpu": 0}},
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumes": [{"name": "packages", "persistentVolumeClaim": {"claimName": "packages", "readOnly": True}}],
        "volumeMounts": [{"name": "packages", "mountPath": "/packages", "readOnly": True}],
    }


def copy_digits(steps: int, name: str = "copy-digits", **spec: Any) -> dict[str, Any]:
    """Return the first example as a user of a cluster would write it; ``spec`` replaces whole sections."""
    job: dict[str, Any] = YAML(typ="safe").load(EXAMPLE / "job.yaml")
    sections = job["spec"]
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    sections["model"]["source"] = "/plaudit/model"
    sections["data"]["train"]["path"] = "/plaudit/data/train.parquet"
    sections["data"].pop("validation")
    sections["algorithm"]["steps"] = steps
    sections["rollout"]["pod"] = heavy()
    sections["trainer"]["pod"] = heavy()
    sections["storage"] = {"claimName": "shared"}
    sections["files"] = {"configMap": "copy-digits"}
    sections["transport"] = {"managed": {"memory": "512Mi", "storage": "1Gi"}}
    sections |= spec
    return job


def tools(steps: int) -> list[dict[str, Any]]:
    """Return the example of a model that learns to call a tool, with the ConfigMap of its files.

    A script takes the part of vLLM, which ``copy_digits`` has: it calls the tool, and then answers with a digit.
    """
    job: dict[str, Any] = YAML(typ="safe").load(_TOOLS / "job.yaml")
    sections = job["spec"]
    job["metadata"] = {"name": "tools", "namespace": NAMESPACE}
    sections["model"]["source"] = "/plaudit/tools/model"
    sections["data"]["train"]["path"] = "/plaudit/tools/data/train.parquet"
    sections["algorithm"]["steps"] = steps
    turns = ['<tool_call>{"name": "open_safe", "arguments": {}}</tool_call>', "0"]
    sections["rollout"]["engine"] = {"kind": "scripted", "maxModelLength": 64, "arguments": {"turns": turns}}
    del sections["rollout"]["agent"]["maxTurnTokens"]  # the script ends its turns by a token of its own
    sections["rollout"]["pod"] = heavy()
    sections["trainer"]["pod"] = heavy()
    sections["storage"] = {"claimName": "shared"}
    sections["files"] = {"configMap": "tools"}
    sections["transport"] = {"managed": {"memory": "512Mi", "storage": "1Gi"}}
    sections["lifecycle"] = {"cleanup": "None"}
    files = {name: (_TOOLS / name).read_text() for name in ("reward.py", "safe.py", "tools.yaml")}
    return [_config_map("tools", files), job]


def reward_model() -> dict[str, Any]:
    """Return a reward model that scores answers without a right digit; its score is recorded and affects nothing.

    Its server sleeps during updates, so the first one waits for it to start.
    """
    model = {
        "source": "/plaudit/reward-model/model/reward",
        "engine": "plaudit",
        "dtype": "float32",
        "sleepDuringUpdates": True,
        "pod": heavy(),
    }
    effect = {"weight": 0, "onFailure": "ignore", "when": {"scorer": "digits", "equals": 0}}
    return {"name": "preference", "kind": "model", "model": model, **effect}


def file_of(cluster: Cluster, job: dict[str, Any], path: str) -> str:
    """Read a file of the run's folder through the pod of the metrics service."""
    metadata = job["metadata"]
    folder = f"/plaudit/runs/{metadata['namespace']}/{job['status']['run']}"
    pod = f"deployment/{metadata['name']}-metrics"
    return cluster.kubectl("--namespace", metadata["namespace"], "exec", pod, "--", "cat", f"{folder}/{path}").stdout


def ledger(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of each group of the run."""
    found: dict[str, Any] = json.loads(file_of(cluster, job, "ledger.json"))
    return found


def steps(cluster: Cluster, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the statistics of each step."""
    return [json.loads(line) for line in file_of(cluster, job, "steps.jsonl").splitlines()]


def _claim(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}} | spec
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(name), "spec": spec}


def _packages() -> list[dict[str, Any]]:
    """A claim of the packages beside the interpreter that runs these tests, whose minor version the images have."""
    volume = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "capacity": {"storage": "10Gi"},
        "hostPath": {"path": sysconfig.get_path("purelib")},
        "claimRef": {"name": "packages", "namespace": NAMESPACE},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    name = f"{NAMESPACE}-packages"
    claim = _claim("packages", {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": name})
    return [{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume}, claim]


def _reward() -> dict[str, Any]:
    return _config_map("copy-digits", {"reward.py": (EXAMPLE / "reward.py").read_text()})


def _examples() -> dict[str, Any]:
    files = {
        "tiny_model.py": ROOT / "examples" / "tiny_model.py",
        "copy-digits": EXAMPLE / "prepare.py",
        "reward-model": _MODELS / "prepare.py",
        "tools": _TOOLS / "prepare.py",
    }
    return _config_map("examples", {key: path.read_text() for key, path in files.items()})


def _pod(image: str) -> dict[str, Any]:
    """Writes the models and the data; meets Pod Security restricted."""
    extra = heavy()
    paths = {"tiny_model.py": "tiny_model.py"}
    paths |= {example: f"{example}/prepare.py" for example in ("copy-digits", "reward-model", "tools")}
    items = [{"key": key, "path": path} for key, path in paths.items()]
    container = {
        "name": "prepare",
        "image": image,
        "command": ["python3", "-c", _PREPARE],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "OMP_NUM_THREADS", "value": "1"}, *extra.get("env", [])],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "examples", "mountPath": "/examples", "readOnly": True},
            {"name": "shared", "mountPath": "/plaudit"},
            *extra.get("volumeMounts", []),
        ],
    }
    user = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000)
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **user},
        "containers": [container],
        "volumes": [
            {"name": "examples", "configMap": {"name": "examples", "items": items}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
            *extra.get("volumes", []),
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata("prepare"), "spec": spec}


def _config_map(name: str, data: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name), "data": data}


def _metadata(name: str) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE}
