"""Build pod templates, and the Deployments, Services and disruption budgets around them.

A template has the operator's security settings, folders and environment, then the platform's and the role's; the user's
``pod`` section is applied last, and ``pod.template`` as a strategic merge patch on top of it.

Jobs with ``scheduling.gang`` or ``scheduling.queueName`` start trainer, rollouts, reward models and Redis all or
nothing: as a PodGroup of Kubernetes, or of Kueue. These are all pods of a job that may hold GPUs. Both groups have the
name of the run, so that pods of an earlier job of the same name never count. Reward workers and metrics belong to
neither: reward workers start once the group is scheduled (``policies.awaited``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plaudit_job.spec.pod import PodSpec, TopologySpec
from plaudit_job.spec.section import SecretKey
from plaudit_operator import names
from plaudit_operator.children import job_config
from plaudit_operator.children.context import Frozen, JobContext, Manifest
from plaudit_operator.runtime.kinds import DEPLOYMENT, JOB, PDB, SERVICE, Kind

HOME = "/home/plaudit"
SECRETS_FOLDER = "/run/plaudit/secrets"
_LOST_NODE_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
]
_STARTS_WITHIN_S = 300
"""No process is killed before its first successful probe: on a busy node imports alone take a minute."""
_NEVER = 1_000_000
"""Failed startup probes before a container is killed that may read its data for as long as it takes."""
_READ_ONLY = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_SHARED = ("cpu", "memory", "ephemeral-storage")
_SMALL_REQUESTS = {"cpu": "10m", "memory": "32Mi"}
_SMALL_LIMITS = {"memory": "128Mi"}
_PREPARE_NAME = "prepare"
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
    """Empty for the image's own."""
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
    """Beside those of the role and of ``Child.labels``."""
    extra_volumes: tuple[Manifest, ...] = ()
    extra_mounts: tuple[Manifest, ...] = ()
    init_containers: tuple[Manifest, ...] = ()


RECREATED: Manifest = {"revisionHistoryLimit": 2, "strategy": {"type": "Recreate"}}
"""Fields of the spec of a Deployment whose pods end before others start."""


