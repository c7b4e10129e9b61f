"""Build the servers of ``spec.environments``: a Deployment and a Service each.

Build the HTTP front of a job that only scores: Deployment, Service and the Secret with the first caller's token.

The metrics service: one pod, read by Prometheus, people and the operator.

Build the servers of each scorer whose model the job serves: a Deployment behind a headless Service.

Build the Deployment of the reward workers, which an autoscaler may scale.

Build the rollout workers: a Deployment for each group, or for replicas of several pods a Job for each replica.

The pods of a replica hold one copy of the model together. An Indexed Job gives them stable names, and fails as a whole
when one of them ends; ``operator/attempts.py`` starts the next attempt. An update of a Deployment never runs
more pods than there are GPUs for.

Build one Indexed Job per attempt of the trainer, whose pods find each other through a headless Service.

A Job cannot restart a group of ranks (it would replace one while the others hang in collectives), so an attempt is
never repaired: if one pod fails, the Job fails, and ``operator/attempts.py`` decides whether another attempt follows.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from plaudit_job.processes import (
    HOST_VARIABLE,
    PORT_VARIABLE,
    SERVER_VARIABLE,
    metrics_environment,
    server_command,
    server_environment,
)
from plaudit_job.secrets import reward_secrets
from plaudit_job.spec.rewards import ScorerSpec
from plaudit_job.spec.rljob import EnvironmentServerSpec
from plaudit_job.spec.rollout import RolloutSpec
from plaudit_job.spec.section import SecretKey
from plaudit_operator import names
from plaudit_operator.admission import digest
from plaudit_operator.attempts import ReplicaAttempt
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.pod import SECRETS_FOLDER, RolePod, deployment, http_probe, pod_template, service
from plaudit_operator.runtime.kinds import JOB, SECRET, SERVICE
from plaudit_operator.services import FIRST_CALLER

ENVIRONMENT_ROLE = "environment"

_CLIENT_KEPT_S = 86_400

"""Seconds without a connection after which a client may reach another server: Kubernetes' maximum."""


def environment_template(context: JobContext, server: EnvironmentServerSpec) -> Manifest:
    """Return the pod template of one environment."""
    path = server.readiness.path
    process = RolePod(
        role=ENVIRONMENT_ROLE,
        image=server.image or context.settings.images.worker,
        command=list(server.command),
        pod=server.pod,
        environment={"PORT": str(server.port), "HOST": "0.0.0.0"},  # noqa: S104
        ports={"http": server.port},
        probe=http_probe(path, "http") if path else {"tcpSocket": {"port": "http"}},
        grace_s=30,
        joins_run=False,
        labels=environment_labels(server),
    )
    template_ = pod_template(context, process)
    if not server.command:
        template_["spec"]["containers"][0].pop("command", None)  # the image's own
    return template_


def environment_labels(server: EnvironmentServerSpec) -> dict[str, str]:
    """Return the labels that separate its pods from those of other environments."""
    return {names.LABEL_ENVIRONMENT: server.name}


def environment_object(context: JobContext, server: EnvironmentServerSpec) -> str:
    """Return the name of its Deployment and Service."""
    return names.role_object(context.name, f"env-{server.name}")


def environment_variables(context: JobContext) -> dict[str, str]:
    """Return the variables with the URLs, for the processes that run agents and scorers."""
    return {
        server.variable: f"http://{environment_object(context, server)}.{context.namespace}.svc:{server.port}"
        for server in context.spec.environments
    }


