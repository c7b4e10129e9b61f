"""Build one reward model per scorer of kind ``model``: a Deployment of servers behind a headless Service."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment, service
from plaudit_operator.children.pod import RolePod, http_probe, pod_template
from plaudit_workers.job.spec.scorers import ScorerSpec
from plaudit_workers.launch.model_command import server_command, server_environment

ROLE = "model"


def served(context: JobContext) -> list[ScorerSpec]:
    """Return the scorers whose models the job serves."""
    return [scorer for scorer in context.spec.reward.scorers if scorer.model is not None]


def template(context: JobContext, scorer: ScorerSpec) -> Manifest:
    """Return the pod template of one scorer's servers."""
    assert scorer.model is not None
    with_gpu = scorer.model.pod.uses_gpus(context.platform.gpu_resource)
    command = server_command(scorer.model, scorer.name, "0.0.0.0", names.MODEL_PORT, with_gpu=with_gpu)  # noqa: S104
    process = RolePod(
        role=ROLE,
        image=context.settings.images.gpu,
        command=["python3", *command],
        pod=scorer.model.pod,
        environment=server_environment(scorer.model, with_gpu=with_gpu),
        ports={"model": names.MODEL_PORT},
        probe=http_probe("/health", "model"),
        grace_s=30,
        gpus=1 if with_gpu else 0,
        joins_run=False,
        labels={names.LABEL_SCORER: scorer.name},
        extra_volumes=_volume(context),
        extra_mounts=_mount(context),
    )
    return pod_template(context, process)


def addresses(context: JobContext) -> dict[str, list[str]]:
    """Return the URLs of the servers by scorer; one headless name resolves to all of them."""
    return {
        scorer.name: [
            f"http://{names.model_object(context.name, scorer.name)}.{context.namespace}.svc:{names.MODEL_PORT}"
        ]
        for scorer in served(context)
    }


def _volume(context: JobContext) -> tuple[Manifest, ...]:
    claim = context.spec.storage.claim_name
    return ({"name": "run", "persistentVolumeClaim": {"claimName": claim}},) if claim else ()


def _mount(context: JobContext) -> tuple[Manifest, ...]:
    storage = context.spec.storage
    return ({"name": "run", "mountPath": storage.mount_path},) if storage.claim_name else ()


def manifests(context: JobContext, scorer: ScorerSpec, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of one scorer's servers."""
    name = names.model_object(context.name, scorer.name)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return [
        deployment(context, name, ROLE, template_, inputs, strategy, scorer=scorer.name),
        service(context, name, ROLE, {"model": names.MODEL_PORT}, headless=True, scorer=scorer.name),
    ]
