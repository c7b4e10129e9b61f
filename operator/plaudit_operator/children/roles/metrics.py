"""The metrics service: one pod, read by Prometheus, people and the operator."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment, service
from plaudit_operator.children.pod import RolePod, http_probe, pod_template
from plaudit_workers.job.metrics_environment import metrics_environment

ROLE = "metrics"


def template(context: JobContext) -> Manifest:
    """Return the pod template of the metrics service."""
    process = RolePod(
        role=ROLE,
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


def manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of the metrics service."""
    name = names.role_object(context.name, ROLE)
    return [
        deployment(context, name, ROLE, template_, inputs, {"type": "Recreate"}),
        service(context, name, ROLE, {"metrics": names.METRICS_PORT}),
    ]


def address(name: str, namespace: str) -> str:
    """Return the URL of the service inside the cluster."""
    return f"http://{names.role_object(name, ROLE)}.{namespace}.svc:{names.METRICS_PORT}"
