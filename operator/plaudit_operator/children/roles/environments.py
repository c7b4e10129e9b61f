"""Build the servers of ``spec.environments``: a Deployment and a Service each."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment, service
from plaudit_operator.children.pod import RolePod, http_probe, pod_template
from plaudit_workers.job.spec.environments import EnvironmentServerSpec

ROLE = "environment"
_CLIENT_KEPT_S = 86_400
"""Seconds without a connection after which a client may reach another server: Kubernetes' maximum."""


def template(context: JobContext, server: EnvironmentServerSpec) -> Manifest:
    """Return the pod template of one environment."""
    path = server.readiness.path
    process = RolePod(
        role=ROLE,
        image=server.image or context.settings.images.worker,
        command=list(server.command),
        pod=server.pod,
        environment={"PORT": str(server.port), "HOST": "0.0.0.0"},  # noqa: S104
        ports={"http": server.port},
        probe=http_probe(path, "http") if path else {"tcpSocket": {"port": "http"}},
        grace_s=30,
        joins_run=False,
        labels=labels(server),
    )
    template_ = pod_template(context, process)
    if not server.command:
        template_["spec"]["containers"][0].pop("command", None)  # the image's own
    return template_


def labels(server: EnvironmentServerSpec) -> dict[str, str]:
    """Return the labels that separate its pods from those of other environments."""
    return {names.LABEL_ENVIRONMENT: server.name}


def object_name(context: JobContext, server: EnvironmentServerSpec) -> str:
    """Return the name of its Deployment and Service."""
    return names.role_object(context.name, f"env-{server.name}")


def variables(context: JobContext) -> dict[str, str]:
    """Return the variables with the URLs, for the processes that run agents and scorers."""
    return {
        server.variable: f"http://{object_name(context, server)}.{context.namespace}.svc:{server.port}"
        for server in context.spec.environments
    }


def manifests(context: JobContext, server: EnvironmentServerSpec, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of one environment."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}}
    name, separate = object_name(context, server), labels(server)
    reached = service(context, name, ROLE, {"http": server.port}, headless=False, **separate)
    if server.session_affinity == "clientIP":
        kept = {"clientIP": {"timeoutSeconds": _CLIENT_KEPT_S}}
        reached["spec"] |= {"sessionAffinity": "ClientIP", "sessionAffinityConfig": kept}
    return [
        deployment(context, name, ROLE, template_, inputs, strategy, **separate),
        reached,
    ]
