"""Admit an RLJob: validate it once, freeze it with its files, and then accept changes of mutable fields only.

The job's ConfigMap holds what is frozen: ``job.yaml`` (for its processes), ``spec.json`` (the spec as admitted),
``current.json`` (the same with accepted edits), the job's files, and of the operator that admitted it
``templates.json`` (pod templates), ``mutable-fields.json`` (fields that may change), ``images.json`` and
``platform.json`` (defaults for pods).

The operator that admitted a job may be of another version. So whatever was admitted stays accepted, even if this
version validates more strictly: only problems that an edit introduces reject it. Combinations of fields that do not
work on Kubernetes are rejected, never ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel

from plaudit_job.checks import kubernetes_problems, source_problem
from plaudit_job.fields import section_of
from plaudit_job.load import parse_job
from plaudit_job.problem import JobError, Problem
from plaudit_job.spec.rljob import RLJob, Spec
from plaudit_job.spec.section import Mutable, written_fields
from plaudit_operator.names import Reason
from plaudit_operator.observed import annotations_of
from plaudit_operator.platform import Platform

Object = Mapping[str, Any]
S = TypeVar("S", bound=BaseModel)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_ABSENT = object()
_KEEPS = "edit rejected, the job keeps its old spec"


@dataclass(frozen=True)
class JobFile:
    """Hold a file that travels with the job."""

    key: str
    """Key in the job's ConfigMap."""
    path: str
    """Relative path beside ``job.yaml``."""
    content: str = dataclasses.field(repr=False)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file's content, in hex."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Admitted:
    """Hold the job that runs."""

    job: RLJob
    spec: Mapping[str, Any]
    """The spec as first admitted, as the user wrote it."""
    current: Mapping[str, Any]
    """The same with the edits that were accepted since."""
    files: tuple[JobFile, ...]
    templates: Mapping[str, Any]
    """Frozen pod templates by child: ``{"inputs": digest, "template": …}``; empty before the first reconcile."""
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The operator's images when the job was admitted, by field of ``Images``; empty before the first reconcile."""
    platform: Platform | None = None
    """Defaults for its pods when the job was admitted; None before the first reconcile."""
    written: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Object of the job's ConfigMap; empty before the first reconcile."""
    kind: str = "RLJob"
    """Kind of the object."""
    revision: str = ""
    """Revision of a RewardService's scoring; empty for an RLJob, whose scoring never changes."""
    services: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Secrets with the tokens of the RewardServices that its scorers refer to, by the service's name."""
    reason: str = Reason.VALID
    message: str = "valid and in effect"
    """A reason other than ``Valid`` means that the edit was rejected and the running job keeps its old spec."""


@dataclass(frozen=True)
class RefusedJob:
    """Report that the job cannot run as written."""

    reason: str
    message: str


def admit(job_object: Object, config: Object | None, files: Object | None) -> Admitted | RefusedJob:
    """Validate a job with the ConfigMap of its files (None if missing), or read it as frozen in its own ConfigMap."""
    if config is not None and "spec.json" in config.get("data", {}):
        data = config["data"]
        admitted, accepted = (msgspec.json.decode(data[name]) for name in ("spec.json", "current.json"))
        return as_admitted(data, spec_in_effect(job_object, admitted, accepted))
    return admitted_anew(job_object, files)


def unreadable(data: Mapping[str, str]) -> str:
    """Return what is wrong with the data of a job's own ConfigMap, which somebody edited; empty if it can be read."""
    for key in ("spec.json", "current.json", "templates.json", "files.json"):
        if key not in data:
            return f"{key} is missing"
    for key, text in data.items():
        if key.endswith(".json") or key == "job.yaml":
            kind = list if key in ("files.json", "mutable-fields.json") else dict
            try:
                msgspec.json.decode(text, type=kind)
            except msgspec.DecodeError as error:
                return f"{key}: {error}"
    return ""


def admitted_anew(job_object: Object, files: Object | None) -> Admitted | RefusedJob:
    """Validate an object whose spec is not in effect yet, and read its files."""
    job, problems = parsed(job_object, job_object["spec"])
    problems = problems or [*kubernetes_problems(job), *_unsupported(job)]
    if problems:
        return RefusedJob(Reason.INVALID, "; ".join(map(str, problems)))
    found = _files(job, files)
    if isinstance(found, RefusedJob):
        return found
    if problems := list(_code_problems(job, found)):
        return RefusedJob(Reason.FILES_INVALID, "; ".join(map(str, problems)))
    return Admitted(job, dict(job_object["spec"]), dict(job_object["spec"]), found, {})


