"""The actions of a plan: plain data, carried out by ``planning/apply.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Create:
    """Create an object. ``replicas`` applies to Deployments, whose manifests omit it."""

    manifest: Manifest
    replicas: int | None = None
    first: bool = False
    """True to run before all other actions: frozen data is written before anything depends on it."""


@dataclass(frozen=True)
class Apply:
    """Restore an object of the job."""

    manifest: Manifest
    first: bool = False


@dataclass(frozen=True)
class Patch:
    """Change single fields of an object of the job."""

    kind: str
    name: str
    body: Manifest


@dataclass(frozen=True)
class Scale:
    """Set the number of pods."""

    kind: str
    name: str
    replicas: int
    deletion_costs: Mapping[str, int] = field(default_factory=dict)
    """Costs by pod, written before: a ReplicaSet first deletes the pods of lower cost."""


@dataclass(frozen=True)
class Delete:
    """Delete the object with this uid; ``grace_s`` 0 deletes a pod by force."""

    kind: str
    name: str
    uid: str
    grace_s: int | None = None


@dataclass(frozen=True)
class EmitEvent:
    """Emit an event on the RLJob."""

    kind: str
    reason: str
    message: str


Action = Create | Apply | Patch | Scale | Delete | EmitEvent


@dataclass(frozen=True)
class Plan:
    """The status to report, the actions to take now, and when to reconcile again even without an event."""

    status: Manifest
    actions: list[Action] = field(default_factory=list)
    requeue_after_s: float | None = None
    delete_job: bool = False
    """True to delete the RLJob itself, whose ``ttlSecondsAfterFinished`` has passed."""
