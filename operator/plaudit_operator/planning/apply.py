"""Carry out a plan: frozen objects first, the rest in parallel."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from plaudit_operator.actions import Action, Apply, Create, Delete, Manifest, Patch, Scale, follows_a_pod
from plaudit_operator.admission import digest
from plaudit_operator.names import DELETION_COST, LABEL_JOB
from plaudit_operator.observed import (
    AWAITS_FINALIZER,
    NO_SUCH_KIND,
    OF_EARLIER_JOB,
    Object,
    Observed,
    delete_command,
    labels,
    owner_uid,
)
from plaudit_operator.planning.plan import differs
from plaudit_operator.pod_state import held_by, is_leaving
from plaudit_operator.runtime.kinds import POD, kind_of
from plaudit_operator.runtime.kube import (
    AlreadyExistsError,
    ApiServer,
    ConflictError,
    InvalidError,
    KubeError,
    NotFoundError,
)
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
ChildKey = tuple[str, str]
_OVERRULED_FOR_S = 600.0
_UNREAD = ("Secret", "RoleBinding")
"""Kinds that are named by the job's uid, and that the operator may create only."""


@dataclass
class ApplyResults:
    """Hold the results of a plan's actions."""

    refusals: dict[ChildKey, str] = field(default_factory=dict)
    """Why an object cannot be written, by kind and name. A retry does not help."""
    failures: list[KubeError] = field(default_factory=list)
    """Errors for which a retry helps."""
    failed: dict[ChildKey, str] = field(default_factory=dict)
    """Their messages, by kind and name, without conflicts: these only show that the cache is behind."""
    applied: list[tuple[Manifest, Object]] = field(default_factory=list)
    """Manifests that were applied, each with the object that the API server made of it."""
    calls: int = 0


