"""One reward model per scorer of kind ``model``: a Deployment of servers behind a headless Service."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment, service
from plaudit_operator.children.pod import Process, http_probe, pod_template
from plaudit_workers.job.scorers import Scorer

ROLE = "model"

_COMMANDS = {
    "vllm": ["python3", "-m", "vllm.entrypoints.openai.api_server", "--runner", "pooling"],
    "plaudit": ["python3", "-m", "plaudit_reward.model_server"],
}


def served(context: JobContext) -> list[Scorer]:
    """The scorers whose models are served."""
    return [scorer for scorer in context.spec.reward.scorers if scorer.model is not None]


def template(context: JobContext, scorer: Scorer) -> Manifest:
    """Pod template of one scorer's servers."""
    assert scorer.model is not None
    images = context.settings.images
    arguments = ["--model", scorer.model.source, "--host", "0.0.0.0", "--port", str(names.MODEL_PORT)]  # noqa: S104
    process = Process(
        role=ROLE,
        image=images.gpu,
        command=_COMMANDS[scorer.model.engine] + arguments,
        pod=scorer.model.pod,
        ports={"model": names.MODEL_PORT},
        probe=http_probe("/health", "model"),
        grace_s=30,
        gpus=1,
        joins_run=False,
        labels={names.LABEL_SCORER: scorer.name},
        extra_volumes=_volume(context),
        extra_mounts=_mount(context),
    )
    return pod_template(context, process)


def _volume(context: JobContext) -> tuple[Manifest, ...]:
    claim = context.spec.storage.claim_name
    return ({"name": "run", "persistentVolumeClaim": {"claimName": claim}},) if claim else ()


def _mount(context: JobContext) -> tuple[Manifest, ...]:
    storage = context.spec.storage
    return ({"name": "run", "mountPath": storage.mount_path},) if storage.claim_name else ()


def manifests(context: JobContext, scorer: Scorer, template_: Manifest, inputs: str) -> list[Manifest]:
    """Deployment and Service."""
    name = names.model_object(context.name, scorer.name)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return [
        deployment(context, name, ROLE, template_, inputs, strategy, scorer=scorer.name),
        service(context, name, ROLE, {"model": names.MODEL_PORT}, headless=True, scorer=scorer.name),
    ]