def rolled(*, surge: int, unavailable: int) -> Manifest:
    """Return fields of the spec of a Deployment: how many pods it may have more than wanted, and fewer."""
    rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
    return {**RECREATED, "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling}}


@dataclass(frozen=True)
class Child:
    """Describe the pods of one template, and the objects around them."""

    context: JobContext
    role: str
    """One of ``names.ROLES``."""
    inputs: Any
    """The part of the spec that its template is rendered from, as the user wrote it, without the number of pods."""
    process: Callable[[JobContext], RolePod]
    part: str = ""
    """Name of the rollout group, scorer or environment; empty if the job has one child of the role."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that separate its pods from others of the role."""
    objects: str = ""
    """Name of its objects, if it is not that of the role."""
    generation: str = ""
    """In a RewardService, stands for the digest of ``inputs``."""
    kind: Kind = DEPLOYMENT
    """Of what owns its pods. Jobs follow each other (``attempts.py``)."""
    workload: Manifest = field(default_factory=lambda: RECREATED)
    """Further fields of the spec of its Deployment or StatefulSet. The ``replicas`` of a Deployment are set at its
    creation, and then through the scale subresource."""
    replicas: int | None = 1
    """While the job runs; None if an autoscaler sets them."""
    pods_per_replica: int = 1
    ports: Mapping[str, int] = field(default_factory=dict)
    """Of its Service; without any it has none."""
    service: Manifest = field(default_factory=dict)
    """Further fields of the Service's spec."""
    others: tuple[Manifest, ...] = ()
    """Its further objects."""
    created_once: Callable[[JobContext], Sequence[Manifest]] = lambda _: ()
    """Return what is created once, before the owner of its pods."""

    @property
    def name(self) -> str:
        """Return the key of its frozen template."""
        return f"{self.role}/{self.part}" if self.part else self.role

    @property
    def reported(self) -> str:
        """Return the name of its entry in the status, which rollouts of all groups share."""
        reported = names.ROLES[self.role].reported
        return self.name if "/" in reported else reported or self.role

    @property
    def owner(self) -> str:
        """Return the name of what owns its pods; those of Jobs begin with it."""
        return self.objects or self.context.role_object(self.role)

    @property
    def pods(self) -> int:
        """Return the number of its pods while the job runs; 0 if an autoscaler sets it."""
        return (self.replicas or 0) * self.pods_per_replica

    def template(self) -> Manifest:
        """Render its pod template anew."""
        process = self.process(self.context)
        return pod_template(self.context, replace(process, labels={**self.labels, **process.labels}))

    def manifests(self, frozen: Frozen) -> Iterator[Manifest]:
        """Yield its objects, except for Jobs and what is created once."""
        if self.kind is not JOB:
            selector = {**self.context.labels(self.role), **self.labels}
            metadata = self.context.metadata(self.owner, self.role, **self.labels)
            metadata["annotations"] = {names.INPUTS: frozen["inputs"]}
            spec = {"selector": {"matchLabels": selector}, "template": frozen["template"], **self.workload}
            yield self.context.manifest(self.kind, metadata, spec)
        if self.ports:
            yield service(self.context, self.owner, self.role, self.ports, self.service, **self.labels)
        yield from self.others


def pod_template(context: JobContext, process: RolePod) -> Manifest:
    """Return the finished template, with the user's ``pod`` section applied."""
    pod, platform = process.pod, context.platform
    spec: Manifest = {
        "serviceAccountName": pod.service_account_name or context.role_object("pods"),
        "automountServiceAccountToken": bool(pod.service_account_name),
        "enableServiceLinks": False,
        "restartPolicy": process.restart_policy,
        "terminationGracePeriodSeconds": process.grace_s,
        "securityContext": _security(context),
        "tolerations": [*_LOST_NODE_TOLERATIONS, *platform.tolerations, *pod.tolerations],
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
        **context.all_labels(process.role),
        names.LABEL_RUN: context.run,
        **job_config.revision_labels(context, process.role),
        **process.labels,
    }
    metadata: Manifest = {"labels": labels}
    if platform.annotations:
        metadata["annotations"] = dict(platform.annotations)
    template: Manifest = {"metadata": metadata, "spec": spec}
    affinity = {"spec": {"affinity": pod.affinity}} if pod.affinity else {}
    together = _in_one_domain(context, process.role, pod.topology)
    for layer in (together, affinity, _group_membership(context, process.role), pod.template):
        template = strategic_merge(template, layer)
    lists = _with_sidecars(template["spec"], process, native=context.settings.native_sidecars)
    lists["containers"] = [_probed_at_start(each, process) for each in lists["containers"]]
    return {**template, "spec": {**template["spec"], **lists}}


def _probed_at_start(container: Manifest, process: RolePod) -> Manifest:
    """Return a role's container whose command for readiness, ours or the user's, runs each second until it succeeds."""
    readiness = container.get("readinessProbe") or {}
    if container["name"] != process.role or "exec" not in (process.probe or {}) or "exec" not in readiness:
        return container
    return {"startupProbe": {**readiness, "periodSeconds": 1, "failureThreshold": _NEVER}, **container}


def _with_sidecars(spec: Manifest, process: RolePod, *, native: bool) -> Manifest:
    """Return the containers of a pod: those that ``pod.template`` adds are restricted, and native sidecars if it ends.

    A plain sidecar would keep such a pod running, and its Job unfinished, after the process has ended.
    """
    own = {process.role, *(container["name"] for container in process.init_containers), _PREPARE_NAME}
    lists = {
        field: [each if each.get("name") in own else _restricted(each) for each in spec[field]]
        for field in ("containers", "initContainers")
        if spec.get(field)
    }
    added = [each for each in lists["containers"] if each.get("name") != process.role]
    if native and added and process.restart_policy == "Never":
        lists["containers"] = [each for each in lists["containers"] if each not in added]
        first = lists.get("initContainers", [])
        lists["initContainers"] = [*first, *({**each, "restartPolicy": "Always"} for each in added)]
    return lists


def _restricted(container: Manifest) -> Manifest:
    """Return a container with what Pod Security ``restricted`` asks for, where it says nothing itself."""
    context = {"allowPrivilegeEscalation": False, **(container.get("securityContext") or {})}
    context["capabilities"] = {"drop": ["ALL"], **(context.get("capabilities") or {})}
    return {**container, "securityContext": context}


def images_of(template: Manifest) -> set[str]:
    """Return the images of a pod template."""
    spec = template["spec"]
    return {str(each["image"]) for each in (*spec["containers"], *(spec.get("initContainers") or ()))}


def _container(context: JobContext, process: RolePod) -> Manifest:
    container: Manifest = {
        **restricted_container(context),
        "name": process.role,
        "image": process.pod.image or process.image,
        "env": _environment(context, process),
        "resources": _resources(process, context.platform.gpu_resource),
        "volumeMounts": _mounts(context, process),
    }
    if process.command:
        container["command"] = process.command
    if process.pod.env_from:
        container["envFrom"] = process.pod.env_from
    if process.ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in process.ports.items()]
    if process.probe:
        container["readinessProbe"] = {**process.probe, "periodSeconds": 3, "timeoutSeconds": 3, "failureThreshold": 3}
        if "exec" in process.probe:  # each takes the node 35 ms of a core
            container["readinessProbe"] |= {"periodSeconds": 10, "failureThreshold": 2}
    if process.liveness:
        live = {**process.liveness, "timeoutSeconds": 5}
        container["livenessProbe"] = {**live, "periodSeconds": 10, "failureThreshold": 6}
        container["startupProbe"] = {**live, "periodSeconds": 2, "failureThreshold": _STARTS_WITHIN_S // 2}
    return container


def _prepare(context: JobContext, process: RolePod) -> Manifest:
    container = _container(context, process)
    for name in ("ports", "readinessProbe", "livenessProbe", "startupProbe", "envFrom"):
        container.pop(name, None)
    container["resources"] = small_resources(process.pod)
    return container | {"name": _PREPARE_NAME, "command": ["python3", "-c", _PREPARE]}


def restricted_container(context: JobContext) -> Manifest:
    """Return the fields that all containers of ours have."""
    fields: Manifest = {"securityContext": _READ_ONLY, "terminationMessagePolicy": "FallbackToLogsOnError"}
    if context.settings.images.pull_policy:
        fields["imagePullPolicy"] = context.settings.images.pull_policy
    return fields


def small_resources(pod: PodSpec) -> Manifest:
    """Return the resources of a short program of ours that runs before a process starts: those of the process.

    They cost nothing, because a pod needs the larger of the two, and quotas ask for them of every container. What the
    role does not ask for is small.
    """
    requests, limits = (
        {name: amount for name, amount in amounts.items() if name in _SHARED}
        for amounts in (pod.resources.requests, pod.resources.limits)
    )
    given = {*requests, *limits}
    small_requests = {name: amount for name, amount in _SMALL_REQUESTS.items() if name not in given}
    small_limits = {name: amount for name, amount in _SMALL_LIMITS.items() if name not in given}
    return {"requests": small_requests | requests, "limits": small_limits | limits}


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
            "PLAUDIT_JOB": f"{job_config.JOB_FOLDER}/job.yaml",
            "PLAUDIT_RUN": context.run,
            "PLAUDIT_RUN_FOLDER": context.run_folder,
            "PLAUDIT_SECRETS_FOLDER": SECRETS_FOLDER,
            **job_config.redis_environment(context, process.role),
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
            {"name": "job", "mountPath": job_config.JOB_FOLDER, "readOnly": True},
            {"name": "run", "mountPath": context.spec.storage.mount_path},
            *job_config.redis_mounts(context, process.role),
        ]
    mounts += [mount for _, mount in _secret_volumes(process)]
    for mount in process.pod.volume_mounts:
        written: Manifest = {"name": mount.name, "mountPath": mount.mount_path, "readOnly": mount.read_only}
        mounts.append(written | ({"subPath": mount.sub_path} if mount.sub_path else {}))
    return mounts