def environment_manifests(
    context: JobContext, server: EnvironmentServerSpec, template_: Manifest, inputs: str
) -> list[Manifest]:
    """Return the Deployment and Service of one environment."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}
    name, separate = environment_object(context, server), environment_labels(server)
    reached = service(context, name, ENVIRONMENT_ROLE, {"http": server.port}, headless=False, **separate)
    if server.session_affinity == "clientIP":
        kept = {"clientIP": {"timeoutSeconds": _CLIENT_KEPT_S}}
        reached["spec"] |= {"sessionAffinity": "ClientIP", "sessionAffinityConfig": kept}
    return [
        deployment(context, name, ENVIRONMENT_ROLE, template_, inputs, strategy, **separate),
        reached,
    ]


GATEWAY_ROLE = "gateway"

TOKENS_FOLDER = f"{SECRETS_FOLDER}/{GATEWAY_ROLE}"

_DIGITS = 10


def is_served(context: JobContext) -> bool:
    """Return True if the job has a gateway.

    A service that an operator without gateways has admitted keeps none: its Redis has no user for one.
    """
    templates = context.admitted.templates
    return not context.spec.trains and (not templates or GATEWAY_ROLE in templates)


def gateway_template(context: JobContext) -> Manifest:
    """Return the pod template of the gateways."""
    own = context.spec.reward.gateway.token_secret
    secret_name = own or names.gateway_secret(context.name, context.uid)
    process = RolePod(
        role=GATEWAY_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.gateway"],
        pod=context.spec.reward.gateway.pod,
        environment={
            "PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT),
            "PLAUDIT_GATEWAY_HOST": "0.0.0.0",  # noqa: S104
            "PLAUDIT_GATEWAY_PORT": str(names.GATEWAY_PORT),
            "PLAUDIT_GATEWAY_TOKENS": TOKENS_FOLDER,
        },
        ports={"http": names.GATEWAY_PORT, "health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=30,
        labels={**context.uses_labels, **_settings_labels(context)},
        secrets=tuple(_canary_secrets(context)),
        # The whole Secret: each key that a person adds is a further caller.
        extra_volumes=({"name": "tokens", "secret": {"secretName": secret_name, "defaultMode": 0o440}},),
        extra_mounts=({"name": "tokens", "mountPath": TOKENS_FOLDER, "readOnly": True},),
    )
    return pod_template(context, process)


def gateway_settings(context: JobContext) -> dict[str, Any]:
    """Return the section as the user wrote it, without the number of gateways."""
    own = context.admitted.current["reward"].get("gateway") or {}
    return {name: value for name, value in own.items() if name != "replicas"}


def _settings_labels(context: JobContext) -> dict[str, str]:
    """Return a label that differs with the settings, which a gateway reads only once, at its start.

    Those of an RLJob never change. Those of a RewardService are no part of its revision, so its other pods stay.
    """
    own = gateway_settings(context)
    return {names.LABEL_GATEWAY_SETTINGS: digest(own)[:_DIGITS]} if context.revision and own else {}


def _canary_secrets(context: JobContext) -> Iterator[SecretKey]:
    canary = context.spec.reward.gateway.canary
    if canary is not None and canary.service.token_secret is not None:
        yield canary.service.token_secret


def gateway_manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of the gateways."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    name = names.role_object(context.name, GATEWAY_ROLE)
    return [
        deployment(context, name, GATEWAY_ROLE, template_, inputs, strategy),
        service(context, name, GATEWAY_ROLE, {"http": names.GATEWAY_PORT}),
    ]


def makes_gateway_secret(context: JobContext) -> bool:
    """Return True if the operator makes the Secret with the callers' tokens."""
    return is_served(context) and not context.spec.reward.gateway.token_secret


def gateway_secret(context: JobContext) -> Manifest:
    """Return the Secret with the token of one caller, created once; a person may add keys for further callers."""
    metadata = context.metadata(names.gateway_secret(context.name, context.uid), GATEWAY_ROLE)
    data = {FIRST_CALLER: secrets.token_urlsafe(32)}
    return context.manifest(SECRET, metadata, type="Opaque", stringData=data)


def gateway_address(context: JobContext) -> str:
    """Return the URL of the service inside the cluster."""
    return names.gateway_url(context.name, context.namespace)


METRICS_ROLE = "metrics"


def metrics_template(context: JobContext) -> Manifest:
    """Return the pod template of the metrics service."""
    process = RolePod(
        role=METRICS_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_metrics"],
        pod=context.spec.metrics.pod,
        environment={
            "PLAUDIT_METRICS_HOST": "0.0.0.0",  # noqa: S104
            "PLAUDIT_METRICS_PORT": str(names.METRICS_PORT),
            **metrics_environment(context.job),
        },
        ports={"metrics": names.METRICS_PORT},
        probe=http_probe("/readyz", "metrics"),
        liveness=http_probe("/healthz", "metrics"),
        grace_s=15,
    )
    return pod_template(context, process)


