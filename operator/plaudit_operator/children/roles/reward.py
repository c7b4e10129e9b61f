"""Build the Deployment of the reward workers, which an autoscaler may scale."""

from __future__ import annotations

import json

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment
from plaudit_operator.children.pod import RolePod, http_probe, pod_template
from plaudit_operator.children.roles import environments, reward_model
from plaudit_workers.job.secrets import reward_secrets

ROLE = "reward"


def template(context: JobContext) -> Manifest:
    """Return the pod template of the reward workers."""
    process = RolePod(
        role=ROLE,
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
    environment = {"PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT), **environments.variables(context)}
    if context.revision:
        environment["PLAUDIT_SCORING_VERSION"] = context.revision
    servers = reward_model.addresses(context)
    return environment | ({"PLAUDIT_MODEL_SERVERS": json.dumps(servers)} if servers else {})


def manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment of the reward workers."""
    # The workers of a service's last revision score until those of the new one are ready.
    unavailable = 0 if context.revision else 1
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": unavailable}}
    name = names.role_object(context.name, ROLE)
    return [deployment(context, name, ROLE, template_, inputs, strategy)]