def _volumes(context: JobContext, process: RolePod) -> list[Manifest]:
    shm = {"medium": "Memory"} | ({"sizeLimit": process.pod.shm_size} if process.pod.shm_size else {})
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
        *process.extra_volumes,
    ]
    if process.joins_run:
        volumes.append({"name": "job", "configMap": job_config.job_volume_source(context, process.role)})
        claim = context.spec.storage.claim_name
        source: Manifest = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        volumes.append({"name": "run", **source})
    volumes += [volume for volume, _ in _secret_volumes(process)]
    if process.joins_run:
        volumes += job_config.redis_volumes(context, process.role)
    return [*volumes, *process.pod.volumes]


def _secret_volumes(process: RolePod) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield volume and mount of each Secret that the process reads."""
    found: dict[str, dict[str, Manifest]] = {}
    for secret in process.secrets:
        found.setdefault(secret.name, {})[secret.key] = {"key": secret.key, "path": secret.key}
    for i, (name, items) in enumerate(found.items()):
        source = {"secretName": name, "items": list(items.values()), "defaultMode": 0o440}
        mount = {"name": f"secret-{i}", "mountPath": f"{SECRETS_FOLDER}/{name}", "readOnly": True}
        yield {"name": f"secret-{i}", "secret": source}, mount


def _security(context: JobContext) -> Manifest:
    security: Manifest = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    user = context.platform.run_as_user
    return security | ({"runAsUser": user, "runAsGroup": user, "fsGroup": user} if user else {})


_MERGE_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"),
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""The ``patchMergeKey`` of the lists of a pod; all other lists are replaced as a whole."""


