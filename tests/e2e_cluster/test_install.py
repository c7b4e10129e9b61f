"""Chart and images on a real cluster: an operator in pods, jobs in pods, all of it under Pod Security restricted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import images
import pytest
from real_cluster import HARNESS, ROOT, Cluster
from ruamel.yaml import YAML

pytestmark = pytest.mark.timeout(1800)  # images are built, and a model learns

NAMESPACE = "training"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
UID = 1000


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The chart, installed with images built from the repository's Dockerfiles."""
    if cluster.own:
        archives = tmp_path_factory.mktemp("images")
        images.main(archives)
        subprocess.run([HARNESS, "load", *sorted(archives.glob("*.tar"))], check=True)
    for namespace in ("plaudit", NAMESPACE):
        cluster.kubectl("create", "namespace", namespace, check=False)
        cluster.kubectl("label", "namespace", namespace, RESTRICTED, "--overwrite")
    settings = {"operator": images.OPERATOR, "worker": images.WORKER, "gpu": images.WORKER, "redis": images.REDIS}
    options = [word for name, image in settings.items() for word in ("--set", f"images.{name}={image}")]
    chart = str(ROOT / "charts" / "plaudit")
    cluster.run("helm", "upgrade", "--install", "plaudit", chart, "--namespace", "plaudit", *options, "--wait")
    yield cluster
    cluster.kubectl("--namespace", NAMESPACE, "delete", "rlj", "--all", check=False)
    cluster.run("helm", "uninstall", "plaudit", "--namespace", "plaudit", check=False)


def test_both_operators_are_ready_and_one_leads(installed: Cluster):
    operators = installed.get("deployment", "plaudit-operator", "plaudit")
    assert operators["status"]["readyReplicas"] == 2
    lease = installed.get("lease", "plaudit-operator", "plaudit")
    assert lease["spec"]["holderIdentity"].startswith("plaudit-operator-")


def test_helm_test_passes(installed: Cluster):
    installed.run("helm", "test", "plaudit", "--namespace", "plaudit", "--timeout", "5m")


@pytest.fixture(scope="module")
def shared(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A volume with model and data, and one with torch and vLLM: what a cluster's users have on their own volumes."""
    if not installed.own:
        pytest.skip("needs volumes that this machine can write to")
    folder = tmp_path_factory.mktemp("shared")
    venv = Path(os.environ.get("PLAUDIT_E2E_VENV") or tmp_path_factory.mktemp("venv"))
    if not (venv / "bin" / "python").exists():
        _make_venv(venv)
    prepare = ROOT / "examples" / "01-copy-digits" / "prepare.py"
    subprocess.run([sys.executable, prepare, "--folder", folder], check=True)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, UID)
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(0o755)
    for name, place, mode in (("shared", folder, "ReadWriteMany"), ("venv", venv, "ReadOnlyMany")):
        assert installed.apply(*_volume(name, place, mode)).returncode == 0
    yield
    for name in ("shared", "venv"):
        installed.kubectl("--namespace", NAMESPACE, "delete", "pvc", name, "--wait=false", check=False)
        installed.kubectl("delete", "pv", f"{NAMESPACE}-{name}", "--wait=false", check=False)


def _make_venv(venv: Path) -> None:
    """On the interpreter that the image has, so that a pod can run it."""
    uv = str(ROOT / ".uv" / "bin" / "uv")
    subprocess.run([uv, "venv", "-q", "--clear", "--python", "/usr/bin/python3.11", venv], check=True)
    environment = {**os.environ, "VIRTUAL_ENV": str(venv)}
    pins = ["-q", "--no-deps", "--require-hashes", "-r", str(ROOT / "requirements" / "all.txt")]
    subprocess.run([uv, "pip", "install", *pins], env=environment, check=True)


def _volume(name: str, place: Path, mode: str) -> list[dict[str, Any]]:
    spec = {"accessModes": [mode], "storageClassName": ""}
    volume = {
        **spec,
        "capacity": {"storage": "10Gi"},
        "hostPath": {"path": str(place)},
        "claimRef": {"name": name, "namespace": NAMESPACE},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    claim = {**spec, "volumeName": f"{NAMESPACE}-{name}", "resources": {"requests": {"storage": "10Gi"}}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{NAMESPACE}-{name}"}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": claim,
        },
    ]


def copy_digits(steps: int, **spec: Any) -> dict[str, Any]:
    """The first example as a cluster's user would write it."""
    path = ROOT / "examples" / "01-copy-digits" / "job.yaml"
    job: dict[str, Any] = YAML(typ="safe").load(path)
    heavy = {
        "resources": {"limits": {"nvidia.com/gpu": 0}},
        "env": [
            {"name": "PATH", "value": "/venv/bin:/usr/bin:/bin"},
            {"name": "PYTHONPATH", "value": "/opt/plaudit/lib/python3.11/site-packages"},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            {"name": "TORCHDYNAMO_DISABLE", "value": "1"},
        ],
        "volumes": [{"name": "venv", "persistentVolumeClaim": {"claimName": "venv", "readOnly": True}}],
        "volumeMounts": [{"name": "venv", "mountPath": "/venv", "readOnly": True}],
    }
    sections = job["spec"]
    job["metadata"]["namespace"] = NAMESPACE
    sections["model"]["source"] = "/plaudit/model"
    sections["data"]["train"]["path"] = "/plaudit/data/train.parquet"
    sections["data"].pop("validation")
    sections["algorithm"]["steps"] = steps
    sections["rollout"]["pod"] = heavy
    sections["trainer"]["pod"] = heavy
    sections["storage"] = {"claimName": "shared"}
    sections["files"] = {"configMap": "copy-digits"}
    sections["transport"] = {"managed": {"memory": "512Mi", "storage": "1Gi"}}
    sections |= spec
    return job


def test_a_job_learns_in_pods_and_completes(installed: Cluster, shared: None):
    steps = int(os.environ.get("PLAUDIT_E2E_STEPS", "150"))
    reward = str(ROOT / "examples" / "01-copy-digits" / "reward.py")
    installed.kubectl("--namespace", NAMESPACE, "create", "configmap", "copy-digits", f"--from-file={reward}")
    done = installed.apply(copy_digits(steps, lifecycle={"cleanup": "None"}))
    assert done.returncode == 0, done.stderr

    def ended() -> dict[str, Any]:
        job = installed.get("rlj", "copy-digits", NAMESPACE)
        return job if job.get("status", {}).get("phase") in ("Complete", "Failed", "Invalid") else {}

    job = installed.until("the end of the job", ended, 1500)
    assert job["status"]["phase"] == "Complete", job["status"]["conditions"]
    progress = job["status"]["progress"]
    assert progress["step"] == steps
    if steps >= 150:
        assert progress["rewardMean"] > 0.5
    installed.kubectl("--namespace", NAMESPACE, "delete", "rlj", "copy-digits")
    kinds = "deployment,statefulset,job,service,configmap,secret,networkpolicy,pdb"

    def nothing_left() -> bool:
        items = installed.get(kinds, namespace=NAMESPACE).get("items", [])
        return not [item for item in items if item["metadata"]["name"].startswith("copy-digits-")]

    installed.until("nothing left behind", nothing_left, 120)
