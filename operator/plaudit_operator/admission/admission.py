"""Admit an RLJob: validate it once, freeze it with its files, and then accept changes of mutable fields only.

The job's ConfigMap holds what is frozen: ``job.yaml`` (for its processes), ``spec.json`` (the spec as admitted),
``current.json`` (the same with accepted edits), the job's files, and of the operator that admitted it
``templates.json`` (pod templates), ``mutable-fields.json`` (fields that may change), ``images.json`` and
``platform.json`` (defaults for pods).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from plaudit_operator.admission.frozen import FrozenSpec, parsed, spec_in_effect
from plaudit_operator.admission.support import unsupported
from plaudit_operator.names import Reason
from plaudit_operator.platform import Platform
from plaudit_workers.job.checks.kubernetes import kubernetes_problems
from plaudit_workers.job.checks.python_files import source_problem
from plaudit_workers.job.problem import JobError, Problem
from plaudit_workers.job.spec.rljob import RLJob

Object = Mapping[str, Any]


@dataclass(frozen=True)
class JobFile:
    """Hold a file that travels with the job."""

    key: str
    """Key in the job's ConfigMap."""
    path: str
    """Relative path beside ``job.yaml``."""
    content: str = field(repr=False)

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
    images: Mapping[str, str] = field(default_factory=dict)
    """The operator's images when the job was admitted, by field of ``Images``; empty before the first reconcile."""
    platform: Platform | None = None
    """Defaults for its pods when the job was admitted; None before the first reconcile."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Data of the job's ConfigMap; empty before the first reconcile."""
    kind: str = "RLJob"
    """Kind of the object."""
    revision: str = ""
    """Revision of a RewardService's scoring; empty for an RLJob, whose scoring never changes."""
    services: Mapping[str, str] = field(default_factory=dict)
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
    """Validate a job, or read it as it was frozen.

    Args:
        config: the job's own ConfigMap, when it was admitted before.
        files: the ConfigMap that ``spec.files`` names; used only before admission. None if missing.
    """
    if config is not None and "spec.json" in config.get("data", {}):
        data = config["data"]
        admitted, accepted = (msgspec.json.decode(data[name]) for name in ("spec.json", "current.json"))
        return as_admitted(data, spec_in_effect(job_object, admitted, accepted))
    return admitted_anew(job_object, files)


def admitted_anew(job_object: Object, files: Object | None) -> Admitted | RefusedJob:
    """Validate an object whose spec is not in effect yet, and read its files."""
    job, problems = parsed(job_object, job_object["spec"])
    problems = problems or [*kubernetes_problems(job), *unsupported(job)]
    if problems:
        return RefusedJob(Reason.INVALID, _text(JobError(problems)))
    found = _files(job, files)
    if isinstance(found, RefusedJob):
        return found
    if problems := list(_code_problems(job, found)):
        return RefusedJob(Reason.FILES_INVALID, _text(JobError(problems)))
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


def _text(error: JobError) -> str:
    return "; ".join(str(problem) for problem in error.problems)


def _files(job: RLJob, source: Object | None) -> tuple[JobFile, ...] | RefusedJob:
    wanted = job.spec.files
    if not wanted.config_map:
        return ()
    if source is None:
        return RefusedJob(
            Reason.FILES_MISSING,
            f"spec.files.configMap: ConfigMap {wanted.config_map!r} does not exist in this namespace. Create it",
        )
    data: Mapping[str, str] = source.get("data") or {}
    items = [(item.key, item.path) for item in wanted.items] or [(key, key) for key in sorted(data)]
    missing = [key for key, _ in items if key not in data]
    if missing:
        return RefusedJob(
            Reason.FILES_MISSING, f"spec.files: ConfigMap {wanted.config_map!r} has no key {', '.join(missing)}. Add it"
        )
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


def digest(data: Any) -> str:
    """Return a short digest of plain data."""
    return hashlib.sha256(msgspec.json.encode(data, order="sorted")).hexdigest()[:16]
