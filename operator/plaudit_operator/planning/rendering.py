"""Render an admitted job's children, and cache the result until its inputs change.

A job is reconciled many times, because its pods and their progress change; its spec and frozen templates stay the same.
The result is a pure function of the cache key, so caching it only saves time: rendering takes three times as long as
the rest of a reconciliation that changes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import msgspec

from plaudit_operator import names
from plaudit_operator.admission import Admitted, RefusedJob, admit, digest, unreadable, with_data, without_data
from plaudit_operator.children import job_config, transport
from plaudit_operator.children.all import children, frozen_templates, gang_deployments, manifests
from plaudit_operator.children.context import JobContext, Manifest, Templates
from plaudit_operator.children.pod import Child, images_of
from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import Object, Observed, labels
from plaudit_operator.platform import beyond_a_node, platform_of
from plaudit_operator.pod_state import has_run, lacks_image
from plaudit_operator.policies import GangWait, awaited
from plaudit_operator.runtime.kinds import DEPLOYMENT
from plaudit_operator.runtime.threads import Latest
from plaudit_operator.services import admit_service, is_service, resolved, without_edit
from plaudit_operator.settings import Images, OperatorSettings

_EDITED = (
    "ConfigMap {0}-job, in which the operator keeps what it admitted, was edited and cannot be read: {1}. Put it back, "
    "or have it written anew, as by a new job: kubectl delete configmap {0}-job --namespace {2}"
)
_KEPT = 1024
"""Cached renderings, of about 70 kB each. Jobs that run are reconciled every ten seconds."""


@dataclass(frozen=True)
class Rendering:
    """Hold the desired objects of a job."""

    context: JobContext
    templates: Templates
    manifests: Sequence[Manifest]
    waits: GangWait = ""
    """The reason why the job has to wait before all of it may start; empty if it does not."""
    gang: frozenset[str] = frozenset()
    """Deployments in the job's gang, whose pods wait for each other."""

    @cached_property
    def children(self) -> Sequence[Child]:
        """Return the job's children."""
        return tuple(children(self.context))

    @cached_property
    def replicas(self) -> Mapping[str, int | None]:
        """Return the replicas by Deployment while the job runs; None if an autoscaler sets them."""
        return {child.owner: child.replicas for child in self.children if child.kind is DEPLOYMENT}

    @property
    def suspended(self) -> bool:
        """Return True if the job is to be suspended."""
        return self.context.spec.suspend

    def rests(self, deployment: str) -> bool:
        """Return True if a Deployment is to have no pods now. Metrics always has one; the gang waits with its pods."""
        if deployment == self.context.role_object("metrics"):
            return False
        return self.suspended or (bool(self.waits) and deployment not in self.gang)

    def created_with(self, name: str) -> int:
        """Return the number of pods with which a Deployment, or Redis, is created."""
        spec, count = self.context.spec, self.replicas.get(name, 1)
        if name == self.context.role_object(transport.ROLE):
            return transport.replicas(self.context)
        if self.rests(name):
            return 0
        scaling = spec.reward.workers.autoscaling
        # Start one at least, even if an autoscaler may scale to zero: it shows that the scorers load.
        return count if count is not None else max(1, scaling.min_replicas) if scaling else 1


@dataclass(frozen=True)
class _Key:
    """Hold the cache key: equal for jobs that render equally."""

    name: str
    namespace: str
    uid: str
    run_uid: str
    spec: str
    config: str
    files: str
    settings: OperatorSettings
    thawed: frozenset[str]
    served_revision: str
    waits: GangWait
    services: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Packed:
    """Hold a rendering in little memory: without what the job's ConfigMap holds, its manifests compressed."""

    rendering: Rendering
    """Without manifests and templates, and without the data of what was admitted."""
    manifests: bytes

    @classmethod
    def of(cls, rendering: Rendering) -> _Packed:
        """Pack a rendering."""
        context, templates = rendering.context, rendering.templates
        if templates == context.admitted.templates:
            templates = {}
        context = replace(context, admitted=without_data(context.admitted))
        packed = zlib.compress(msgspec.json.encode([templates, rendering.manifests]), level=1)
        return cls(replace(rendering, context=context, templates={}, manifests=()), packed)

    def unpacked(self, data: Mapping[str, str]) -> Rendering:
        """Return the rendering; ``data`` is that of the job's ConfigMap."""
        templates, children = msgspec.json.decode(zlib.decompress(self.manifests))
        context = self.rendering.context
        context = replace(context, admitted=with_data(context.admitted, data))
        templates = templates or context.admitted.templates
        return replace(self.rendering, context=context, templates=templates, manifests=children)


_kept: Latest[_Key, _Packed] = Latest(_KEPT)


def rendering(observed: Observed, settings: OperatorSettings) -> Rendering | RefusedJob:
    """Return the job's desired objects, or the reason why its spec is rejected."""
    config = observed.child("ConfigMap", names.job_config(observed.name))
    version = str(config["metadata"].get("resourceVersion", "")) if config else ""
    digests = (version, digest(observed.files.get("data")) if observed.files else "")
    spec = digest(observed.job["spec"])
    data: Mapping[str, str] = (config or {}).get("data") or {}
    state = (
        spec,
        *digests,
        settings,
        _thawed(observed, data, settings),
        _served(observed),
        awaited(observed),
        tuple(sorted(observed.services.items())),
    )
    key = _Key(observed.name, observed.namespace, observed.uid, observed.run_uid, *state)
    if (packed := _kept.get(key)) is not None:
        return packed.unpacked(data)
    rendered = _render(key, observed, config)
    if isinstance(rendered, Rendering) and _is_restored_by(data, rendered.context.admitted):
        _kept.put(key, _Packed.of(rendered))
    return rendered


