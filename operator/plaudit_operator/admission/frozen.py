"""The spec of a running job: as admitted, with the edits of its mutable fields.

The operator that admitted the job may be of another version. So whatever was admitted stays accepted, even if this
version validates more strictly: only problems that an edit introduces reject it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from plaudit_operator.admission.mutable import frozen_changes, overlaid
from plaudit_operator.names import Reason
from plaudit_workers.job.loading.field_errors import section_of
from plaudit_workers.job.loading.load import parse_job
from plaudit_workers.job.problem import JobError, Problem
from plaudit_workers.job.spec.rljob import RLJob

Object = Mapping[str, Any]
S = TypeVar("S", bound=BaseModel)

_KEEPS = "edit rejected, the job keeps its old spec"


class FrozenSpec(NamedTuple):
    """Hold the spec in effect."""

    job: RLJob
    written: Object
    """As the user wrote it: the admitted spec with the accepted edits."""
    reason: str
    message: str


def spec_in_effect(job_object: Object, admitted: Object, accepted: Object) -> FrozenSpec:
    """Return the spec that a running job follows.

    Args:
        admitted: its ``spec`` when it was admitted.
        accepted: its ``spec`` with the edits that were accepted so far.
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
    changed = frozen_changes(admitted, job_object["spec"])
    if changed:
        message = f"{_KEEPS}: {', '.join(changed)} cannot change while the job exists"
        return FrozenSpec(job, edited, Reason.IMMUTABLE_CHANGED, message)
    return FrozenSpec(job, edited, Reason.VALID, "valid and in effect")


def parsed(job_object: Object, spec: Object) -> tuple[RLJob, list[Problem]]:
    """Return the job with another ``spec``, and its problems; with problems the job is not validated."""
    metadata = {key: job_object["metadata"][key] for key in ("name", "namespace")}
    written = {**{key: job_object[key] for key in ("apiVersion", "kind")}, "metadata": metadata, "spec": spec}
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
