"""Build the pod template of each process of a job: security, folders, the job's files, the user's ``pod`` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plaudit_operator import names
from plaudit_operator.children import job_config, redis_access
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.gang import joined
from plaudit_operator.children.merge import strategic_merge
from plaudit_operator.children.topology import in_one_domain
from plaudit_workers.job.spec.kubernetes.pod import PodSpec
from plaudit_workers.job.spec.section import SecretKey

HOME = "/home/plaudit"
SECRETS_FOLDER = "/run/plaudit/secrets"

_LOST_NODE_TOLERATED_S = 30
_STARTS_WITHIN_S = 300
"""No process is killed before its first successful probe: on a busy node imports alone take a minute."""
_READ_ONLY = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}

_PREPARE = """\
import json, os, signal, socket, sys, time
from urllib.parse import urlsplit
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for part in ("samples", "checkpoints", "weights", "logs"):
    os.makedirs(os.path.join(os.environ["PLAUDIT_RUN_FOLDER"], part), exist_ok=True)
def wait_for(what, url, port):
    host, port, printed = url.hostname, url.port or port, None
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if str(error) != printed:
                printed = str(error)
                print(f"waiting for {what} at {host}:{port}: {printed}", flush=True)
            time.sleep(0.5)
wait_for("Redis", urlsplit(os.environ["PLAUDIT_REDIS_URL"]), 6379)
if "PLAUDIT_SCORING_VERSION" in os.environ:
    for scorer, urls in json.loads(os.environ.get("PLAUDIT_MODEL_SERVERS", "{}")).items():
        wait_for(f"the model of {scorer}", urlsplit(urls[0]), 80)
"""
"""Create the run's folder and wait for Redis: a process without Redis exits, and a trainer's exit counts as a failure.

Reward workers of a RewardService also wait for their models: until they are ready, those of the last revision go on.

Process 1 of a container ignores a SIGTERM that it does not handle: without the handler, a pod that is deleted while it
waits would hold its GPUs for the whole grace period."""


@dataclass(frozen=True)
class RolePod:
    """Hold the properties of one role's pods."""

    role: str
    image: str
    command: list[str]
    pod: PodSpec
    environment: dict[str, Any] = field(default_factory=dict)
    """Value or ``valueFrom`` object by name."""
    ports: dict[str, int] = field(default_factory=dict)
    probe: Manifest | None = None
    """Readiness probe; with ``liveness`` also used, less often, as the liveness probe."""
    liveness: Manifest | None = None
    grace_s: int = 60
    gpus: int = 0
    secrets: tuple[SecretKey, ...] = ()
    """Secrets that the process reads as files, ``<secrets folder>/<name>/<key>``."""
    joins_run: bool = True
    """True if it connects to the run's Redis and uses the run's folder."""
    restart_policy: str = "Always"
    pod_fields: Manifest = field(default_factory=dict)
    """Additional fields of the pod's spec."""
    labels: dict[str, str] = field(default_factory=dict)
    extra_volumes: tuple[Manifest, ...] = ()
    extra_mounts: tuple[Manifest, ...] = ()
    init_containers: tuple[Manifest, ...] = ()