def as_admitted(data: Mapping[str, str], spec: FrozenSpec) -> Admitted:
    """Read what was admitted from the data of its ConfigMap and the spec in effect."""
    admitted = Admitted(
        job=spec.job,
        spec=msgspec.json.decode(data["spec.json"]),
        current=spec.written,
        files=(),
        templates={},
        images=msgspec.json.decode(data.get("images.json", "{}")),
        platform=msgspec.json.decode(data["platform.json"], type=Platform) if "platform.json" in data else None,
        services=msgspec.json.decode(data.get("services.json", "{}")),
        reason=spec.reason,
        message=spec.message,
    )
    return with_data(admitted, data)


def without_data(admitted: Admitted) -> Admitted:
    """Return what was admitted without the large parts, which ``with_data`` reads from its ConfigMap again."""
    return replace(admitted, files=(), templates={}, written={})


def with_data(admitted: Admitted, data: Mapping[str, str]) -> Admitted:
    """Return what was admitted with the files and templates that its ConfigMap's data holds."""
    files = (JobFile(f["key"], f["path"], data.get(f["key"], "")) for f in msgspec.json.decode(data["files.json"]))
    return replace(admitted, files=tuple(files), templates=msgspec.json.decode(data["templates.json"]), written=data)


def _files(job: RLJob, source: Object | None) -> tuple[JobFile, ...] | RefusedJob:
    wanted = job.spec.files
    if not wanted.config_map:
        return ()
    if source is None:
        message = f"spec.files.configMap: ConfigMap {wanted.config_map!r} does not exist in this namespace. Create it"
        return RefusedJob(Reason.FILES_MISSING, message)
    data: Mapping[str, str] = source.get("data") or {}
    binary = source.get("binaryData") or {}
    items = [(item.key, item.path) for item in wanted.items] or [(key, key) for key in sorted({*data, *binary})]
    if found := [key for key, _ in items if key in binary]:
        message = (
            f"spec.files: {', '.join(found)} of ConfigMap {wanted.config_map!r} is binary; a job carries text only"
        )
        remedy = "Put it on the shared volume and give its absolute path, and list the other keys in spec.files.items"
        return RefusedJob(Reason.FILES_INVALID, f"{message}. {remedy}")
    if missing := [key for key, _ in items if key not in data]:
        message = f"spec.files: ConfigMap {wanted.config_map!r} has no key {', '.join(missing)}. Add it"
        return RefusedJob(Reason.FILES_MISSING, message)
    return tuple(JobFile(f"file-{i}", path, data[key]) for i, (key, path) in enumerate(items))


def _code_problems(job: RLJob, files: tuple[JobFile, ...]) -> Iterator[Problem]:
    """Yield problems of reward code that travels with the job, before any pod starts."""
    sources = {file.path: file.content.encode() for file in files}
    reward = job.spec.reward
    named = [
        (f"spec.reward.scorers[{index}].python", scorer.python.path, scorer.python.function)
        for index, scorer in enumerate(reward.scorers)
        if scorer.python is not None
    ]
    named.append(("spec.reward.combine", reward.combine.path, reward.combine.function))
    for field_, path, function in named:
        if path in sources and (problem := source_problem(field_, path, sources[path], function, "function")):
            yield problem


class FrozenSpec(NamedTuple):
    """Hold the spec in effect."""

    job: RLJob
    written: Object
    """As the user wrote it: the admitted spec with the accepted edits."""
    reason: str
    message: str


def spec_in_effect(job_object: Object, admitted: Object, accepted: Object) -> FrozenSpec:
    """Return the spec that a running job follows: as ``admitted``, with the present edits of its mutable fields.

    Invalid edits leave it as it is ``accepted``, with the edits so far.
    """
    edited, kept = overlaid(admitted, job_object["spec"]), overlaid(admitted, accepted)
    job, problems = parsed(job_object, edited)
    if problems:
        old_job, old_problems = parsed(job_object, kept)
        known = {(problem.field, problem.message) for problem in old_problems}
        introduced = [problem for problem in problems if (problem.field, problem.message) not in known]
        if introduced:
            message = f"{_KEEPS}: {'; '.join(map(str, introduced))}"
            return FrozenSpec(old_job, kept, Reason.INVALID, message)
    if changed := frozen_changes(admitted, job_object["spec"]):
        message = f"{_KEEPS}: {', '.join(changed)} cannot change while the job exists"
        return FrozenSpec(job, edited, Reason.IMMUTABLE_CHANGED, message)
    return FrozenSpec(job, edited, Reason.VALID, "valid and in effect")


