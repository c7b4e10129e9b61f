"""Render an admitted job's children, and cache the result until its inputs change.

A job is reconciled many times while it starts, because each of its pods changes; its spec and frozen templates stay the
same. The result is a pure function of the cache key, so caching it only saves time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plaudit_operator import names
from plaudit_operator.admission.admission import RefusedJob, admit, digest
from plaudit_operator.admission.node_size import beyond_a_node
from plaudit_operator.admission.reward_service import admit_service, is_service
from plaudit_operator.admission.service_references import resolved, token_secrets
from plaudit_operator.children import job_config
from plaudit_operator.children.all import Templates, fixed_replicas, frozen_templates, gang_deployments, manifests
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, Observed
from plaudit_operator.policies.gang_admission import GangWait, awaited
from plaudit_operator.settings import Images, OperatorSettings

_KEPT = 64
"""Cached renderings, of a quarter of a megabyte each. Only starting or changing jobs are reconciled often."""


@dataclass(frozen=True)
class Rendering:
    """The desired objects of a job."""

    context: JobContext
    templates: Templates
    manifests: Sequence[Manifest]
    replicas: Mapping[str, int | None]
    """Replicas by Deployment while the job runs; None if an autoscaler sets them."""
    waits: GangWait = ""
    """The reason why the job has to wait before all of it may start; empty if it does not."""
    gang: frozenset[str] = frozenset()
    """Deployments in the job's gang, whose pods wait for each other."""

    @property
    def suspended(self) -> bool:
        """Return True if the job is to be suspended."""
        return self.context.spec.suspend

    def rests(self, deployment: str) -> bool:
        """Return True if a Deployment is to have no pods now. Metrics always has one; the gang waits with its pods."""
        if deployment == names.role_object(self.context.name, "metrics"):
            return False
        return self.suspended or (bool(self.waits) and deployment not in self.gang)


@dataclass(frozen=True)
class _Key:
    """The cache key: equal for jobs that render equally."""

    name: str
    namespace: str
    uid: str
    spec: str
    config: str
    files: str
    settings: OperatorSettings
    waits: GangWait
    services: tuple[tuple[str, str], ...]
    sources: tuple[Object, Object | None, Object | None] = field(compare=False)


def rendering(observed: Observed, settings: OperatorSettings) -> Rendering | RefusedJob:
    """Return the job's desired objects, or the reason why its spec is rejected."""
    config = observed.child("ConfigMap", names.job_config(observed.name))
    sources = (observed.job, config, observed.files)
    digests = (_version(config) or _data(config), _data(observed.files))
    spec = digest(observed.job["spec"])
    state = (spec, *digests, settings, awaited(observed), token_secrets(observed))
    return _render(_Key(observed.name, observed.namespace, observed.uid, *state, sources))


def _version(item: Object | None) -> str:
    return str(item["metadata"].get("resourceVersion", "")) if item else ""


def _data(item: Object | None) -> str:
    return digest(item.get("data")) if item else ""


@functools.lru_cache(maxsize=_KEPT)
def _render(key: _Key) -> Rendering | RefusedJob:
    admitted = (admit_service if is_service(key.sources[0]) else admit)(*key.sources)
    if not isinstance(admitted, RefusedJob):
        admitted = resolved(admitted, key.namespace, dict(key.services))
    if isinstance(admitted, RefusedJob):
        return admitted
    settings = replace(key.settings, images=Images(**admitted.images)) if admitted.images else key.settings
    context = JobContext(key.name, key.namespace, key.uid, admitted, settings)
    templates = frozen_templates(context)
    suspended = context.spec.suspend
    waits: GangWait = "" if suspended else key.waits
    children = [_marked(child) for child in manifests(context, templates, suspended=suspended, waits=bool(waits))]
    if not admitted.written and (refused := _refusal(context, children)):
        return refused
    gang = gang_deployments(context, templates)
    return Rendering(context, templates, children, fixed_replicas(context), waits, gang)


def _refusal(context: JobContext, children: Sequence[Manifest]) -> RefusedJob | None:
    """Return why a new job cannot run on this platform; a job that was admitted is never refused."""
    if problems := list(beyond_a_node(context.spec, context.platform)):
        return RefusedJob(Reason.INVALID, "; ".join(map(str, problems)))
    config = next(child for child in children if child["kind"] == "ConfigMap")
    problem = job_config.excess(context, config)
    return RefusedJob(Reason.FILES_INVALID, problem) if problem else None


def _marked(manifest: Manifest) -> Manifest:
    """Return a manifest with its digest as an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.MANIFEST: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