def _is_restored_by(data: Mapping[str, str], admitted: Admitted) -> bool:
    """Return True if the ConfigMap holds the files and templates of what was admitted: not before it exists."""
    return bool(admitted.written) and with_data(without_data(admitted), data) == admitted


def _render(key: _Key, observed: Observed, config: Object | None) -> Rendering | RefusedJob:
    service, data = is_service(observed.job), (config or {}).get("data") or {}
    if data and (problem := unreadable(data)):
        return RefusedJob(Reason.INVALID, _EDITED.format(observed.name, problem, observed.namespace))
    admitted = (admit_service if service else admit)(observed.job, config, observed.files)
    if isinstance(admitted, RefusedJob):
        return admitted
    rendered = _rendered(key, admitted)
    if isinstance(rendered, RefusedJob) and service and admitted.written:
        return _rendered(key, without_edit(observed.job, admitted.written, rendered))
    return rendered


def _rendered(key: _Key, admitted: Admitted) -> Rendering | RefusedJob:
    found = resolved(admitted, key.namespace, dict(key.services))
    if isinstance(found, RefusedJob):
        return found
    admitted = _without_thawed(found, key)
    settings = replace(key.settings, images=Images(**admitted.images)) if admitted.images else key.settings
    context = JobContext(key.name, key.namespace, key.uid, key.run_uid, admitted, settings, key.served_revision)
    templates = frozen_templates(context)
    suspended = context.spec.suspend
    waits: GangWait = "" if suspended else key.waits
    objects = [_marked(child) for child in manifests(context, templates, suspended=suspended, waits=bool(waits))]
    edited = context.revision and admitted.written.get("current.json") != job_config.as_json(admitted.current)
    if (edited or not admitted.written) and (refused := _refusal(context, objects)):
        return refused
    gang = gang_deployments(context, templates)
    context = replace(context, admitted=replace(admitted, templates=templates))
    return Rendering(context, templates, objects, waits, gang)


def _thawed(observed: Observed, data: Mapping[str, str], settings: OperatorSettings) -> frozenset[str]:
    """Return the children whose templates are not to be kept, because none of their pods ever ran.

    As soon as a pod of the job ran, only those are left whose image cannot be pulled: a job does not mix two releases.
    A job that ran as a whole keeps all; a service lives on, and its images may vanish.
    """
    started, served = "startTime" in observed.status, _served(observed)
    if "images.json" not in data or (started and not is_service(observed.job)):
        return frozenset()
    other_images = data["images.json"] != job_config.as_json(asdict(settings.images))
    platform = platform_of(settings.job_defaults, observed.namespace)
    if (not other_images and data.get("platform.json") in (None, job_config.as_json(platform))) or unreadable(data):
        return frozenset()
    templates = msgspec.json.decode(data["templates.json"])
    own = {child: _pods_of(frozen["template"], observed.pods) for child, frozen in templates.items()}
    if not started and not any(has_run(pod) for pods in own.values() for pod in pods):
        return frozenset(templates)
    lacking = {child for child, pods in own.items() if any(map(lacks_image, pods)) and not any(map(has_run, pods))}
    return frozenset(lacking - set(names.REVISED_ROLES) if served else lacking)


def _served(observed: Observed) -> str:
    """Return the revision of a service that is rolled out; empty if none is."""
    rolled_out = observed.condition(ConditionType.ROLLED_OUT).get("status") == "True"
    return str(observed.status.get("revision", "")) if rolled_out else ""


def _pods_of(template: Manifest, pods: Sequence[Object]) -> list[Object]:
    own = template["metadata"]["labels"].items()
    return [pod for pod in pods if own <= labels(pod).items()]


def _without_thawed(admitted: Admitted, key: _Key) -> Admitted:
    """Return what was admitted with templates that have to be rendered anew, and with the images for them."""
    if not key.thawed or not admitted.images:
        return admitted
    kept = {child: frozen for child, frozen in admitted.templates.items() if child not in key.thawed}
    used = {image for frozen in kept.values() for image in images_of(frozen["template"])}
    images = {
        name: admitted.images.get(name, image) if admitted.images.get(name) in used else image
        for name, image in asdict(key.settings.images).items()
    }
    thawed = {child: {**admitted.templates[child], "inputs": ""} for child in key.thawed}
    platform = admitted.platform if kept else None
    return replace(admitted, templates={**kept, **thawed}, images=images, platform=platform)


def _refusal(context: JobContext, children: Sequence[Manifest]) -> RefusedJob | None:
    """Return why a new job, or an edit of a service, cannot run here; what was admitted is never refused."""
    if problems := list(beyond_a_node(context.spec, context.platform)):
        return RefusedJob(Reason.INVALID, "; ".join(map(str, problems)))
    if context.spec.has_broker and not context.settings.sandboxes_role:
        return RefusedJob(
            Reason.INVALID,
            f"spec.sandboxes.provider: is {context.spec.sandboxes.provider}, but this operator may not let a job make "
            "pods. Set the chart's value sandboxes.pods to true, or provider to process",
        )
    config = next(child for child in children if child["kind"] == "ConfigMap")
    problem = job_config.excess(context, config)
    return RefusedJob(Reason.FILES_INVALID, problem) if problem else None


def _marked(manifest: Manifest) -> Manifest:
    """Return a manifest with its digest as an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.MANIFEST: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
