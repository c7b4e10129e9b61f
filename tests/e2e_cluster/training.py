"""The jobs of the tests and what they need of a cluster: a volume with model and data, and one with torch and vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML

NAMESPACE = "training"
EXAMPLE = ROOT / "examples" / "01-copy-digits"
UID = 1000


def prepare(cluster: Cluster, folder: Path) -> None:
    """Writes model and data into the folder and makes it, and an environment for pods, claims of the cluster."""
    venv = Path(os.environ.get("PLAUDIT_E2E_VENV") or folder / "venv")
    if not (venv / "bin" / "python").exists():
        _make_venv(venv)
    shared = folder / "shared"
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--folder", shared], check=True)
    for path in [shared, *shared.rglob("*")]:
        os.chown(path, UID, UID)
    for name, place, mode in (("shared", shared, "ReadWriteMany"), ("venv", venv, "ReadOnlyMany")):
        done = cluster.apply(*_volume(name, place, mode))
        assert done.returncode == 0, done.stderr
    reward = f"--from-file={EXAMPLE / 'reward.py'}"
    cluster.kubectl("--namespace", NAMESPACE, "create", "configmap", "copy-digits", reward, check=False)


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


def copy_digits(steps: int, name: str = "copy-digits", **spec: Any) -> dict[str, Any]:
    """The first example as a cluster's user would write it; ``spec`` replaces whole sections."""
    job: dict[str, Any] = YAML(typ="safe").load(EXAMPLE / "job.yaml")
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
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
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
