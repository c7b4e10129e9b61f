"""Build the Deployments, Services and disruption budgets of a job."""

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
    **labels: str,
) -> Manifest:
    """Return a Deployment without ``replicas``, which are set at creation and then through the scale subresource.

    Args:
        template: frozen pod template.
        inputs: digest of the part of the spec that the template is rendered from.
        **labels: separate its pods from others of the role.
    """
    metadata = context.metadata(name, role, **labels)
    metadata["annotations"] = {names.INPUTS: inputs}
    spec = {
        "selector": {"matchLabels": {**context.labels(role), **labels}},
        "revisionHistoryLimit": 2,
        "strategy": strategy,
        "template": template,
    }
    return context.manifest(DEPLOYMENT, metadata, spec)


def service(
    context: JobContext, name: str, role: str, ports: dict[str, int], *, headless: bool = False, **labels: str
) -> Manifest:
    """Return a Service that selects the pods of a role with these labels."""
    spec: Manifest = {
        "selector": {**context.labels(role), **labels},
        "ports": [{"name": key, "port": port, "targetPort": port} for key, port in ports.items()],
    }
    if headless:
        spec["clusterIP"] = "None"
    return context.manifest(SERVICE, context.metadata(name, role, **labels), spec)


def disruption_budget(context: JobContext, role: str) -> Manifest:
    """Return a budget that evicts one pod of a role at a time.

    Only for Deployments of two or more replicas: with one, it would block a drain.
    """
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": context.labels(role)}}
    name = names.role_object(context.name, role)
    return context.manifest(PDB, context.metadata(name, role), spec)