def pod_template(context: JobContext, process: RolePod) -> Manifest:
    """Return the finished template, with the user's ``pod`` section applied."""
    pod, platform = process.pod, context.platform
    spec: Manifest = {
        "serviceAccountName": pod.service_account_name or names.role_object(context.name, "pods"),
        "automountServiceAccountToken": bool(pod.service_account_name),
        "enableServiceLinks": False,
        "restartPolicy": process.restart_policy,
        "terminationGracePeriodSeconds": process.grace_s,
        "securityContext": _security(context),
        "tolerations": [*_lost_node_tolerations(), *platform.tolerations, *pod.tolerations],
        "containers": [_container(context, process)],
        "volumes": _volumes(context, process),
        **process.pod_fields,
    }
    if first := [*process.init_containers, *([_prepare(context, process)] if process.joins_run else [])]:
        spec["initContainers"] = first
    if secrets := [name for name in (context.settings.images.pull_secret, *platform.image_pull_secrets) if name]:
        spec["imagePullSecrets"] = [{"name": name} for name in dict.fromkeys(secrets)]
    if platform.runtime_class_name:
        spec["runtimeClassName"] = platform.runtime_class_name
    if pod.resource_claims:
        spec["resourceClaims"] = pod.resource_claims
    if priority := pod.priority_class_name or context.spec.scheduling.priority_class_name:
        spec["priorityClassName"] = priority
    if selector := {**platform.node_selector, **pod.node_selector}:
        spec["nodeSelector"] = selector
    labels = {
        **platform.labels,
        "app.kubernetes.io/name": "plaudit",
        "app.kubernetes.io/component": process.role,
        names.MANAGED_BY: names.FIELD_MANAGER,
        **context.labels(process.role),
        names.LABEL_RUN: context.run,
        **job_config.revision_labels(context, process.role),
        **process.labels,
    }
    metadata: Manifest = {"labels": labels}
    if platform.annotations:
        metadata["annotations"] = dict(platform.annotations)
    template: Manifest = {"metadata": metadata, "spec": spec}
    affinity = {"spec": {"affinity": pod.affinity}} if pod.affinity else {}
    together = in_one_domain(context, process.role, pod.topology)
    for layer in (together, affinity, joined(context, process.role), pod.template):
        template = strategic_merge(template, layer)
    return template


def _container(context: JobContext, process: RolePod) -> Manifest:
    container: Manifest = {
        "name": process.role,
        "image": process.pod.image or process.image,
        "command": process.command,
        "env": _environment(context, process),
        "resources": _resources(process, context.platform.gpu_resource),
        "securityContext": _READ_ONLY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(context, process),
    }
    if process.pod.env_from:
        container["envFrom"] = process.pod.env_from
    if context.settings.images.pull_policy:
        container["imagePullPolicy"] = context.settings.images.pull_policy
    if process.ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in process.ports.items()]
    if process.probe:
        container["readinessProbe"] = {**process.probe, "periodSeconds": 3, "timeoutSeconds": 3, "failureThreshold": 3}
    if process.liveness:
        container["livenessProbe"] = {**process.liveness, "periodSeconds": 10, "timeoutSeconds": 5}
        container["livenessProbe"]["failureThreshold"] = 6
        container["startupProbe"] = {**process.liveness, "periodSeconds": 2, "timeoutSeconds": 5}
        container["startupProbe"]["failureThreshold"] = _STARTS_WITHIN_S // 2
    return container


def _prepare(context: JobContext, process: RolePod) -> Manifest:
    container = _container(context, process)
    for name in ("ports", "readinessProbe", "livenessProbe", "startupProbe", "envFrom"):
        container.pop(name, None)
    return container | small_container(context) | {"name": "prepare", "command": ["python3", "-c", _PREPARE]}


