"""Build the rollout workers: a Deployment for each group, or for replicas of several pods a Job for each replica.

The pods of a replica hold one copy of the model together. An Indexed Job gives them stable names, and fails as a whole
when one of them ends; ``policies/rollouts/replicas.py`` starts the next attempt. An update of a Deployment never runs
more pods than there are GPUs for.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment
from plaudit_operator.children.pod import RolePod, http_probe, pod_template
from plaudit_operator.children.roles import environments
from plaudit_operator.replica import ReplicaAttempt
from plaudit_operator.runtime.kinds import JOB, SERVICE
from plaudit_workers.job.spec.rollout import RolloutSpec

ROLE = "rollout"


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
        return f"{ROLE}/{self.name}" if self.name else ROLE

    @property
    def spans_pods(self) -> bool:
        """Return True if a replica has several pods."""
        return self.spec.pods_per_replica > 1

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that separate its objects from those of other groups."""
        return {names.LABEL_ROLLOUT_GROUP: self.name} if self.name else {}


def groups(context: JobContext) -> list[RolloutGroup]:
    """Return the groups of a job that trains."""
    return [RolloutGroup(name, spec) for name, spec in context.spec.rollout.by_group.items()]


def template(context: JobContext, group: RolloutGroup) -> Manifest:
    """Return the pod template of a group; ``job`` adds the fields of one attempt."""
    engine = group.spec.engine
    environment: dict[str, Any] = {
        "PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT),
        **environments.variables(context),
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
        fields = {"subdomain": names.role_object(context.name, ROLE)}
    process = RolePod(
        role=ROLE,
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


def manifests(context: JobContext, group: RolloutGroup, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment of a group; none for replicas of several pods."""
    if group.spans_pods:
        return []
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    name = names.rollout_object(context.name, group.name)
    return [deployment(context, name, ROLE, template_, inputs, strategy, **group.labels)]


def service(context: JobContext) -> list[Manifest]:
    """Return the Service that gives the pods of replicas DNS names, even before they are ready; none without them."""
    if not any(group.spans_pods for group in groups(context)):
        return []
    name = names.role_object(context.name, ROLE)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": context.labels(ROLE),
        "ports": [{"name": "replica", "port": names.REPLICA_PORT, "targetPort": names.REPLICA_PORT}],
    }
    return [context.manifest(SERVICE, context.metadata(name, ROLE), spec)]


def job(
    context: JobContext, group: RolloutGroup, frozen_template: Manifest, attempt: ReplicaAttempt, *, suspend: bool
) -> Manifest:
    """Return the Job of one attempt: it fails as soon as one of its pods ends."""
    name = names.rollout_job(context.name, group.name, attempt.replica, attempt.number)
    labels = {names.LABEL_REPLICA: str(attempt.replica), names.LABEL_ATTEMPT: str(attempt.number)}
    template_ = copy.deepcopy(frozen_template)
    template_["metadata"]["labels"] |= labels
    leader = f"{name}-0.{names.role_object(context.name, ROLE)}.{context.namespace}.svc"
    own = next(c for c in template_["spec"]["containers"] if c["name"] == ROLE)
    own["env"].append({"name": "PLAUDIT_REPLICA_LEADER", "value": leader})
    spec = {
        "completionMode": "Indexed",
        "completions": group.spec.pods_per_replica,
        "parallelism": group.spec.pods_per_replica,
        "backoffLimit": 0,
        "suspend": suspend,
        "template": template_,
    }
    metadata = context.metadata(name, ROLE, **group.labels, **labels)
    metadata["annotations"] = {names.SHORT_ATTEMPTS: str(attempt.short_attempts)}
    return context.manifest(JOB, metadata, spec)
