"""What a plan may ask for: plain data, carried out by ``apply.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Create:
    """Make an object that is not there. ``replicas``: of a Deployment, given only now."""

    manifest: Manifest
    replicas: int | None = None
    first: bool = False
    """Before everything else: what was frozen must be written before anything follows from it."""


@dataclass(frozen=True)
class Apply:
    """Bring an object of the job's own back to what it should be."""

    manifest: Manifest
    first: bool = False


@dataclass(frozen=True)
class Patch:
    """Change single fields of an object of the job's own."""

    kind: str
    name: str
    body: Manifest


@dataclass(frozen=True)
class Scale:
    """Set the number of pods."""

    kind: str
    name: str
    replicas: int


@dataclass(frozen=True)
class Delete:
    """Delete that very object; with ``grace_s`` 0 a pod goes without its node's consent."""

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
    """What to do now, what to report, when to look again even if nothing happens."""

    status: Manifest
    actions: list[Action] = field(default_factory=list)
    requeue_after_s: float | None = None
    delete_job: bool = False
    """Delete the RLJob itself: its time after the end is over."""
