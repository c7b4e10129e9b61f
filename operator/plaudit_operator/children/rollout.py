"""Build the Deployment of the rollout workers; an update never runs more pods than there are GPUs for."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment
from plaudit_operator.children.pod import RolePod, http_probe, pod_template

ROLE = "rollout"


def template(context: JobContext) -> Manifest:
    """Return the pod template of the rollout workers."""
    rollout = context.spec.rollout
    gpus = rollout.engine.tensor_parallel_size if rollout.engine.kind == "vllm" else 0
    process = RolePod(
        role=ROLE,
        image=context.settings.images.gpu if rollout.engine.kind == "vllm" else context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.rollout"],
        pod=rollout.pod,
        environment={"PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT)},
        ports={"health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        grace_s=60,
        gpus=gpus,
    )
    return pod_template(context, process)


def manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment of the rollout workers."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    name = names.role_object(context.name, ROLE)
    return [deployment(context, name, ROLE, template_, inputs, strategy)]
