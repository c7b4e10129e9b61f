"""Deployments, Services and disruption budgets of a job."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.runtime.kinds import DEPLOYMENT, PDB, SERVICE


def deployment(
    context: JobContext,
    name: str,
    role: str,
    template: Manifest,
    inputs: str,
    strategy: Manifest,
    **selector: str,
) -> Manifest:
    """A Deployment without ``replicas``: these are given when it is made, and then through its scale.

    Args:
        context: the job.
        name: of the Deployment.
        role: of its pods.
        template: of its pods, as frozen.
        inputs: digest of what the template follows from.
        strategy: of its updates.
        **selector: further labels that tell its pods from others of the role, underscores for the sign that they have.
    """
    extra = {names.LABEL_SCORER: selector["scorer"]} if "scorer" in selector else {}
    metadata = context.metadata(name, role, **extra)
    metadata["annotations"] = {names.INPUTS: inputs}
    spec = {
        "selector": {"matchLabels": {**context.labels(role), **extra}},
        "revisionHistoryLimit": 2,
        "strategy": strategy,
        "template": template,
    }
    return context.manifest(DEPLOYMENT, metadata, spec)


def service(
    context: JobContext, name: str, role: str, ports: dict[str, int], *, headless: bool = False, **selector: str
) -> Manifest:
    """A Service over the pods of a role."""
    extra = {names.LABEL_SCORER: selector["scorer"]} if "scorer" in selector else {}
    spec: Manifest = {
        "selector": {**context.labels(role), **extra},
        "ports": [{"name": key, "port": port, "targetPort": port} for key, port in ports.items()],
    }
    if headless:
        spec["clusterIP"] = "None"
    return context.manifest(SERVICE, context.metadata(name, role, **extra), spec)


def disruption_budget(context: JobContext, role: str) -> Manifest:
    """At most one pod of a role is evicted at a time. Only for Deployments of two or more: others hang a drain."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": context.labels(role)}}
    name = names.role_object(context.name, role)
    return context.manifest(PDB, context.metadata(name, role), spec)