def small_container(context: JobContext) -> Manifest:
    """Return the fields of a container that runs a short program of ours before a process starts."""
    fields: Manifest = {
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": _READ_ONLY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if context.settings.images.pull_policy:
        fields["imagePullPolicy"] = context.settings.images.pull_policy
    return fields


def _environment(context: JobContext, process: RolePod) -> list[Manifest]:
    """Return the environment. Later entries override earlier ones: of operator, platform, role, user."""
    values: dict[str, Any] = {
        "HOME": HOME,
        "USER": "plaudit",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "VLLM_CACHE_ROOT": f"{HOME}/.cache/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor",
        "TRITON_CACHE_DIR": f"{HOME}/.cache/triton",
        "HF_HOME": _hub_folder(context),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if process.joins_run:
        values |= {
            "PLAUDIT_JOB": f"{redis_access.JOB_FOLDER}/job.yaml",
            "PLAUDIT_RUN": context.run,
            "PLAUDIT_RUN_FOLDER": context.run_folder,
            "PLAUDIT_SECRETS_FOLDER": SECRETS_FOLDER,
            **redis_access.environment(context, process.role),
        }
    if process.gpus and not process.pod.uses_gpus(context.platform.gpu_resource):
        values["NVIDIA_VISIBLE_DEVICES"] = "void"  # else NVIDIA's runtime shows a container without a limit all GPUs
    for variable in context.platform.env:
        values[variable["name"]] = variable.get("valueFrom") or variable.get("value", "")
    values |= process.environment
    for own in process.pod.env:
        source = own.value_from
        values[own.name] = source.model_dump(by_alias=True, exclude_unset=True) if source else own.value
    return [
        {"name": name, "valueFrom": value} if isinstance(value, dict) else {"name": name, "value": value}
        for name, value in values.items()
    ]


def _hub_folder(context: JobContext) -> str:
    """Return the folder of downloaded models: on the shared volume for all jobs, else in the pod."""
    storage = context.spec.storage
    return f"{storage.mount_path.rstrip('/') if storage.claim_name else HOME}/huggingface"


def _resources(process: RolePod, gpu_resource: str) -> Manifest:
    pod, asked = process.pod, process.pod.resources
    requests, limits = dict(asked.requests), dict(asked.limits)
    if process.gpus and not asked.claims and pod.stated_gpus(gpu_resource) is None:
        limits[pod.gpu_resource or gpu_resource] = process.gpus
    for amounts in (requests, limits):
        for device in [name for name in amounts if "/" in name and str(amounts[name]) == "0"]:
            del amounts[device]
    claims = [{"name": claim.name} | ({"request": claim.request} if claim.request else {}) for claim in asked.claims]
    parts: dict[str, Any] = {"requests": requests, "limits": limits, "claims": claims}
    return {name: part for name, part in parts.items() if part}


def _mounts(context: JobContext, process: RolePod) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        {"name": "home", "mountPath": HOME},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        *process.extra_mounts,
    ]
    if process.joins_run:
        mounts += [
            {"name": "job", "mountPath": redis_access.JOB_FOLDER, "readOnly": True},
            {"name": "run", "mountPath": context.spec.storage.mount_path},
            *redis_access.mounts(context, process.role),
        ]
    mounts += [
        {"name": _secret_volume(i), "mountPath": folder, "readOnly": True}
        for i, (folder, _, _) in enumerate(_secret_files(process))
    ]
    for mount in process.pod.volume_mounts:
        written: Manifest = {"name": mount.name, "mountPath": mount.mount_path, "readOnly": mount.read_only}
        mounts.append(written | ({"subPath": mount.sub_path} if mount.sub_path else {}))
    return mounts


def _volumes(context: JobContext, process: RolePod) -> list[Manifest]:
    shm: Manifest = {"medium": "Memory"}
    if process.pod.shm_size:
        shm["sizeLimit"] = process.pod.shm_size
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
        *process.extra_volumes,
    ]
    if process.joins_run:
        volumes.append({"name": "job", "configMap": job_config.volume_source(context, process.role)})
        claim = context.spec.storage.claim_name
        volumes.append({"name": "run", **({"persistentVolumeClaim": {"claimName": claim}} if claim else _EMPTY)})
    for i, (_, secret, keys) in enumerate(_secret_files(process)):
        source = {"secretName": secret, "items": keys, "defaultMode": 0o440}
        volumes.append({"name": _secret_volume(i), "secret": source})
    if process.joins_run:
        volumes += redis_access.volumes(context, process.role)
    return [*volumes, *process.pod.volumes]


_EMPTY: Manifest = {"emptyDir": {}}


def _secret_volume(index: int) -> str:
    return f"secret-{index}"


def _secret_files(process: RolePod) -> list[tuple[str, str, list[Manifest]]]:
    """Return folder, Secret and items of each Secret that the process reads."""
    found: dict[str, list[Manifest]] = {}
    for secret in process.secrets:
        items = found.setdefault(secret.name, [])
        item = {"key": secret.key, "path": secret.key}
        if item not in items:
            items.append(item)
    return [(f"{SECRETS_FOLDER}/{name}", name, items) for name, items in found.items()]


def _security(context: JobContext) -> Manifest:
    security: Manifest = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    user = context.platform.run_as_user
    return security | ({"runAsUser": user, "runAsGroup": user, "fsGroup": user} if user else {})


def _lost_node_tolerations() -> list[Manifest]:
    return [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LOST_NODE_TOLERATED_S,
        }
        for taint in ("not-ready", "unreachable")
    ]


def http_probe(path: str, port: str) -> Manifest:
    """Return an HTTP probe."""
    return {"httpGet": {"path": path, "port": port}}