def parsed(job_object: Object, spec: Object) -> tuple[RLJob, list[Problem]]:
    """Return the job with another ``spec``, and its problems; with problems the job is not validated."""
    metadata = {key: job_object["metadata"][key] for key in ("name", "namespace")}
    written = {**{key: job_object[key] for key in ("apiVersion", "kind")}, "metadata": metadata, "spec": spec}
    return _validated(msgspec.json.encode(written))


# A new job is looked at before and after its ConfigMap exists, among as many others as are created with it.
@functools.lru_cache(maxsize=1024)
def _validated(document: bytes) -> tuple[RLJob, list[Problem]]:
    written = msgspec.json.decode(document)
    try:
        return parse_job(written), []
    except JobError as error:
        return _unchecked(RLJob, written), list(error.problems)


def _unchecked(section: type[S], data: Object) -> S:
    """Build a section from plain data, with today's defaults and without validation."""
    values = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if key in data:
            inner = section_of(field.annotation)
            values[name] = _unchecked_value(inner, data[key]) if inner else data[key]
    return section.model_construct(**values)


def _unchecked_value(section: type[BaseModel], value: Any) -> Any:
    if isinstance(value, list):
        return [_unchecked_value(section, item) for item in value]
    return _unchecked(section, value) if isinstance(value, Mapping) else value


def _unsupported(job: RLJob) -> Iterator[Problem]:
    """Yield a problem for each field that cannot work on Kubernetes."""
    scaling, tls = job.spec.reward.workers.autoscaling, job.spec.transport.tls
    if tls is None or scaling is None or scaling.provider != "keda":
        return
    also = ("spec.reward.workers.autoscaling",)
    for name, file in (("caFile", tls.ca_file), ("certificateFile", tls.certificate_file)):
        if file:
            problem = "is a file in the pods, which KEDA cannot read, and KEDA connects to Redis too"
            remedy = f"Give a key of a Secret in {name.removesuffix('File')}Secret"
            yield Problem(f"spec.transport.tls.{name}", problem, remedy, also=also)
    if not tls.check_server_name:
        problem = "is false, but KEDA connects to Redis too and always checks the name"
        remedy = "Use a name in url that the certificate was issued for, or autoscaling by hpa"
        yield Problem("spec.transport.tls.checkServerName", problem, remedy, also=also)


def overlaid(admitted: Object, current: Object) -> dict[str, Any]:
    """Return the ``spec`` that was admitted, with the mutable fields of the ``spec`` as it is now."""
    if _whole(admitted) and "rollout" in admitted:
        sizes = ("replicas", "groups")
        fixed = {key: value for key, value in admitted["rollout"].items() if key in sizes}
        rollout = {key: value for key, value in (current.get("rollout") or {}).items() if key not in sizes}
        current = {**current, "rollout": rollout | fixed}
    return _overlaid(admitted, current, Spec)


def _whole(admitted: Object) -> bool:
    """Return True if rollouts belong to a gang, whose size is fixed."""
    scheduling = admitted.get("scheduling") or {}
    return bool(scheduling.get("queueName")) or scheduling.get("gang", "none") != "none"


@functools.cache
def mutable_fields() -> tuple[str, ...]:
    """Return the paths under ``spec`` of the fields that may change, and of all fields below them."""
    return tuple(_paths(Spec, "", below=False))


def _paths(section: type[BaseModel], path: str, *, below: bool) -> Iterator[str]:
    for name in _fields(section):
        here, mutable = f"{path}.{name}".lstrip("."), below or name in _mutable(section)
        if mutable:
            yield here
        if inner := _inner_section(section, name):
            yield from _paths(inner, here, below=mutable)


def known_to(fields: Collection[str], spec: Object) -> dict[str, Any]:
    """Return a spec that another version resolved and that was edited since, without mutable fields unknown to it.

    ``fields`` are the ``mutable_fields`` of that version.
    """
    unknown = {field for field in mutable_fields() if field not in fields}
    known: dict[str, Any] = _kept(spec, Spec, lambda _, path: path not in unknown)
    return known


