"""Build the servers of each scorer whose model the job serves: a Deployment behind a headless Service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from plaudit_operator import names
from plaudit_operator.admission.admission import digest
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment, service
from plaudit_operator.children.pod import RolePod, http_probe, pod_template
from plaudit_workers.job.model_server_command import (
    HOST_VARIABLE,
    PORT_VARIABLE,
    SERVER_VARIABLE,
    server_command,
    server_environment,
)
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec

ROLE = "model"
_HOST = "0.0.0.0"  # noqa: S104


def template(context: JobContext, scorer: ScorerSpec) -> Manifest:
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
        role=ROLE,
        image=context.settings.images.gpu,
        command=["python3", *command],
        pod=model.pod,
        environment=environment,
        ports={"model": names.MODEL_PORT},
        probe=http_probe("/health", "model"),
        grace_s=30,
        gpus=1 if with_gpu else 0,
        joins_run=model.sleep_during_updates,
        labels=labels(context, scorer),
        extra_volumes=() if model.sleep_during_updates else _volume(context),
        extra_mounts=() if model.sleep_during_updates else _mount(context),
    )
    return pod_template(context, process)


def addresses(context: JobContext) -> dict[str, list[str]]:
    """Return the URLs of the servers by scorer; one headless name resolves to all of them."""
    return {
        scorer.name: [f"http://{object_name(context, scorer)}.{context.namespace}.svc:{names.MODEL_PORT}"]
        for scorer in context.spec.reward.model_scorers
    }


def object_name(context: JobContext, scorer: ScorerSpec) -> str:
    """Return the name of the Deployment and Service of one scorer's servers."""
    return names.model_object(context.name, generation(context, scorer) or scorer.name)


def labels(context: JobContext, scorer: ScorerSpec) -> dict[str, str]:
    """Return the labels that separate one scorer's servers from those of others, and from those of its last model."""
    own = generation(context, scorer)
    return {names.LABEL_SCORER: scorer.name} | ({names.LABEL_MODEL: own} if own else {})


def generation(context: JobContext, scorer: ScorerSpec) -> str:
    """Return the digest of a RewardService's model; empty for an RLJob, whose models never change.

    Servers of another model get a Deployment of their own: workers of the last revision need theirs until they end.
    """
    if not context.revision:
        return ""
    own = {k: v for k, v in written(context, scorer).items() if k != "replicas"}
    return digest({"scorer": scorer.name, **own})[:10]


def written(context: JobContext, scorer: ScorerSpec) -> Mapping[str, Any]:
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


def manifests(context: JobContext, scorer: ScorerSpec, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of one scorer's servers."""
    name, separate = object_name(context, scorer), labels(context, scorer)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return [
        deployment(context, name, ROLE, template_, inputs, strategy, **separate),
        service(context, name, ROLE, {"model": names.MODEL_PORT}, headless=True, **separate),
    ]
