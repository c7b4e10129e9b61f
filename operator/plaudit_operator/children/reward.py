"""Reward workers: a Deployment that may follow the queue."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment
from plaudit_operator.children.pod import Process, http_probe, pod_template
from plaudit_workers.job.section import SecretKey

ROLE = "reward"


def template(context: JobContext) -> Manifest:
    """Pod template of the reward workers."""
    process = Process(
        role=ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.scoring"],
        pod=context.spec.reward.workers.pod,
        environment={"PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT)},
        ports={"health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=60,
        secrets=tuple(_secrets(context)),
    )
    return pod_template(context, process)


def _secrets(context: JobContext) -> list[SecretKey]:
    found = []
    for scorer in context.spec.reward.scorers:
        if scorer.judge and scorer.judge.api_key_secret:
            found.append(scorer.judge.api_key_secret)
        if scorer.limits and scorer.limits.shared and scorer.limits.shared.password_secret:
            found.append(scorer.limits.shared.password_secret)
    return found


def manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """The Deployment."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}
    name = names.role_object(context.name, ROLE)
    return [deployment(context, name, ROLE, template_, inputs, strategy)]