def strategic_merge(base: Any, patch: Any, field: str = "") -> Any:
    """Return ``base`` with ``patch`` applied; a null removes a field."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = {**base}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = strategic_merge(base[key], value, key) if key in base else value
        return merged
    key = _MERGE_KEYS.get(field)
    if key and isinstance(base, list) and isinstance(patch, list):
        patches = {item.get(key): item for item in patch}
        pairs = [(item, patches.pop(item.get(key), None)) for item in base]
        kept = [item if change is None else strategic_merge(item, change) for item, change in pairs]
        return kept + list(patches.values())
    return patch


def _in_one_domain(context: JobContext, role: str, topology: TopologySpec) -> Manifest:
    """Return the fields of a pod template that keep the pods of a role together; empty if none is asked for."""
    asked = {"required": topology.required, "preferred": topology.preferred}
    given = {kind: label for kind, label in asked.items() if label}
    if not given:
        return {}
    if context.spec.scheduling.queue_name:
        return {"metadata": {"annotations": {f"{names.KUEUE_TOPOLOGY}-{kind}-topology": given[kind] for kind in given}}}
    pods = {"labelSelector": {"matchLabels": {**context.labels(role), names.LABEL_RUN: context.run}}}
    terms: Manifest = {kind: {**pods, "topologyKey": label} for kind, label in given.items()}
    if "preferred" in terms:
        terms["preferred"] = {"weight": 100, "podAffinityTerm": terms["preferred"]}
    affinity = {f"{kind}DuringSchedulingIgnoredDuringExecution": [term] for kind, term in terms.items()}
    return {"spec": {"affinity": {"podAffinity": affinity}}}


def spread(context: JobContext, role: str) -> Manifest:
    """Return the fields of a pod's spec that spread the pods of a role over nodes, as far as there is room."""
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {**context.labels(role), names.LABEL_RUN: context.run}},
        "matchLabelKeys": ["pod-template-hash"],  # of a roll-out count the new pods only
    }
    return {"topologySpreadConstraints": [constraint]}


def is_member(template: Manifest) -> bool:
    """Return True if the pods of a frozen template belong to the job's group."""
    return "schedulingGroup" in template["spec"] or names.KUEUE_GROUP in template["metadata"]["labels"]


def _group_membership(context: JobContext, role: str) -> Manifest:
    """Return the fields by which a pod template joins the job's group; empty for roles outside it."""
    spec, scheduling = context.spec, context.spec.scheduling
    if not names.ROLES[role].grouped or not scheduling.whole:
        return {}
    if scheduling.gang == "native":
        return {"spec": {"schedulingGroup": {"podGroupName": context.run}}}
    rollouts = sum(each.replicas * each.pods_per_replica for each in spec.rollout.by_group.values())
    models = sum(scorer.served.replicas for scorer in spec.reward.scorers if scorer.served)
    count = spec.trainer.pods + rollouts + models + (0 if spec.transport.url else 1)
    # Kueue's webhook would set this gate too. Without Kueue in the cluster, it keeps the job from bypassing its queue.
    return {
        "metadata": {
            "labels": {
                names.KUEUE_QUEUE: scheduling.queue_name,
                names.KUEUE_MANAGED: "true",
                names.KUEUE_GROUP: context.run,
            },
            "annotations": {
                names.KUEUE_COUNT: str(count),
                names.KUEUE_PARENT: f"{names.GROUP}/rljob",
                names.KUEUE_SERVING: "true",
            },
        },
        "spec": {"schedulingGates": [{"name": names.KUEUE_GATE}]},
    }


def http_probe(path: str, port: str) -> Manifest:
    """Return an HTTP probe."""
    return {"httpGet": {"path": path, "port": port}}


def service(
    context: JobContext, name: str, role: str, ports: Mapping[str, int], fields: Manifest, **labels: str
) -> Manifest:
    """Return a Service, with further fields of its spec, that selects the pods of a role with these labels."""
    listed = [{"name": key, "port": port, "targetPort": port} for key, port in ports.items()]
    spec = {"selector": {**context.labels(role), **labels}, "ports": listed, **fields}
    return context.manifest(SERVICE, context.metadata(name, role, **labels), spec)


def disruption_budget(context: JobContext, role: str) -> Manifest:
    """Return a budget that evicts one pod of a role at a time.

    Only for Deployments of two or more replicas: with one, it would block a drain.
    """
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": context.labels(role)}}
    name = context.role_object(role)
    return context.manifest(PDB, context.metadata(name, role), spec)
