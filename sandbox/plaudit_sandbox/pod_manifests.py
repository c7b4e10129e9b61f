"""Write the objects that machines on Kubernetes are made of, as plain data.

A machine is a pod that "restricted" Pod Security admits. Its first container copies one static program, BusyBox, into a
volume that the agent's container mounts read only. The provider believes that program alone: it ends processes, tells
changed files, and carries files in and out. ``/tests``, ``/logs`` and ``/run`` are volumes, so that an agent can
neither remove them nor put a link in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from plaudit_sandbox.machine import MachineLimits

LABEL: Final = "plaudit.dev/machine"
NETWORK_LABEL: Final = "plaudit.dev/machine-network"
CONTAINER: Final = "machine"
TOOLS: Final = "/plaudit"
BUSYBOX: Final = f"{TOOLS}/busybox"
TOOLS_IMAGE: Final = "docker.io/library/busybox:1.37.0-musl"
"""With a static ``/bin/busybox``."""
WRITABLE_VOLUMES: Final = ("tests", "logs", "run", "solution")
"""At these places of the root, where an ordinary user can make nothing; the last one is for a task's own solution."""
_USER = 1000
_VOLUME = "64Mi"
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16")
Network = Literal["none", "public"]


@dataclass(frozen=True)
class PodSettings:
    """What a machine's pod is made of."""

    image: str
    network: Network = "none"
    cpus: float = 1.0
    gpus: int = 0
    workdir: str = "/app"
    """Where the agent works; a volume if the image is none of the task's own."""
    has_own_image: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    """By which it can be found and removed, such as ``plaudit.dev/run``."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Of the pod: ``metadata`` and ``spec`` (runtimeClassName, nodeSelector, imagePullSecrets, securityContext, …)."""
    tools_image: str = TOOLS_IMAGE
    lifetime_s: int = 86_400
    """Kubernetes ends it after this time, whoever has forgotten it."""


def pod(name: str, settings: PodSettings, limits: MachineLimits) -> dict[str, Any]:
    """Return a machine's pod."""
    given: Mapping[str, Any] = settings.template.get("spec") or {}
    metadata: Mapping[str, Any] = settings.template.get("metadata") or {}
    labels = {LABEL: name, NETWORK_LABEL: settings.network, **settings.labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": dict(metadata.get("annotations") or {}),
        },
        "spec": {
            **given,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": settings.lifetime_s,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
                **(given.get("securityContext") or {}),
            },
            "initContainers": [_tools(settings)],
            "containers": [_machine(settings, limits)],
            "volumes": [*_volumes(settings, limits), *(given.get("volumes") or ())],
        },
    }


def _tools(settings: PodSettings) -> dict[str, Any]:
    return {
        "name": "tools",
        "image": settings.tools_image,
        "command": ["/bin/busybox", "cp", "/bin/busybox", BUSYBOX],
        "securityContext": _confined(),
        "resources": {"limits": {"cpu": "100m", "memory": "32Mi"}},
        "volumeMounts": [{"name": "tools", "mountPath": TOOLS}],
    }


def _machine(settings: PodSettings, limits: MachineLimits) -> dict[str, Any]:
    resources = {
        "cpu": f"{int(settings.cpus * 1000)}m",
        "memory": str(limits.memory_bytes),
        "ephemeral-storage": str(limits.disk_bytes),
        **({"nvidia.com/gpu": str(settings.gpus)} if settings.gpus else {}),
    }
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in WRITABLE_VOLUMES]
    if not settings.has_own_image:
        mounts.append({"name": "work", "mountPath": settings.workdir})
    return {
        "name": CONTAINER,
        "image": settings.image,
        # It reaps what others leave, and goes on when it alone is spared.
        "command": [BUSYBOX, "sh", "-c", f"while :; do {BUSYBOX} sleep 60; done"],
        "securityContext": _confined(),
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [*mounts, {"name": "tools", "mountPath": TOOLS, "readOnly": True}],
    }


def _volumes(settings: PodSettings, limits: MachineLimits) -> list[dict[str, Any]]:
    volumes = [{"name": name, "emptyDir": {"sizeLimit": _VOLUME}} for name in ("tools", *WRITABLE_VOLUMES)]
    if not settings.has_own_image:
        volumes.append({"name": "work", "emptyDir": {"sizeLimit": str(limits.disk_bytes)}})
    return volumes


def _confined() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def network_policy(network: Network) -> dict[str, Any]:
    """Return the policy of every machine with this network.

    Nobody reaches a machine. One with ``public`` reaches the internet and the cluster's name server, but no address of
    the private ranges, where the cluster and its neighbours are. A policy knows addresses and no host names.
    """
    internet = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE)}}
    names = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"plaudit-machines-{network}", "labels": {NETWORK_LABEL: network}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: network}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [{"to": [internet]}, names] if network == "public" else [],
        },
    }
