"""Build one Indexed Job per attempt of the trainer, whose pods find each other through a headless Service.

A Job cannot restart a group of ranks (it would replace one while the others hang in collectives), so an attempt is
never repaired: if one pod fails, the Job fails, and ``policies/failure.py`` decides whether another attempt follows.
"""

from __future__ import annotations

import copy
from typing import Any

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.pod import RolePod, pod_template
from plaudit_operator.children.roles import environments
from plaudit_operator.runtime.kinds import JOB, SERVICE

ROLE = "trainer"

_LAST_UPDATE_WITHIN_S = 600
"""Time that the trainer has after SIGTERM to finish its update and write a checkpoint."""


def template(context: JobContext) -> Manifest:
    """Return the pod template of the trainer; ``job`` adds the fields of one attempt."""
    trainer = context.spec.trainer
    ranks_per_pod = min(trainer.ranks, trainer.ranks_per_pod)
    environment: dict[str, Any] = {
        "PLAUDIT_EXIT_WHEN_STOPPED": str(names.EXIT_STOPPED),
        **environments.variables(context),
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
        role=ROLE,
        image=context.settings.images.gpu,
        command=command,
        pod=trainer.pod,
        environment=environment,
        grace_s=_LAST_UPDATE_WITHIN_S,
        gpus=ranks_per_pod,
        restart_policy="Never",
        pod_fields={"subdomain": names.role_object(context.name, ROLE)},
    )
    return pod_template(context, process)


def service(context: JobContext) -> Manifest:
    """Return the Service that gives the ranks' pods DNS names, even before they are ready."""
    name = names.role_object(context.name, ROLE)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": context.labels(ROLE),
        "ports": [{"name": "rendezvous", "port": names.RENDEZVOUS_PORT, "targetPort": names.RENDEZVOUS_PORT}],
    }
    return context.manifest(SERVICE, context.metadata(name, ROLE), spec)


def job(context: JobContext, frozen_template: Manifest, attempt: int, *, suspend: bool) -> Manifest:
    """Return the Job of one attempt."""
    name = names.trainer_job(context.name, attempt)
    template_ = copy.deepcopy(frozen_template)
    template_["metadata"]["labels"][names.LABEL_ATTEMPT] = str(attempt)
    if context.spec.trainer.ranks > 1:
        host = f"{name}-0.{names.role_object(context.name, ROLE)}.{context.namespace}.svc"
        own = next(c for c in template_["spec"]["containers"] if c["name"] == ROLE)
        own["env"].append({"name": "MASTER_ADDR", "value": host})
    spec = {
        "completionMode": "Indexed",
        "completions": context.spec.trainer.pods,
        "parallelism": context.spec.trainer.pods,
        "backoffLimit": 0,
        "suspend": suspend,
        "template": template_,
    }
    metadata = context.metadata(name, ROLE, **{names.LABEL_ATTEMPT: str(attempt)})
    return context.manifest(JOB, metadata, spec)
