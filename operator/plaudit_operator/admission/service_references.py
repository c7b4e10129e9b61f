"""Resolve scorers and canaries that name a RewardService: to its address, and to the Secret with its token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from plaudit_operator import names
from plaudit_operator.admission.admission import Admitted, RefusedJob
from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed
from plaudit_workers.job.spec.rewards.reward import CanarySpec
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec, ServiceSpec
from plaudit_workers.job.spec.section import SecretKey

FIRST_CALLER = "client"
"""The caller whose token an operator makes, and jobs use."""


def referenced(job_object: Object) -> list[str]:
    """Return the names of the RewardServices that an object refers to: by its scorers, and as its canary."""
    reward = job_object["spec"].get("reward") or {}
    holders = [*(reward.get("scorers") or []), (reward.get("gateway") or {}).get("canary") or {}]
    found = ((holder.get("service") or {}).get("name") for holder in holders if isinstance(holder, Mapping))
    return list(dict.fromkeys(name for name in found if name))


def token_secrets(observed: Observed) -> tuple[tuple[str, str], ...]:
    """Return the name of the Secret with the tokens of each service that exists, by the service's name."""
    return tuple((name, token_secret(service)) for name, service in sorted(observed.services.items()))


def token_secret(service: Object) -> str:
    """Return the name of the Secret with the tokens of a service's callers."""
    metadata, gateway = service["metadata"], (service["spec"].get("reward") or {}).get("gateway") or {}
    return str(gateway.get("tokenSecret") or names.gateway_secret(metadata["name"], metadata["uid"]))


def resolved(admitted: Admitted, namespace: str, present: Mapping[str, str]) -> Admitted | RefusedJob:
    """Return the job with addresses in place of names.

    Args:
        present: Secrets of the services that exist now, by the service's name; those that were found at admission stay.
    """
    secrets: dict[str, str] = {}
    for name in referenced({"spec": admitted.current}):
        secret = admitted.services.get(name) or present.get(name)
        if secret is None:
            return RefusedJob(
                Reason.SERVICE_MISSING,
                f"service.name: there is no RewardService {name!r} in namespace {namespace!r}. Create it, or give url "
                "and tokenSecret of one elsewhere",
            )
        secrets[name] = secret
    if not secrets:
        return admitted
    job, reward = admitted.job, admitted.job.spec.reward
    scorers = [_with_address(scorer, namespace, secrets) for scorer in reward.scorers]
    canary = reward.gateway.canary
    gateway = reward.gateway.model_copy(update={"canary": canary and _with_address(canary, namespace, secrets)})
    reward = reward.model_copy(update={"scorers": scorers, "gateway": gateway})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"reward": reward})})
    return replace(admitted, job=job, services=secrets)


H = TypeVar("H", ScorerSpec, CanarySpec)


def _with_address(holder: H, namespace: str, secrets: Mapping[str, str]) -> H:
    """Return a section whose ``service`` has an address and a token in place of a name."""
    if holder.service is None or not holder.service.name:
        return holder
    name = holder.service.name
    token = holder.service.token_secret or SecretKey(name=secrets[name], key=FIRST_CALLER)
    service = ServiceSpec(url=names.gateway_url(name, namespace), token_secret=token)
    return holder.model_copy(update={"service": service})
