"""Agent Sandbox for the tests: its kinds as far as we use them, and a stand-in for its controller.

A cluster that serves the kinds already is left as it is. ``PLAUDIT_E2E_AGENT_SANDBOX`` names a folder with the CRDs of
a release (``*.yaml``, without their conversion webhook) to take in place of ours, and, where it has a program
``controller``, with the release's own controller (``cmd/agent-sandbox-controller``, which no Go proxy serves).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import CoreV1Api, CustomObjectsApi
from kubernetes.client.exceptions import ApiException
from kubernetes.config import new_client_from_config
from real_cluster import Cluster

GROUP, VERSION = "extensions.agents.x-k8s.io", "v1beta1"
KINDS = ("SandboxTemplate", "SandboxWarmPool", "SandboxClaim")
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SPECS: dict[str, dict[str, Any]] = {
    "SandboxTemplate": {
        "podTemplate": {"type": "object", "required": ["spec"], "properties": {"metadata": _ANY, "spec": _ANY}},
        "networkPolicyManagement": {"type": "string", "enum": ["Managed", "Unmanaged"]},
    },
    "SandboxWarmPool": {"replicas": {"type": "integer", "minimum": 0}, "sandboxTemplateRef": _NAMED},
    "SandboxClaim": {
        "warmPoolRef": _NAMED,
        "lifecycle": {
            "type": "object",
            "properties": {
                "shutdownTime": {"type": "string", "format": "date-time"},
                "shutdownPolicy": {"type": "string", "enum": ["Delete", "DeleteForeground", "Retain"]},
            },
        },
    },
}


def _definition(kind: str) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    properties = {"spec": {"type": "object", "properties": _SPECS[kind]}, "status": _ANY}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": properties}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [version],
        },
    }


def is_served(cluster: Cluster) -> bool:
    """Tell whether a cluster has Agent Sandbox already."""
    found = cluster.kubectl("api-resources", "--api-group", GROUP, "-o", "name", check=False)
    return all(f"{kind.lower()}s.{GROUP}" in found.stdout for kind in KINDS)


@contextlib.contextmanager
def installed(cluster: Cluster, namespace: str) -> Iterator[bool]:
    """Install the kinds and a controller; yield whether it is the real one, and not one played in a namespace."""
    if is_served(cluster):
        yield True
        return
    folder = os.environ.get("PLAUDIT_E2E_AGENT_SANDBOX")
    texts = (
        [path.read_text() for path in sorted(Path(folder).glob("*.yaml"))]
        if folder
        else [yaml.safe_dump(_definition(kind)) for kind in KINDS]
    )
    program = Path(folder) / "controller" if folder else None
    for text in texts:
        cluster.kubectl("apply", "--server-side", "-f", "-", text=text)
    cluster.until("the kinds of Agent Sandbox are served", lambda: is_served(cluster), 60)
    is_real = program is not None and program.exists()
    try:
        with _running(cluster, str(program)) if is_real else _played(cluster, namespace):
            yield is_real
    finally:
        for text in texts:
            cluster.kubectl("delete", "--wait=false", "-f", "-", text=text)


@contextlib.contextmanager
def _running(cluster: Cluster, program: str) -> Iterator[None]:
    flags = ["--extensions", "--leader-elect=false", "--enable-webhook=false", "--manage-webhook-certs=false"]
    nowhere = ["--metrics-bind-address=0", "--health-probe-bind-address=0"]
    with subprocess.Popen(
        [program, *flags, *nowhere], env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    ) as controller:
        try:
            yield
        finally:
            controller.terminate()


@contextlib.contextmanager
def _played(cluster: Cluster, namespace: str) -> Iterator[None]:
    ends = threading.Event()
    controller = threading.Thread(target=_control, args=(cluster, namespace, ends), daemon=True)
    controller.start()
    try:
        yield
    finally:
        ends.set()
        controller.join()


def _control(cluster: Cluster, namespace: str, ends: threading.Event) -> None:
    """Make a pod of its pool's template for each claim; the API server's own collector deletes it with the claim."""
    connection = new_client_from_config(cluster.kubeconfig)
    objects, pods = CustomObjectsApi(connection), CoreV1Api(connection)
    where = (GROUP, VERSION, namespace)
    while not ends.wait(0.2):
        with contextlib.suppress(ApiException):  # the next turn tries again
            for claim in objects.list_namespaced_custom_object(*where, "sandboxclaims")["items"]:
                metadata = claim["metadata"]
                if claim.get("status") or metadata.get("deletionTimestamp"):
                    continue
                pool = objects.get_namespaced_custom_object(
                    *where, "sandboxwarmpools", claim["spec"]["warmPoolRef"]["name"]
                )
                template = objects.get_namespaced_custom_object(
                    *where, "sandboxtemplates", pool["spec"]["sandboxTemplateRef"]["name"]
                )
                owner = {key: claim[key] for key in ("apiVersion", "kind")}
                owner |= {"name": metadata["name"], "uid": metadata["uid"]}
                made = template["spec"]["podTemplate"]
                made["metadata"] |= {
                    "name": metadata["name"],
                    "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
                }
                with contextlib.suppress(ApiException):
                    pods.create_namespaced_pod(namespace, {"apiVersion": "v1", "kind": "Pod", **made})
                status = {"status": {"sandbox": {"name": metadata["name"]}}}
                objects.patch_namespaced_custom_object_status(*where, "sandboxclaims", metadata["name"], status)
