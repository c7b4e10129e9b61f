"""kubectl and helm on a real cluster, as the tests use them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes.client import ApiClient
from kubernetes.config import new_client_from_config

from plaudit_operator.runtime import kinds

ROOT = Path(__file__).parents[2]


def state_folder() -> str:
    """Return the folder of the tests' cluster, one for each process of pytest-xdist; empty: the harness's default."""
    given, worker = os.environ.get("PLAUDIT_E2E_STATE", ""), os.environ.get("PYTEST_XDIST_WORKER", "")
    return f"{given or Path(tempfile.gettempdir(), 'plaudit-e2e')}-{worker}" if worker else given


def harness(command: str, *arguments: str) -> list[str]:
    """Return a command of the harness for the tests' cluster."""
    state = state_folder()
    options = ["--state", state] if state else []
    return [str(ROOT / "tests" / "cluster" / "cluster"), command, *options, *arguments]


_KINDS = {
    "rlj": kinds.RLJOB,
    "rws": kinds.REWARD_SERVICE,
    "pod": kinds.POD,
    "pods": kinds.POD,
    "deployment": kinds.DEPLOYMENT,
    "statefulset": kinds.STATEFUL_SET,
    "job": kinds.JOB,
    "service": kinds.SERVICE,
    "serviceaccount": kinds.SERVICE_ACCOUNT,
    "configmap": kinds.CONFIG_MAP,
    "secret": kinds.SECRET,
    "pdb": kinds.PDB,
    "networkpolicy": kinds.NETWORK_POLICY,
    "hpa": kinds.HPA,
    "lease": kinds.LEASE,
    "pvc": kinds.Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    "quota": kinds.Kind("v1", "ResourceQuota", "resourcequotas"),
}
"""Kinds that tests look at again and again, by the names that they use for them."""


class Cluster:
    """kubectl and helm on one cluster."""

    def __init__(self, kubeconfig: str, own: bool) -> None:
        self.kubeconfig = kubeconfig
        self.own = own
        self.environment = {**os.environ, "KUBECONFIG": kubeconfig}
        built = subprocess.run(harness("programs"), capture_output=True, text=True, check=True).stdout.strip()
        self.environment["PATH"] = f"{built}:{os.environ['PATH']}"

    def run(self, *argv: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program with this cluster's kubeconfig."""
        done = subprocess.run(
            [self.program(argv[0]), *argv[1:]],
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(argv)}: {done.stderr or done.stdout}"
        return done

    def program(self, name: str) -> str:
        """Return the path of a program: the harness's own, or an installed one."""
        found = shutil.which(name, path=self.environment["PATH"])
        assert found, f"{name} is not installed"
        return found

    def kubectl(self, *argv: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl."""
        return self.run("kubectl", *argv, text=text, check=check)

    def get(self, kind: str, name: str = "", namespace: str = "") -> dict[str, Any]:
        """Return an object, or a list of objects; empty if it does not exist.

        What tests wait for is read without kubectl, which takes a twelfth of a second of CPU.
        """
        names = kind.split(",")
        if _KINDS.keys() >= set(names):
            found = [self._found(_KINDS[each], name, namespace or "default") for each in names]
            if name or not all(found):
                return found[0] if len(found) == 1 else {}
            return {"items": [item for each in found for item in each["items"]]}
        where = ["--namespace", namespace] if namespace else []
        done = self.kubectl("get", kind, *([name] if name else []), *where, "-o", "json", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def _found(self, kind: kinds.Kind, name: str, namespace: str) -> dict[str, Any]:
        found = self._read(kind.path(namespace, name))
        for item in found.get("items", []):
            item["kind"] = kind.kind  # which lists leave out
        return found

    def warnings(self, name: str, namespace: str) -> set[str]:
        """Return the reasons of the warnings about an object."""
        selected = urlencode({"fieldSelector": f"involvedObject.name={name},type=Warning"})
        events = self._read(f"{kinds.EVENT.path(namespace)}?{selected}").get("items", [])
        return {each["reason"] for each in events}

    def pods(self, namespace: str, labels: str) -> list[dict[str, Any]]:
        """Return the pods that a label selector selects."""
        path = kinds.POD.path(namespace)
        found: list[dict[str, Any]] = self._read(f"{path}?{urlencode({'labelSelector': labels})}").get("items", [])
        return found

    def refusal(self, manifest: dict[str, Any]) -> str:
        """Return why the API server would refuse an object as new, as it says it; empty if it would take it."""
        path = kinds.kind_of(manifest["kind"]).path(manifest["metadata"].get("namespace", "default"))
        answer = self._request("POST", f"{path}?dryRun=All&fieldValidation=Strict", json=manifest)
        return "" if answer.status < 300 else str(answer.json()["message"])

    def _read(self, path: str) -> dict[str, Any]:
        with contextlib.suppress(urllib3.exceptions.HTTPError):  # the API server may be down
            answer = self._request("GET", path)
            if answer.status == 200:
                return dict(answer.json())
        return {}

    def _request(self, method: str, path: str, **body: Any) -> urllib3.BaseHTTPResponse:
        pool: urllib3.PoolManager = self._api.rest_client.pool_manager
        return pool.request(method, self._api.configuration.host + path, timeout=30.0, retries=False, **body)

    @cached_property
    def _api(self) -> ApiClient:
        return new_client_from_config(self.kubeconfig)

    def condition(self, kind: str, name: str, namespace: str, type_: str) -> dict[str, Any]:
        """Return a condition of an object; empty if the condition or the object is missing."""
        conditions = self.get(kind, name, namespace).get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == type_), {})

    def apply(self, *manifests: dict[str, Any], dry_run: bool = False) -> subprocess.CompletedProcess[str]:
        """Apply manifests without raising on failure."""
        options = ["--dry-run=server"] if dry_run else []
        text = "\n---\n".join(map(json.dumps, manifests))
        return self.kubectl("apply", "--validate=strict", *options, "-f", "-", text=text, check=False)

    def until(self, what: str, holds: Callable[[], Any], seconds: float = 400) -> Any:
        """Wait until a condition is truthy, and return its value.

        The limit is no promise of the product: it only ends a test whose event never comes, on a slow machine too.
        """
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s\n{self._picture()}"
            time.sleep(0.2)
        return found

    def _picture(self) -> str:
        """Return jobs, pods and the latest events, as kubectl prints them."""
        jobs = self.kubectl("get", "rlj", "-A", check=False).stdout
        pods = self.kubectl("get", "pods", "-A", "-o", "wide", check=False).stdout
        events = self.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp", check=False).stdout
        return "\n".join([jobs, pods, *events.splitlines()[-25:]])
