"""Describe the processes of a job, role by role, and build what only one role has: Secrets, rights, Jobs.

    environment  the servers of ``spec.environments``
    gateway      the HTTP front of a job that only scores, and the Secret with its first caller's token
    metrics      one pod, read by Prometheus, people and the operator
    model        the servers of each scorer whose model the job serves
    reward       the reward workers, which an autoscaler may scale
    sandboxes    the broker that makes the machines of samples as pods, and its rights
    rollout      a Deployment for each group, or for replicas of several pods one Indexed Job per replica and attempt
    trainer      one Indexed Job per attempt

All names begin with their role. Redis is in ``transport.py``. The table in ``children/all.py`` has the objects around
each process. The attempts of Jobs are decided in ``attempts.py``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, cast

from plaudit_job.processes import (
    ENDPOINT_HOST_VARIABLE,
    ENDPOINT_PORT_VARIABLE,
    HOST_VARIABLE,
    PORT_VARIABLE,
    SERVER_VARIABLE,
    metrics_environment,
    server_command,
    server_environment,
)
from plaudit_job.secrets import reward_secrets
from plaudit_job.spec.pod import PodSpec, ResourcesSpec
from plaudit_job.spec.rewards import ScorerSpec
from plaudit_job.spec.rljob import EnvironmentServerSpec
from plaudit_job.spec.rollout import RolloutSpec
from plaudit_job.spec.section import SecretKey
from plaudit_operator import names
from plaudit_operator.admission import digest
from plaudit_operator.attempts import ReplicaAttempt
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.pod import SECRETS_FOLDER, Child, RolePod, http_probe, service, spread
from plaudit_operator.runtime.kinds import JOB, ROLE_BINDING, SECRET, SERVICE_ACCOUNT
from plaudit_operator.services import FIRST_CALLER

ENVIRONMENT_ROLE = "environment"
GATEWAY_ROLE = "gateway"
METRICS_ROLE = "metrics"
MODEL_ROLE = "model"
REWARD_ROLE = "reward"
ROLLOUT_ROLE = "rollout"
SANDBOXES_ROLE = "sandboxes"
TRAINER_ROLE = "trainer"
TOKENS_FOLDER = f"{SECRETS_FOLDER}/{GATEWAY_ROLE}"
_CLIENT_KEPT_S = 86_400
"""Seconds without a connection after which a client may reach another server: Kubernetes' maximum."""
_LAST_UPDATE_WITHIN_S = 600
"""Time that the trainer has after SIGTERM to finish its update and write a checkpoint."""
_DIGITS = 10
_LEAVES_AFTER_S = 8
"""A gateway that ends answers calls until the nodes have learnt that it leaves: seconds after its deletion."""
_LAST_CALLS_WITHIN_S = 150
"""Time that the gateway then allows for connections that clients keep (90 s), and for calls in flight (60 s)."""
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104
_SANDBOXES_TOKEN = "token"  # noqa: S105
_HEALTH_PORT = {"PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT)}
_POD_NAME = {"fieldRef": {"fieldPath": "metadata.name"}}
_POD_ADDRESS = {"fieldRef": {"fieldPath": "status.podIP"}}
OF_RANKS: Manifest = {"clusterIP": "None", "publishNotReadyAddresses": True}
"""Fields of a Service that gives the pods of ranks DNS names, even before they are ready."""
_RANK = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.COMPLETION_INDEX}']"}}
"""The number of a pod in its Indexed Job."""


def environment_pod(context: JobContext, server: EnvironmentServerSpec) -> RolePod:
    """Return the pods of one environment."""
    path = server.readiness.path
    return RolePod(
        role=ENVIRONMENT_ROLE,
        image=server.image or context.settings.images.worker,
        command=list(server.command),
        pod=server.pod,
        environment={"PORT": str(server.port), "HOST": _ALL_ADDRESSES},
        ports={"http": server.port},
        probe=http_probe(path, "http") if path else {"tcpSocket": {"port": "http"}},
        grace_s=30,
        joins_run=False,
    )


def environment_labels(server: EnvironmentServerSpec) -> dict[str, str]:
    """Return the labels that separate its pods from those of other environments."""
    return {names.LABEL_ENVIRONMENT: server.name}


def environment_object(context: JobContext, server: EnvironmentServerSpec) -> str:
    """Return the name of its Deployment and Service."""
    return context.role_object(f"env-{server.name}")