def metrics_manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of the metrics service."""
    name = names.role_object(context.name, METRICS_ROLE)
    return [
        deployment(context, name, METRICS_ROLE, template_, inputs, {"type": "Recreate"}),
        service(context, name, METRICS_ROLE, {"metrics": names.METRICS_PORT}),
    ]


def metrics_address(name: str, namespace: str) -> str:
    """Return the URL of the service inside the cluster."""
    return f"http://{names.role_object(name, METRICS_ROLE)}.{namespace}.svc:{names.METRICS_PORT}"


MODEL_ROLE = "model"

_HOST = "0.0.0.0"  # noqa: S104


def model_template(context: JobContext, scorer: ScorerSpec) -> Manifest:
    """Return the pod template of one scorer's servers."""
    model = scorer.served
    assert model is not None
    with_gpu = model.pod.uses_gpus(context.platform.gpu_resource)
    environment = server_environment(model, with_gpu=with_gpu)
    if model.sleep_during_updates:  # by a process that follows the trainer's announcements in the run's Redis
        command = ["-m", "plaudit_workers.launch.served_models"]
        environment |= {SERVER_VARIABLE: scorer.name, HOST_VARIABLE: _HOST, PORT_VARIABLE: str(names.MODEL_PORT)}
    else:
        command = server_command(model, scorer.name, _HOST, names.MODEL_PORT, with_gpu=with_gpu)
    process = RolePod(
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
        labels=model_labels(context, scorer),
        extra_volumes=() if model.sleep_during_updates else _volume(context),
        extra_mounts=() if model.sleep_during_updates else _mount(context),
    )
    return pod_template(context, process)


def model_addresses(context: JobContext) -> dict[str, list[str]]:
    """Return the URLs of the servers by scorer; one headless name resolves to all of them."""
    return {
        scorer.name: [f"http://{model_object(context, scorer)}.{context.namespace}.svc:{names.MODEL_PORT}"]
        for scorer in context.spec.reward.model_scorers
    }


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
    return digest({"scorer": scorer.name, **own})[:10]


def written_model(context: JobContext, scorer: ScorerSpec) -> Mapping[str, Any]:
    """Return the section of a scorer's model as the user wrote it."""
    section = next(each for each in context.admitted.current["reward"]["scorers"] if each["name"] == scorer.name)
    for name in scorer.served_field.split("."):
        section = section[name]
    return cast("Mapping[str, Any]", section)


def _volume(context: JobContext) -> tuple[Manifest, ...]:
    claim = context.spec.storage.claim_name
    return ({"name": "run", "persistentVolumeClaim": {"claimName": claim}},) if claim else ()


def _mount(context: JobContext) -> tuple[Manifest, ...]:
    storage = context.spec.storage
    return ({"name": "run", "mountPath": storage.mount_path},) if storage.claim_name else ()