def _kept(data: Any, section: type[BaseModel], keeps: Callable[[bool, str], bool], path: str = "") -> Any:
    """Return the fields of a section, or of a list, that ``keeps`` selects: given if we know one, and its path."""
    if isinstance(data, list):
        return [_kept(item, section, keeps, path) for item in data]
    if not isinstance(data, Mapping):
        return data
    result, fields = {}, _fields(section)
    for name, value in data.items():
        here = f"{path}.{name}".lstrip(".")
        if keeps(name in fields, here):
            inner = _inner_section(section, name) if name in fields else None
            result[name] = _kept(value, inner, keeps, here) if inner else value
    return result


def frozen_changes(admitted: Object, current: Object) -> list[str]:
    """Return the immutable fields that differ, as written: ``spec.model.source``.

    The API server refuses most such changes already; it does not look into opaque fields. Fields that this version does
    not know do not count: after a rollback of the definition, the API server removes those of the newer version.
    """
    wanted, present = (_kept(spec, Spec, lambda known, _: known) for spec in (overlaid(admitted, current), current))
    return _changes(wanted, present, "spec")


def _overlaid(admitted: Object, current: Object, section: type[BaseModel]) -> dict[str, Any]:
    fields = _fields(section)
    result = {name: value for name, value in admitted.items() if name not in fields}  # of another version
    for name in fields:
        inner = _inner_section(section, name)
        if name in _mutable(section):
            value = current.get(name)
        elif inner and _holds_mutable(inner):
            value = _inner(admitted.get(name), current.get(name), inner)
        else:
            value = admitted.get(name)
        if value is not None:
            result[name] = value
    return result


def _inner(admitted: Any, current: Any, section: type[BaseModel]) -> Any:
    if isinstance(admitted, list):
        by_name: dict[str, Object] = {item.get("name", ""): item for item in current or []}
        return [_overlaid(item, by_name.get(item.get("name", "")) or item, section) for item in admitted]
    if admitted is None and current is None:
        return None
    return _overlaid(admitted or {}, current or {}, section) or (None if admitted is None else {})


def _changes(wanted: Any, current: Any, field: str) -> list[str]:
    if isinstance(wanted, Mapping) and isinstance(current, Mapping):
        keys = [*wanted, *(key for key in current if key not in wanted)]
        return [change for key in keys for change in _changes(wanted.get(key), current.get(key), f"{field}.{key}")]
    both_empty = wanted in (None, {}, []) and current in (None, {}, [])
    return [] if wanted == current or both_empty else [field]


_fields = functools.cache(written_fields)


@functools.cache
def _inner_section(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    return section_of(_fields(section)[name].annotation)


@functools.cache
def _mutable(section: type[BaseModel]) -> frozenset[str]:
    fields = _fields(section).items()
    return frozenset(name for name, field in fields if any(isinstance(mark, Mutable) for mark in field.metadata))


@functools.cache
def _holds_mutable(section: type[BaseModel]) -> bool:
    inner = (_inner_section(section, name) for name in _fields(section))
    return bool(_mutable(section)) or any(_holds_mutable(each) for each in inner if each is not None)


def digest(data: Any) -> str:
    """Return a short digest of plain data."""
    return hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest()[:16]


def lost_nulls(job_object: Object) -> Iterator[str]:
    """Yield the fields of pod templates that ``kubectl apply`` was given as null, which would remove them, and lost."""
    written = annotations_of(job_object).get(_LAST_APPLIED, "")
    if "null" not in written:
        return
    try:
        document = msgspec.json.decode(written)
    except (ValueError, RecursionError):  # anybody may write an annotation
        return
    if isinstance(document, dict):
        fields = _absent_nulls(document.get("spec"), job_object["spec"], "spec")
        yield from (field for field in fields if ".template." in field)


def _absent_nulls(written: object, present: object, field: str) -> Iterator[str]:
    """Yield the fields that are null in ``written`` and missing in ``present``."""
    if written is None and present is _ABSENT:
        yield field
    elif isinstance(written, dict):
        known = present if isinstance(present, Mapping) else {}
        for name, value in written.items():
            yield from _absent_nulls(value, known.get(name, _ABSENT), f"{field}.{name}")
    elif isinstance(written, list):
        items = present if isinstance(present, list) and len(present) == len(written) else [_ABSENT] * len(written)
        for number, (value, item) in enumerate(zip(written, items, strict=True)):
            yield from _absent_nulls(value, item, f"{field}[{number}]")