def environment_service(server: EnvironmentServerSpec) -> Manifest:
    """Return the fields of its Service that keep each client on one server; empty if none is asked for."""
    if server.session_affinity != "clientIP":
        return {}
    kept = {"clientIP": {"timeoutSeconds": _CLIENT_KEPT_S}}
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": kept}


def _addresses(context: JobContext) -> dict[str, str]:
    """Return the variables by which processes that run agents and scorers find environments and the job's broker."""
    found = {
        server.variable: f"http://{environment_object(context, server)}.{context.namespace}.svc:{server.port}"
        for server in context.spec.environments
    }
    if context.spec.has_broker:
        host = f"{context.role_object(SANDBOXES_ROLE)}.{context.namespace}.svc"
        found["PLAUDIT_SANDBOXES_URL"] = f"http://{host}:{names.SANDBOXES_PORT}"
        found["PLAUDIT_SANDBOXES_TOKEN_FILE"] = _sandboxes_token_file(context)
    return found


def has_gateway(context: JobContext) -> bool:
    """Return True if the job has a gateway.

    A service that an operator without gateways has admitted keeps none: its Redis has no user for one.
    """
    templates = context.admitted.templates
    return not context.spec.trains and (not templates or GATEWAY_ROLE in templates)


def gateway_pod(context: JobContext) -> RolePod:
    """Return the pods of the gateways."""
    gateway = context.spec.reward.gateway
    secret_name = gateway.token_secret or names.gateway_secret(context.name, context.run_uid)
    token = gateway.canary.service.token_secret if gateway.canary else None
    # A gateway reads its settings only once, at its start. Those of an RLJob never change. Those of a RewardService are
    # no part of its revision, so its other pods stay.
    own = gateway_settings(context)
    settings = {names.LABEL_GATEWAY_SETTINGS: digest(own)[:_DIGITS]} if context.revision and own else {}
    return RolePod(
        role=GATEWAY_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.gateway"],
        pod=gateway.pod,
        environment={
            **_HEALTH_PORT,
            "PLAUDIT_GATEWAY_HOST": _ALL_ADDRESSES,
            "PLAUDIT_GATEWAY_PORT": str(names.GATEWAY_PORT),
            "PLAUDIT_GATEWAY_TOKENS": TOKENS_FOLDER,
            "PLAUDIT_GATEWAY_LEAVES_S": str(_LEAVES_AFTER_S),
        },
        ports={"http": names.GATEWAY_PORT, "health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=_LEAVES_AFTER_S + _LAST_CALLS_WITHIN_S + 12,
        pod_fields=spread(context, GATEWAY_ROLE),
        labels={**context.uses_labels, **settings},
        secrets=(token,) if token else (),
        # The whole Secret: each key that a person adds is a further caller.
        extra_volumes=({"name": "tokens", "secret": {"secretName": secret_name, "defaultMode": 0o440}},),
        extra_mounts=({"name": "tokens", "mountPath": TOKENS_FOLDER, "readOnly": True},),
    )


def token_secrets(context: JobContext, role: str) -> set[str]:
    """Return the Secrets with the tokens by which the pods of a role call the RewardServices that the job names."""
    reward = context.spec.reward
    holders = list(reward.scorers) if role == REWARD_ROLE else [reward.gateway.canary]
    services = [holder.service for holder in holders if holder is not None and holder.service is not None]
    return {service.token_secret.name for service in services if service.token_secret is not None}


def gateway_settings(context: JobContext) -> dict[str, Any]:
    """Return the section as the user wrote it, without the number of gateways."""
    own = context.admitted.current["reward"].get("gateway") or {}
    return {name: value for name, value in own.items() if name != "replicas"}


def gateway_created_once(context: JobContext) -> list[Manifest]:
    """Return the Secret with the token of one caller, unless the user names one; a person may add further callers."""
    if context.spec.reward.gateway.token_secret:
        return []
    metadata = context.metadata(names.gateway_secret(context.name, context.run_uid), GATEWAY_ROLE)
    data = {FIRST_CALLER: secrets.token_urlsafe(32)}
    return [context.manifest(SECRET, metadata, type="Opaque", stringData=data)]


def metrics_pod(context: JobContext) -> RolePod:
    """Return the pods of the metrics service."""
    return RolePod(
        role=METRICS_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_metrics"],
        pod=context.spec.metrics.pod,
        environment={
            "PLAUDIT_METRICS_HOST": _ALL_ADDRESSES,
            "PLAUDIT_METRICS_PORT": str(names.METRICS_PORT),
            **metrics_environment(context.admitted.job),
        },
        ports={"metrics": names.METRICS_PORT},
        probe=http_probe("/readyz", "metrics"),
        liveness=http_probe("/healthz", "metrics"),
        grace_s=15,
    )


def metrics_address(name: str, namespace: str) -> str:
    """Return the URL of a job's metrics service inside the cluster."""
    return f"http://{names.role_object(name, METRICS_ROLE)}.{namespace}.svc:{names.METRICS_PORT}"


def model_pod(context: JobContext, scorer: ScorerSpec) -> RolePod:
    """Return the pods of one scorer's servers."""
    model, storage = scorer.served, context.spec.storage
    assert model is not None
    with_gpu = model.pod.uses_gpus(context.platform.gpu_resource)
    environment = server_environment(model, with_gpu=with_gpu)
    if model.sleep_during_updates:  # by a process that follows the trainer's announcements in the run's Redis
        command = ["-m", "plaudit_workers.launch.served_models"]
        environment |= {SERVER_VARIABLE: scorer.name, HOST_VARIABLE: _ALL_ADDRESSES}
        environment |= {PORT_VARIABLE: str(names.MODEL_PORT)}
    else:
        command = server_command(model, scorer.name, _ALL_ADDRESSES, names.MODEL_PORT, with_gpu=with_gpu)
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    if storage.claim_name and not model.sleep_during_updates:  # a process that joins the run has the volume already
        volumes = ({"name": "run", "persistentVolumeClaim": {"claimName": storage.claim_name}},)
        mounts = ({"name": "run", "mountPath": storage.mount_path},)
    return RolePod(
        role=MODEL_ROLE,
        image=context.settings.images.gpu,
        command=["python3", *command],
        pod=model.pod,
        environment=environment,
        ports={"model": names.MODEL_PORT},
        probe=http_probe("/health", "model"),
        grace_s=30,
        gpus=1 if with_gpu else 0,
        joins_run=model.sleep_during_updates,
        extra_volumes=volumes,
        extra_mounts=mounts,
    )


def model_object(context: JobContext, scorer: ScorerSpec) -> str:
    """Return the name of the Deployment and Service of one scorer's servers."""
    return names.model_object(context.name, model_generation(context, scorer) or scorer.name)


def model_labels(context: JobContext, scorer: ScorerSpec) -> dict[str, str]:
    """Return the labels that separate one scorer's servers from those of others, and from those of its last model."""
    own = model_generation(context, scorer)
    return {names.LABEL_SCORER: scorer.name} | ({names.LABEL_MODEL: own} if own else {})


def model_generation(context: JobContext, scorer: ScorerSpec) -> str:
    """Return the digest of a RewardService's model; empty for an RLJob, whose models never change.

    Servers of another model get a Deployment of their own: workers of the last revision need theirs until they end.
    """
    if not context.revision:
        return ""
    own = {k: v for k, v in written_model(context, scorer).items() if k != "replicas"}
    return digest({"scorer": scorer.name, **own})[:_DIGITS]


def written_model(context: JobContext, scorer: ScorerSpec) -> Mapping[str, Any]:
    """Return the section of a scorer's model as the user wrote it."""
    section = next(each for each in context.admitted.current["reward"]["scorers"] if each["name"] == scorer.name)
    for name in scorer.served_field.split("."):
        section = section[name]
    return cast("Mapping[str, Any]", section)


def reward_pod(context: JobContext) -> RolePod:
    """Return the pods of the reward workers."""
    environment = {**_HEALTH_PORT, **_addresses(context)}
    if context.revision:
        environment["PLAUDIT_SCORING_VERSION"] = context.revision
    servers = {  # one headless name resolves to all servers of a scorer
        scorer.name: [f"http://{model_object(context, scorer)}.{context.namespace}.svc:{names.MODEL_PORT}"]
        for scorer in context.spec.reward.model_scorers
    }
    if servers:
        environment["PLAUDIT_MODEL_SERVERS"] = json.dumps(servers)
    return RolePod(
        role=REWARD_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.scoring"],
        pod=context.spec.reward.workers.pod,
        environment=environment,
        ports={"health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=60,
        pod_fields={} if context.spec.trains else spread(context, REWARD_ROLE),
        secrets=(*(secret for _, secret in reward_secrets(context.spec.reward)), *_sandboxes_secrets(context)),
        labels=context.uses_labels,
    )


def rollout_pod(context: JobContext, group: str, spec: RolloutSpec) -> RolePod:
    """Return the pods of a group, whose name is empty in a job without; ``rollout_job`` adds the fields of an attempt.

    ``spec`` is ``rollout`` as it applies to the group.
    """
    environment: dict[str, Any] = {**_HEALTH_PORT, **_addresses(context)}
    ports = {"health": names.HEALTH_PORT}
    if group:
        environment["PLAUDIT_ROLLOUT_GROUP"] = group
    if context.spec.programs_in_pods:
        environment |= {ENDPOINT_HOST_VARIABLE: _POD_ADDRESS, ENDPOINT_PORT_VARIABLE: str(names.ENDPOINT_PORT)}
        ports["endpoint"] = names.ENDPOINT_PORT
    fields: Manifest = {}
    spans_pods = spec.pods_per_replica > 1
    if spans_pods:
        environment["PLAUDIT_REPLICA_RANK"] = _RANK
        # A pod that ends well would complete its index: the others would wait for it, and the Job would not fail.
        environment["PLAUDIT_EXIT_WHEN_STOPPED"] = str(names.EXIT_STOPPED)
        fields = {"subdomain": context.role_object(ROLLOUT_ROLE)}
    images = context.settings.images
    return RolePod(
        role=ROLLOUT_ROLE,
        image=images.gpu if spec.engine.kind == "vllm" else images.worker,
        command=["python3", "-m", "plaudit_workers.rollout"],
        pod=spec.pod,
        environment=environment,
        ports=ports,
        probe=http_probe("/readyz", "health"),
        grace_s=60,
        gpus=spec.gpus_per_pod,
        restart_policy="Never" if spans_pods else "Always",
        secrets=_sandboxes_secrets(context),
        pod_fields=fields,
    )


def rollout_service(context: JobContext) -> list[Manifest]:
    """Return the Service that gives the pods of replicas DNS names, of all groups; none without replicas of several."""
    groups = context.spec.rollout.by_group if context.spec.trains else {}
    if all(each.pods_per_replica == 1 for each in groups.values()):
        return []
    ports = {"replica": names.REPLICA_PORT}
    return [service(context, context.role_object(ROLLOUT_ROLE), ROLLOUT_ROLE, ports, OF_RANKS)]


def rollout_job(child: Child, template: Manifest, attempt: ReplicaAttempt, *, suspend: bool) -> Manifest:
    """Return the Job of one attempt of a replica; ``template`` is the frozen pod template of its group."""
    name = names.rollout_job(child.context.name, child.part, attempt.replica, attempt.number)
    labels = {names.LABEL_REPLICA: str(attempt.replica), names.LABEL_ATTEMPT: str(attempt.number)}
    counted = {names.SHORT_ATTEMPTS: str(attempt.short_attempts)}
    return _indexed_job(child, template, name, labels, counted, "PLAUDIT_REPLICA_LEADER", suspend=suspend)


def sandboxes_pod(context: JobContext) -> RolePod:
    """Return the pods of the broker of machines, the only ones of the job that may make pods."""
    resources = ResourcesSpec(requests={"cpu": "100m", "memory": "256Mi"}, limits={"memory": "2Gi"})
    return RolePod(
        role=SANDBOXES_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.sandboxes"],
        pod=PodSpec(service_account_name=context.role_object(SANDBOXES_ROLE), resources=resources),
        environment={
            **_HEALTH_PORT,
            "PLAUDIT_SANDBOXES_HOST": _ALL_ADDRESSES,
            "PLAUDIT_SANDBOXES_PORT": str(names.SANDBOXES_PORT),
            "PLAUDIT_SANDBOXES_TOKEN_FILE": _sandboxes_token_file(context),
            "PLAUDIT_SANDBOXES_NAMESPACE": context.namespace,
            "PLAUDIT_SANDBOXES_POD": _POD_NAME,
        },
        ports={"http": names.SANDBOXES_PORT, "health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=60,
        secrets=_sandboxes_secrets(context),
    )


def sandboxes_account(context: JobContext) -> Manifest:
    """Return the service account of the broker."""
    metadata = context.metadata(context.role_object(SANDBOXES_ROLE), SANDBOXES_ROLE)
    return context.manifest(SERVICE_ACCOUNT, metadata, automountServiceAccountToken=False)


def sandboxes_created_once(context: JobContext) -> list[Manifest]:
    """Return the Secret with the broker's token, and the binding that lets the broker make pods in its namespace."""
    name, account = names.sandboxes_objects(context.name, context.run_uid), context.role_object(SANDBOXES_ROLE)
    metadata = context.metadata(name, SANDBOXES_ROLE)
    kind, _, role = context.settings.sandboxes_role.partition("/")
    return [
        context.manifest(SECRET, metadata, type="Opaque", stringData={_SANDBOXES_TOKEN: secrets.token_urlsafe(32)}),
        context.manifest(
            ROLE_BINDING,
            metadata,
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            subjects=[{"kind": SERVICE_ACCOUNT.kind, "name": account, "namespace": context.namespace}],
        ),
    ]


def _sandboxes_secrets(context: JobContext) -> tuple[SecretKey, ...]:
    if not context.spec.has_broker:
        return ()
    return (SecretKey(name=names.sandboxes_objects(context.name, context.run_uid), key=_SANDBOXES_TOKEN),)


def _sandboxes_token_file(context: JobContext) -> str:
    return f"{SECRETS_FOLDER}/{names.sandboxes_objects(context.name, context.run_uid)}/{_SANDBOXES_TOKEN}"


def trainer_pod(context: JobContext) -> RolePod:
    """Return the pods of the trainer; ``trainer_job`` adds the fields of one attempt."""
    trainer = context.spec.trainer
    ranks_per_pod = min(trainer.ranks, trainer.ranks_per_pod)
    environment: dict[str, Any] = {"PLAUDIT_EXIT_WHEN_STOPPED": str(names.EXIT_STOPPED), **_addresses(context)}
    if trainer.weights.transfer == "direct":
        environment["PLAUDIT_WEIGHTS_PORT"] = str(names.WEIGHTS_PORT)
    command = ["python3", "-m", "plaudit_workers.training"]
    if trainer.ranks > 1:
        environment |= {"WORLD_SIZE": str(trainer.ranks), "MASTER_PORT": str(names.RENDEZVOUS_PORT), "NODE_RANK": _RANK}
        if ranks_per_pod == 1:
            environment |= {"RANK": _RANK, "LOCAL_RANK": "0"}
        else:
            environment["LOCAL_WORLD_SIZE"] = str(ranks_per_pod)
            command = ["python3", "-m", "plaudit_workers.launch.ranks"]
    return RolePod(
        role=TRAINER_ROLE,
        image=context.settings.images.gpu,
        command=command,
        pod=trainer.pod,
        environment=environment,
        grace_s=_LAST_UPDATE_WITHIN_S,
        gpus=ranks_per_pod,
        restart_policy="Never",
        secrets=_sandboxes_secrets(context),
        pod_fields={"subdomain": context.role_object(TRAINER_ROLE)} if trainer.ranks > 1 else {},
    )


def trainer_job(child: Child, template: Manifest, attempt: int, *, suspend: bool) -> Manifest:
    """Return the Job of one attempt; ``template`` is the trainer's frozen pod template."""
    name, labels = names.trainer_job(child.context.name, attempt), {names.LABEL_ATTEMPT: str(attempt)}
    leader = "MASTER_ADDR" if child.context.spec.trainer.ranks > 1 else ""
    return _indexed_job(child, template, name, labels, {}, leader, suspend=suspend)


def _indexed_job(
    child: Child,
    template: Manifest,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    leader: str,
    *,
    suspend: bool,
) -> Manifest:
    """Return a Job that gives its pods stable names, and fails as a whole as soon as one of them fails.

    A Job cannot restart a group of ranks (it would replace one while the others hang in collectives), so an attempt is
    never repaired. The variable ``leader`` holds the host of the first pod: names of pods begin with that of their Job.
    """
    context, role = child.context, child.role
    metadata = context.metadata(name, role, **child.labels, **labels)
    metadata["annotations"] = {**annotations, names.TEMPLATE: digest(template)}
    pod = template["spec"]
    if leader:
        variable = {"name": leader, "value": f"{name}-0.{context.role_object(role)}.{context.namespace}.svc"}
        containers = [{**c, "env": [*c["env"], variable]} if c["name"] == role else c for c in pod["containers"]]
        pod = {**pod, "containers": containers}
    of_template = {**template["metadata"], "labels": template["metadata"]["labels"] | labels}
    spec = {
        "completionMode": "Indexed",
        "completions": child.pods_per_replica,
        "parallelism": child.pods_per_replica,
        "backoffLimit": 0,
        "suspend": suspend,
        "template": {**template, "metadata": of_template, "spec": pod},
    }
    return context.manifest(JOB, metadata, spec)