def model_manifests(context: JobContext, scorer: ScorerSpec, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of one scorer's servers."""
    name, separate = model_object(context, scorer), model_labels(context, scorer)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return [
        deployment(context, name, MODEL_ROLE, template_, inputs, strategy, **separate),
        service(context, name, MODEL_ROLE, {"model": names.MODEL_PORT}, headless=True, **separate),
    ]


REWARD_ROLE = "reward"


def reward_template(context: JobContext) -> Manifest:
    """Return the pod template of the reward workers."""
    process = RolePod(
        role=REWARD_ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.scoring"],
        pod=context.spec.reward.workers.pod,
        environment=_environment(context),
        ports={"health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=60,
        secrets=tuple(secret for _, secret in reward_secrets(context.spec.reward)),
        labels=context.uses_labels,
    )
    return pod_template(context, process)


def _environment(context: JobContext) -> dict[str, str]:
    environment = {"PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT), **environment_variables(context)}
    if context.revision:
        environment["PLAUDIT_SCORING_VERSION"] = context.revision
    servers = model_addresses(context)
    return environment | ({"PLAUDIT_MODEL_SERVERS": json.dumps(servers)} if servers else {})


def reward_manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment of the reward workers."""
    # The workers of a service's last revision score until those of the new one are ready.
    unavailable = 0 if context.revision else 1
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": unavailable}}
    name = names.role_object(context.name, REWARD_ROLE)
    return [deployment(context, name, REWARD_ROLE, template_, inputs, strategy)]


ROLLOUT_ROLE = "rollout"


@dataclass(frozen=True)
class RolloutGroup:
    """Describe the rollout workers of one pod template."""

    name: str
    """Name of the entry of ``rollout.groups``; empty for a job without groups."""
    spec: RolloutSpec
    """``rollout`` as it applies to this group."""

    @property
    def child(self) -> str:
        """Return the key of its pod template among the frozen ones."""
        return f"{ROLLOUT_ROLE}/{self.name}" if self.name else ROLLOUT_ROLE

    @property
    def spans_pods(self) -> bool:
        """Return True if a replica has several pods."""
        return self.spec.pods_per_replica > 1

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that separate its objects from those of other groups."""
        return {names.LABEL_ROLLOUT_GROUP: self.name} if self.name else {}


def rollout_groups(context: JobContext) -> list[RolloutGroup]:
    """Return the groups of a job that trains."""
    return [RolloutGroup(name, spec) for name, spec in context.spec.rollout.by_group.items()]


def rollout_template(context: JobContext, group: RolloutGroup) -> Manifest:
    """Return the pod template of a group; ``job`` adds the fields of one attempt."""
    engine = group.spec.engine
    environment: dict[str, Any] = {
        "PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT),
        **environment_variables(context),
    }
    if group.name:
        environment["PLAUDIT_ROLLOUT_GROUP"] = group.name
    fields: Manifest = {}
    if group.spans_pods:
        environment["PLAUDIT_REPLICA_RANK"] = {
            "fieldRef": {"fieldPath": f"metadata.annotations['{names.COMPLETION_INDEX}']"}
        }
        # A pod that ends well would complete its index: the others would wait for it, and the Job would not fail.
        environment["PLAUDIT_EXIT_WHEN_STOPPED"] = str(names.EXIT_STOPPED)
        fields = {"subdomain": names.role_object(context.name, ROLLOUT_ROLE)}
    process = RolePod(
        role=ROLLOUT_ROLE,
        image=context.settings.images.gpu if engine.kind == "vllm" else context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.rollout"],
        pod=group.spec.pod,
        environment=environment,
        ports={"health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        grace_s=60,
        gpus=group.spec.gpus_per_pod,
        restart_policy="Never" if group.spans_pods else "Always",
        pod_fields=fields,
        labels=group.labels,
    )
    return pod_template(context, process)


def rollout_manifests(context: JobContext, group: RolloutGroup, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment of a group; none for replicas of several pods."""
    if group.spans_pods:
        return []
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    name = names.rollout_object(context.name, group.name)
    return [deployment(context, name, ROLLOUT_ROLE, template_, inputs, strategy, **group.labels)]


def rollout_service(context: JobContext) -> list[Manifest]:
    """Return the Service that gives the pods of replicas DNS names, even before they are ready; none without them."""
    if not any(group.spans_pods for group in rollout_groups(context)):
        return []
    name = names.role_object(context.name, ROLLOUT_ROLE)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": context.labels(ROLLOUT_ROLE),
        "ports": [{"name": "replica", "port": names.REPLICA_PORT, "targetPort": names.REPLICA_PORT}],
    }
    return [context.manifest(SERVICE, context.metadata(name, ROLLOUT_ROLE), spec)]


def rollout_job(
    context: JobContext, group: RolloutGroup, frozen_template: Manifest, attempt: ReplicaAttempt, *, suspend: bool
) -> Manifest:
    """Return the Job of one attempt: it fails as soon as one of its pods ends."""
    name = names.rollout_job(context.name, group.name, attempt.replica, attempt.number)
    labels = {names.LABEL_REPLICA: str(attempt.replica), names.LABEL_ATTEMPT: str(attempt.number)}
    template_ = copy.deepcopy(frozen_template)
    template_["metadata"]["labels"] |= labels
    leader = f"{name}-0.{names.role_object(context.name, ROLLOUT_ROLE)}.{context.namespace}.svc"
    own = next(c for c in template_["spec"]["containers"] if c["name"] == ROLLOUT_ROLE)
    own["env"].append({"name": "PLAUDIT_REPLICA_LEADER", "value": leader})
    spec = {
        "completionMode": "Indexed",
        "completions": group.spec.pods_per_replica,
        "parallelism": group.spec.pods_per_replica,
        "backoffLimit": 0,
        "suspend": suspend,
        "template": template_,
    }
    metadata = context.metadata(name, ROLLOUT_ROLE, **group.labels, **labels)
    metadata["annotations"] = {names.SHORT_ATTEMPTS: str(attempt.short_attempts)}
    return context.manifest(JOB, metadata, spec)


TRAINER_ROLE = "trainer"

_LAST_UPDATE_WITHIN_S = 600

"""Time that the trainer has after SIGTERM to finish its update and write a checkpoint."""


def trainer_template(context: JobContext) -> Manifest:
    """Return the pod template of the trainer; ``job`` adds the fields of one attempt."""
    trainer = context.spec.trainer
    ranks_per_pod = min(trainer.ranks, trainer.ranks_per_pod)
    environment: dict[str, Any] = {
        "PLAUDIT_EXIT_WHEN_STOPPED": str(names.EXIT_STOPPED),
        **environment_variables(context),
    }
    if trainer.weights.transfer == "direct":
        environment["PLAUDIT_WEIGHTS_PORT"] = str(names.WEIGHTS_PORT)
    command = ["python3", "-m", "plaudit_workers.training"]
    if trainer.ranks > 1:
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.COMPLETION_INDEX}']"}}
        environment |= {
            "WORLD_SIZE": str(trainer.ranks),
            "MASTER_PORT": str(names.RENDEZVOUS_PORT),
            "NODE_RANK": index,
        }
        if ranks_per_pod == 1:
            environment |= {"RANK": index, "LOCAL_RANK": "0"}
        else:
            environment["LOCAL_WORLD_SIZE"] = str(ranks_per_pod)
            command = ["python3", "-m", "plaudit_workers.launch.ranks"]
    process = RolePod(
        role=TRAINER_ROLE,
        image=context.settings.images.gpu,
        command=command,
        pod=trainer.pod,
        environment=environment,
        grace_s=_LAST_UPDATE_WITHIN_S,
        gpus=ranks_per_pod,
        restart_policy="Never",
        pod_fields={"subdomain": names.role_object(context.name, TRAINER_ROLE)},
    )
    return pod_template(context, process)


def trainer_service(context: JobContext) -> Manifest:
    """Return the Service that gives the ranks' pods DNS names, even before they are ready."""
    name = names.role_object(context.name, TRAINER_ROLE)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": context.labels(TRAINER_ROLE),
        "ports": [{"name": "rendezvous", "port": names.RENDEZVOUS_PORT, "targetPort": names.RENDEZVOUS_PORT}],
    }
    return context.manifest(SERVICE, context.metadata(name, TRAINER_ROLE), spec)


def trainer_job(context: JobContext, frozen_template: Manifest, attempt: int, *, suspend: bool) -> Manifest:
    """Return the Job of one attempt."""
    name = names.trainer_job(context.name, attempt)
    template_ = copy.deepcopy(frozen_template)
    template_["metadata"]["labels"][names.LABEL_ATTEMPT] = str(attempt)
    if context.spec.trainer.ranks > 1:
        host = f"{name}-0.{names.role_object(context.name, TRAINER_ROLE)}.{context.namespace}.svc"
        own = next(c for c in template_["spec"]["containers"] if c["name"] == TRAINER_ROLE)
        own["env"].append({"name": "MASTER_ADDR", "value": host})
    spec = {
        "completionMode": "Indexed",
        "completions": context.spec.trainer.pods,
        "parallelism": context.spec.trainer.pods,
        "backoffLimit": 0,
        "suspend": suspend,
        "template": template_,
    }
    metadata = context.metadata(name, TRAINER_ROLE, **{names.LABEL_ATTEMPT: str(attempt)})
    return context.manifest(JOB, metadata, spec)
