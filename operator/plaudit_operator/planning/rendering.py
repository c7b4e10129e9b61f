"""A job as admitted, with its children rendered: worked out anew only when what it follows from has changed.

A job is looked at many times while it starts and each of its pods changes; the specification and what was frozen of it
stay the same. The result is a function of its key alone, so keeping it changes nothing but the time that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plaudit_operator import names
from plaudit_operator.admission.admission import Refused, admit, digest
from plaudit_operator.children.all import Templates, fixed_replicas, frozen_templates, manifests
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.observed import Object, Observed
from plaudit_operator.policies.gang_admission import Wait, awaited
from plaudit_operator.settings import Images, Settings

_KEPT = 64
"""A quarter of a megabyte each. Jobs that start or change are looked at again and again; one at rest is not."""


@dataclass(frozen=True)
class Rendering:
    """The objects that a job should consist of."""

    context: JobContext
    templates: Templates
    manifests: Sequence[Manifest]
    replicas: Mapping[str, int | None]
    """By Deployment, while the job runs; None: an autoscaler says."""
    waits: Wait = ""
    """For what the job waits before all of it may start."""

    @property
    def suspended(self) -> bool:
        """True if the job is to be suspended."""
        return self.context.spec.scheduling.suspend

    def rests(self, deployment: str) -> bool:
        """Return True if a Deployment is to have no pods now. Metrics always has one; rollouts wait with their gang."""
        name = self.context.name
        if deployment == names.role_object(name, "metrics"):
            return False
        return self.suspended or (bool(self.waits) and deployment != names.role_object(name, "rollout"))


@dataclass(frozen=True)
class _Key:
    """Equal for what renders equally."""

    name: str
    namespace: str
    uid: str
    spec: str
    config: str
    files: str
    settings: Settings
    waits: Wait
    sources: tuple[Object, Object | None, Object | None] = field(compare=False)


def rendering(observed: Observed, settings: Settings) -> Rendering | Refused:
    """The job with its children, or why it cannot run as written."""
    config = observed.child("ConfigMap", names.job_config(observed.name))
    sources = (observed.job, config, observed.files)
    digests = (_version(config) or _data(config), _data(observed.files))
    spec = digest(observed.job["spec"])
    return _render(
        _Key(observed.name, observed.namespace, observed.uid, spec, *digests, settings, awaited(observed), sources)
    )


def _version(item: Object | None) -> str:
    return str(item["metadata"].get("resourceVersion", "")) if item else ""


def _data(item: Object | None) -> str:
    return digest(item.get("data")) if item else ""


@functools.lru_cache(maxsize=_KEPT)
def _render(key: _Key) -> Rendering | Refused:
    admitted = admit(*key.sources)
    if isinstance(admitted, Refused):
        return admitted
    settings = replace(key.settings, images=Images(**admitted.images)) if admitted.images else key.settings
    context = JobContext(key.name, key.namespace, key.uid, admitted, settings)
    templates = frozen_templates(context)
    suspended = context.spec.scheduling.suspend
    waits: Wait = "" if suspended else key.waits
    children = manifests(context, templates, suspended=suspended, waits=bool(waits))
    return Rendering(context, templates, children, fixed_replicas(context), waits)