class Overruled:
    """Remember the objects that an admission webhook changes with each write, which are not written again for a while.

    A policy may rewrite images to a mirror, for example. The operator would restore them at each look, in vain.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Any, float]] = {}

    def learn(self, applied: Sequence[tuple[Manifest, Object]], now: float) -> None:
        """Remember what the API server made of manifests, where it is not what they say."""
        changed = [(manifest, made) for manifest, made in applied if differs(manifest, made)]
        if not changed:
            return
        self._known = {uid: known for uid, known in self._known.items() if known[2] > now}
        for manifest, made in changed:
            uid = made["metadata"]["uid"]
            if uid not in self._known:
                logger.info("an admission webhook changes it", kind=manifest["kind"], name=manifest["metadata"]["name"])
            self._known[uid] = (digest(manifest), _version(made), now + _OVERRULED_FOR_S)

    def holds(self, action: Action, observed: Observed, now: float) -> bool:
        """Return True if an action would write again what was changed, and nothing has changed since."""
        if not isinstance(action, Apply):
            return False
        present = observed.children.get(_key(action))
        if present is None or (known := self._known.get(present["metadata"]["uid"])) is None:
            return False
        return known[2] > now and known[:2] == (digest(action.manifest), _version(present))


def _version(item: Object) -> Any:
    """Return what changes with an object but not with its status; not all kinds have a generation."""
    metadata = item["metadata"]
    version = metadata.get("generation") or metadata["resourceVersion"]
    return version, metadata.get("labels"), metadata.get("ownerReferences")


class AwaitedError(KubeError):
    """An object of an earlier job of the same name exists until garbage collection deletes it."""


def carry_out(
    kube: ApiServer, pool: Executor, observed: Observed, actions: Sequence[Action], of_others: Sequence[Delete] = ()
) -> ApplyResults:
    """Carry out actions. A failure does not stop the others, unless it is of an action with ``first``.

    ``of_others``, the deletions of pods of earlier jobs, depend on nothing.
    """
    outcome = ApplyResults()
    for deletion in of_others:
        _note(outcome, deletion, _try(kube, observed, deletion, outcome))
    failed_before = len(outcome.failures)
    first = [action for action in actions if isinstance(action, Create | Apply) and action.first]
    rest = [action for action in actions if action not in first]
    for urgent in first:
        _note(outcome, urgent, _try(kube, observed, urgent, outcome))
        if len(outcome.failures) > failed_before:
            break  # the others would only wait for the same answer
    if outcome.refusals or len(outcome.failures) > failed_before:
        if not outcome.refusals and any(isinstance(action, Create) for action in rest):  # they do not exist yet
            outcome.failed[_key(urgent)] = str(outcome.failures[-1])
        return outcome
    results = pool.map(lambda action: _try(kube, observed, action, outcome), rest)
    for action, error in zip(rest, results, strict=True):
        _note(outcome, action, error)
    return outcome


def _note(outcome: ApplyResults, action: Action, error: KubeError | None) -> None:
    outcome.calls += 1
    if error is None:
        return
    key = _key(action)
    if isinstance(error, InvalidError | AlreadyExistsError):
        outcome.refusals[key] = str(error)
    elif isinstance(action, Create) and isinstance(error, NotFoundError):
        outcome.refusals[key] = f"{NO_SUCH_KIND} {key[0]}: {error}"
    else:
        outcome.failures.append(error)
        if isinstance(action, Create) or not isinstance(error, ConflictError):
            outcome.failed[key] = str(error)


def _key(action: Action) -> ChildKey:
    match action:
        case Create() | Apply():
            return action.manifest["kind"], action.manifest["metadata"]["name"]
        case Patch() | Scale() | Delete():
            return action.kind, action.name


def _try(kube: ApiServer, observed: Observed, action: Action, outcome: ApplyResults) -> KubeError | None:
    namespace = observed.namespace
    try:
        match action:
            case Create():
                _create(kube, observed, action)
            case Apply():
                outcome.applied.append((action.manifest, kube.apply(action.manifest)))
            case Patch():
                _patch(kube, namespace, action)
            case Scale():
                for pod, cost in action.deletion_costs.items():
                    _set_deletion_cost(kube, observed, pod, cost)
                kube.scale(kind_of(action.kind), namespace, action.name, action.replicas)
            case Delete():
                kube.delete(kind_of(action.kind), namespace, action.name, action.uid, action.grace_s)
    except KubeError as error:
        return error
    return None


def _patch(kube: ApiServer, namespace: str, action: Patch) -> None:
    try:
        kube.patch(kind_of(action.kind), namespace, action.name, action.body)
    except NotFoundError:
        if action.is_there:
            raise


def _create(kube: ApiServer, observed: Observed, action: Create) -> None:
    manifest = action.manifest
    if action.replicas is not None:
        manifest = copy.copy(manifest) | {"spec": {**manifest["spec"], "replicas": action.replicas}}
    try:
        made = kube.create(manifest)
        present: Object = {"metadata": made}
    except AlreadyExistsError:
        if manifest["kind"] in _UNREAD:
            return
        present = _own(kube, observed, manifest)
    if manifest["kind"] not in _UNREAD:
        _label(kube, manifest, present)


def _label(kube: ApiServer, manifest: dict[str, Any], present: Object) -> None:
    """Put back the labels by which the operator sees an object of its own."""
    wanted, metadata = labels(manifest), present["metadata"]
    if wanted.items() <= labels(present).items() or is_leaving(present):
        return
    kind, namespace, name = kind_of(manifest["kind"]), metadata["namespace"], metadata["name"]
    kube.patch(kind, namespace, name, {"metadata": {"uid": metadata["uid"], "labels": dict(wanted)}})
    if not wanted.items() <= labels(kube.get(kind, namespace, name)).items():
        raise InvalidError("an admission webhook or policy takes away its labels, by which the operator finds it", 403)


def _own(kube: ApiServer, observed: Observed, manifest: dict[str, Any]) -> Object:
    """Return the object of this name if it belongs to the job, and the cache merely does not show it."""
    kind, name = kind_of(manifest["kind"]), manifest["metadata"]["name"]
    try:
        present = kube.get(kind, observed.namespace, name)
    except NotFoundError as error:
        raise ConflictError(f"{kind.kind} {name} was there and is gone: {error}", 409) from error
    if owner_uid(present) == observed.uid:
        return present
    owners = present["metadata"].get("ownerReferences") or []
    of_earlier_job = any(owner["kind"] == observed.job["kind"] and owner["name"] == observed.name for owner in owners)
    follows = not owner_uid(present) and labels(present).get(LABEL_JOB) == observed.name and follows_a_pod(present)
    if of_earlier_job or follows:
        held = f". It {AWAITS_FINALIZER} {found}" if (found := held_by(present)) else ""
        raise AwaitedError(f"it is {OF_EARLIER_JOB}; the job goes on once Kubernetes has deleted it{held}")
    owner = next((f"{each['kind']} {each['name']}" for each in owners if each.get("controller")), "")
    command = delete_command(observed.namespace, [(kind.kind, name)])
    remedy = f"it belongs to {owner}: rename the job" if owner else f"rename the job or delete that object: {command}"
    raise AlreadyExistsError(f"a {kind.kind} named {name} exists and is not this job's; {remedy}")


def _set_deletion_cost(kube: ApiServer, observed: Observed, pod: str, cost: int) -> None:
    """Write the cost of a pod; without it, the scaling costs more work than necessary but is still right."""
    try:
        kube.patch(POD, observed.namespace, pod, {"metadata": {"annotations": {DELETION_COST: str(cost)}}})
    except NotFoundError:
        return
    except KubeError as error:
        logger.warning("deletion cost not written", namespace=observed.namespace, pod=pod, error=str(error))
