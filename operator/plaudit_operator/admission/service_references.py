"""Resolve the scorers that refer to a RewardService by name: to its address, and to the Secret with its token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plaudit_operator import names
from plaudit_operator.admission.admission import Admitted, Refused
from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.scorers import ScorerSpec, ServiceSpec
from plaudit_workers.job.spec.section import SecretKey

FIRST_CALLER = "client"
"""The caller whose token an operator makes, and jobs use."""


def referenced(job_object: Object) -> list[str]:
    """Return the names of the RewardServices that the scorers of an object refer to."""
    scorers = (job_object["spec"].get("reward") or {}).get("scorers") or []
    found = ((scorer.get("service") or {}).get("name") for scorer in scorers if isinstance(scorer, Mapping))
    return list(dict.fromkeys(name for name in found if name))


def token_secrets(observed: Observed) -> tuple[tuple[str, str], ...]:
    """Return the name of the Secret with the tokens of each service that exists, by the service's name."""
    return tuple((name, token_secret(service)) for name, service in sorted(observed.services.items()))


def token_secret(service: Object) -> str:
    """Return the name of the Secret with the tokens of a service's callers."""
    metadata, gateway = service["metadata"], (service["spec"].get("reward") or {}).get("gateway") or {}
    return str(gateway.get("tokenSecret") or names.gateway_secret(metadata["name"], metadata["uid"]))


def resolved(admitted: Admitted, namespace: str, present: Mapping[str, str]) -> Admitted | Refused:
    """Return the job with addresses in place of names.

    Args:
        admitted: the job.
        namespace: of the job and its services.
        present: Secrets of the services that exist now, by the service's name; those that were found at admission stay.
    """
    job, wanted = admitted.job, {}
    for scorer in job.spec.reward.scorers:
        if scorer.service is None or not scorer.service.name:
            continue
        name = scorer.service.name
        secret = admitted.services.get(name) or present.get(name)
        if secret is None:
            return Refused(
                Reason.SERVICE_MISSING,
                f"scorer {scorer.name}: service.name: there is no RewardService {name!r} in namespace {namespace!r}. "
                "Create it, or give url and tokenSecret of one elsewhere",
            )
        wanted[name] = secret
    if not wanted:
        return admitted
    scorers = [_resolved(scorer, namespace, wanted) for scorer in job.spec.reward.scorers]
    return replace(admitted, job=_with_scorers(job, scorers), services=wanted)


def _resolved(scorer: ScorerSpec, namespace: str, secrets: Mapping[str, str]) -> ScorerSpec:
    if scorer.service is None or not scorer.service.name:
        return scorer
    name = scorer.service.name
    token = scorer.service.token_secret or SecretKey(name=secrets[name], key=FIRST_CALLER)
    service = ServiceSpec(url=names.gateway_url(name, namespace), token_secret=token)
    return scorer.model_copy(update={"service": service})


def _with_scorers(job: RLJob, scorers: list[ScorerSpec]) -> RLJob:
    reward = job.spec.reward.model_copy(update={"scorers": scorers})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"reward": reward})})
