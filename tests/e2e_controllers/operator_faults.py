"""An operator that runs and leads, but may not watch RLJobs and cannot create network policies."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from real_cluster import Cluster
from scoring_job import NAMESPACE

_ROLE = "plaudit-plaudit-operator"
_WEBHOOK = "missing"


@contextmanager
def hindered_operator(cluster: Cluster) -> Iterator[None]:
    """Hinder the operator while the context lasts.

    It loses the right to watch RLJobs: it still lists them when it starts, and receives no event after that. A webhook
    that does not respond, as one whose pods are down, makes the API server fail when an object is created: the network
    policies that are deleted here cannot be created again.
    """
    role = cluster.get("clusterrole", _ROLE)
    cluster.kubectl("replace", "-f", "-", text=json.dumps(_without_watch(role)))
    done = cluster.apply(_webhook())
    assert done.returncode == 0, done.stderr
    try:
        _restart(cluster)  # its watches began with the right
        cluster.kubectl("--namespace", NAMESPACE, "delete", "networkpolicies", "-l", "plaudit.dev/job", "--wait=false")
        yield
    finally:
        cluster.kubectl("delete", "validatingwebhookconfiguration", _WEBHOOK)
        whole = copy.deepcopy(role)
        whole["metadata"].pop("resourceVersion")
        cluster.kubectl("replace", "-f", "-", text=json.dumps(whole))
        _restart(cluster)


def _without_watch(role: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(role)
    rule = next(rule for rule in changed["rules"] if "rljobs" in rule["resources"])
    rule["verbs"].remove("watch")
    return changed


def _webhook() -> dict[str, Any]:
    rule = {"apiGroups": ["networking.k8s.io"], "apiVersions": ["v1"], "resources": ["networkpolicies"]}
    selected = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    webhook = {
        "name": "missing.plaudit.dev",
        "clientConfig": {"service": {"namespace": NAMESPACE, "name": "missing", "path": "/"}},
        "rules": [rule | {"operations": ["CREATE"]}],
        "namespaceSelector": selected,
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    return api | {"metadata": {"name": _WEBHOOK}, "webhooks": [webhook]}


def _restart(cluster: Cluster) -> None:
    """Restart the operator's pods one by one, so that one of them leads all the time."""
    operator = ("--namespace", "plaudit", "rollout")
    cluster.kubectl(*operator, "restart", "deployment/plaudit-operator")
    cluster.kubectl(*operator, "status", "deployment/plaudit-operator", "--timeout=180s")
