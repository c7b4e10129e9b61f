"""Admit a RewardService, and resolve the scorers and canaries that name one to its address and its token's Secret.

Each valid edit of a RewardService takes effect, and a change of its scoring begins a new revision. Its ConfigMap holds
the spec in effect, with the files that were read for it. An edit that cannot take effect is reported, and the service
keeps its revision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from plaudit_job.spec.reward_service import FIXED_SECTIONS
from plaudit_job.spec.rewards import CanarySpec, ScorerSpec, ServiceSpec
from plaudit_job.spec.section import SecretKey
from plaudit_operator import names
from plaudit_operator.admission import (
    Admitted,
    FrozenSpec,
    JobFile,
    RefusedJob,
    admitted_anew,
    as_admitted,
    digest,
    parsed,
    unreadable,
)
from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed
from plaudit_operator.runtime.kinds import REWARD_SERVICE

FIRST_CALLER = "client"
"""The caller whose token an operator makes, and jobs use."""
_DIGITS = 10


def is_service(job_object: Object) -> bool:
    """Return True for a RewardService, False for an RLJob."""
    return bool(job_object["kind"] == REWARD_SERVICE.kind)


def needs_files(observed: Observed) -> bool:
    """Return True if the ConfigMap of ``spec.files`` has to be read: at admission, and when a service has changed."""
    config = observed.child("ConfigMap", names.job_config(observed.name))
    if config is None or not is_service(observed.job):
        return config is None
    data = config.get("data") or {}
    return not unreadable(data) and bool(msgspec.json.decode(data["current.json"]) != observed.job["spec"])


def admit_service(service: Object, config: Object | None, files: Object | None) -> Admitted | RefusedJob:
    """Validate a service, or read it as it is in effect: ``config`` is its own ConfigMap, if it was admitted before.

    ``files``, the ConfigMap that ``spec.files`` names, is used only if the spec is not the one in effect.
    """
    data = (config or {}).get("data", {})
    if "spec.json" not in data:
        admitted = admitted_anew(service, files)
        return admitted if isinstance(admitted, RefusedJob) else _revised(admitted)
    accepted = msgspec.json.decode(data["current.json"])
    if service["spec"] == accepted:
        return _in_effect(service, data, accepted)
    edited = _edited(service, accepted, files)
    if isinstance(edited, RefusedJob):
        return without_edit(service, data, edited)
    edited = _revised(replace(edited, templates=msgspec.json.decode(data["templates.json"]), written=data))
    if edited.templates.get("reward", {}).get("inputs") != edited.revision:
        return edited
    kept = _in_effect(service, data, accepted)  # images change with the revision only
    return replace(edited, images=kept.images, platform=kept.platform)


def without_edit(service: Object, data: Mapping[str, str], refused: RefusedJob) -> Admitted:
    """Return the service as it is in effect, with the reason why its present edit is rejected."""
    kept = _in_effect(service, data, msgspec.json.decode(data["current.json"]))
    message = f"edit rejected, the service keeps revision {kept.revision}: {refused.message}"
    return replace(kept, reason=refused.reason, message=message)


def _in_effect(service: Object, data: Mapping[str, str], accepted: Mapping[str, Any]) -> Admitted:
    """Return the service as it was admitted, even if this version of the operator validates more strictly."""
    job, _ = parsed(service, accepted)
    return _revised(as_admitted(data, FrozenSpec(job, accepted, Reason.VALID, "valid and in effect")))


def _edited(service: Object, accepted: Mapping[str, Any], files: Object | None) -> Admitted | RefusedJob:
    if changed := ", ".join(changed_sections(service["spec"], accepted)):
        return RefusedJob(Reason.IMMUTABLE_CHANGED, f"{changed} cannot change while the service exists")
    return admitted_anew(service, files)


def changed_sections(spec: Mapping[str, Any], accepted: Mapping[str, Any]) -> list[str]:
    """Return the fixed sections of a service that differ, as written: ``spec.storage``."""
    return [f"spec.{name}" for name in FIXED_SECTIONS if (spec.get(name) or {}) != (accepted.get(name) or {})]


def _revised(admitted: Admitted) -> Admitted:
    return replace(admitted, kind=REWARD_SERVICE.kind, revision=_revision(admitted.current, admitted.files))


def _revision(spec: Mapping[str, Any], files: Sequence[JobFile]) -> str:
    """Return the digest of everything but the numbers of pods and who may reach them."""
    reward = {name: section for name, section in spec["reward"].items() if name not in ("gateway", "networkPolicy")}
    reward["workers"] = {k: v for k, v in (reward.get("workers") or {}).items() if k not in ("replicas", "autoscaling")}
    reward["scorers"] = [_without_scale(scorer) for scorer in reward["scorers"]]
    return digest({"reward": reward, "files": {file.path: file.digest for file in files}})[:_DIGITS]


def _without_scale(scorer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scorer without the number of its model's servers (``ScorerSpec.served``)."""
    if model := scorer.get("model"):
        return {**scorer, "model": _unscaled(model)}
    for section in ("judge", "python"):
        if serve := (scorer.get(section) or {}).get("serve"):
            return {**scorer, section: {**scorer[section], "serve": _unscaled(serve)}}
    return dict(scorer)


def _unscaled(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name != "replicas"}


def referenced(job_object: Object) -> list[str]:
    """Return the names of the RewardServices that an object refers to: by its scorers, and as its canary."""
    reward = job_object["spec"].get("reward") or {}
    holders = [*(reward.get("scorers") or []), (reward.get("gateway") or {}).get("canary") or {}]
    found = ((holder.get("service") or {}).get("name") for holder in holders if isinstance(holder, Mapping))
    return list(dict.fromkeys(name for name in found if name))


def token_secret(service: Object, run_uid: str) -> str:
    """Return the name of the Secret with the tokens of a service."""
    gateway = (service["spec"].get("reward") or {}).get("gateway") or {}
    return str(gateway.get("tokenSecret") or names.gateway_secret(service["metadata"]["name"], run_uid))


def resolved(admitted: Admitted, namespace: str, present: Mapping[str, str]) -> Admitted | RefusedJob:
    """Return the job with addresses in place of names.

    ``present`` has the Secrets of the services that exist now, by name. A service that was created again has another
    one; that of a service that is gone stays.
    """
    secrets: dict[str, str] = {}
    for name in referenced({"spec": admitted.current}):
        secret = present.get(name) or admitted.services.get(name)
        if secret is None:
            missing = f"service.name: there is no RewardService {name!r} in namespace {namespace!r}"
            remedy = "Create it, or give url and tokenSecret of one elsewhere"
            return RefusedJob(Reason.SERVICE_MISSING, f"{missing}. {remedy}")
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
