"""Build the HTTP front of a job that only scores: Deployment, Service and the Secret with the first caller's token."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from plaudit_operator import names
from plaudit_operator.admission.admission import digest
from plaudit_operator.admission.service_references import FIRST_CALLER
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.deployment import deployment, service
from plaudit_operator.children.pod import SECRETS_FOLDER, RolePod, http_probe, pod_template
from plaudit_operator.runtime.kinds import SECRET
from plaudit_workers.job.spec.section import SecretKey

ROLE = "gateway"
TOKENS_FOLDER = f"{SECRETS_FOLDER}/{ROLE}"
_DIGITS = 10


def is_served(context: JobContext) -> bool:
    """Return True if the job has a gateway.

    A service that an operator without gateways has admitted keeps none: its Redis has no user for one.
    """
    templates = context.admitted.templates
    return not context.spec.trains and (not templates or ROLE in templates)


def template(context: JobContext) -> Manifest:
    """Return the pod template of the gateways."""
    own = context.spec.reward.gateway.token_secret
    secret_name = own or names.gateway_secret(context.name, context.uid)
    process = RolePod(
        role=ROLE,
        image=context.settings.images.worker,
        command=["python3", "-m", "plaudit_workers.gateway"],
        pod=context.spec.reward.gateway.pod,
        environment={
            "PLAUDIT_HEALTH_PORT": str(names.HEALTH_PORT),
            "PLAUDIT_GATEWAY_HOST": "0.0.0.0",  # noqa: S104
            "PLAUDIT_GATEWAY_PORT": str(names.GATEWAY_PORT),
            "PLAUDIT_GATEWAY_TOKENS": TOKENS_FOLDER,
        },
        ports={"http": names.GATEWAY_PORT, "health": names.HEALTH_PORT},
        probe=http_probe("/readyz", "health"),
        liveness=http_probe("/healthz", "health"),
        grace_s=30,
        labels={**context.uses_labels, **_settings_labels(context)},
        secrets=tuple(_canary_secrets(context)),
        # The whole Secret: each key that a person adds is a further caller.
        extra_volumes=({"name": "tokens", "secret": {"secretName": secret_name, "defaultMode": 0o440}},),
        extra_mounts=({"name": "tokens", "mountPath": TOKENS_FOLDER, "readOnly": True},),
    )
    return pod_template(context, process)


def settings(context: JobContext) -> dict[str, Any]:
    """Return the section as the user wrote it, without the number of gateways."""
    own = context.admitted.current["reward"].get("gateway") or {}
    return {name: value for name, value in own.items() if name != "replicas"}


def _settings_labels(context: JobContext) -> dict[str, str]:
    """Return a label that differs with the settings, which a gateway reads only once, at its start.

    Those of an RLJob never change. Those of a RewardService are no part of its revision, so its other pods stay.
    """
    own = settings(context)
    return {names.LABEL_GATEWAY_SETTINGS: digest(own)[:_DIGITS]} if context.revision and own else {}


def _canary_secrets(context: JobContext) -> Iterator[SecretKey]:
    canary = context.spec.reward.gateway.canary
    if canary is not None and canary.service.token_secret is not None:
        yield canary.service.token_secret


def manifests(context: JobContext, template_: Manifest, inputs: str) -> list[Manifest]:
    """Return the Deployment and Service of the gateways."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    name = names.role_object(context.name, ROLE)
    return [
        deployment(context, name, ROLE, template_, inputs, strategy),
        service(context, name, ROLE, {"http": names.GATEWAY_PORT}),
    ]


def makes_secret(context: JobContext) -> bool:
    """Return True if the operator makes the Secret with the callers' tokens."""
    return is_served(context) and not context.spec.reward.gateway.token_secret


def secret(context: JobContext) -> Manifest:
    """Return the Secret with the token of one caller, created once; a person may add keys for further callers."""
    metadata = context.metadata(names.gateway_secret(context.name, context.uid), ROLE)
    data = {FIRST_CALLER: secrets.token_urlsafe(32)}
    return context.manifest(SECRET, metadata, type="Opaque", stringData=data)


def address(context: JobContext) -> str:
    """Return the URL of the service inside the cluster."""
    return names.gateway_url(context.name, context.namespace)
