"""Writes a job back as YAML: every default spelled out, nothing empty, no nulls; reading it gives the same job."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from plaudit_workers.job.rljob import TRAINING_SECTIONS, RLJob

_OPAQUE = {"arguments", "affinity", "template", "tolerations", "volumes", "envFrom", "podSelector", "namespaceSelector"}
"""Handed on as they are, empty members included."""


def dump_job(job: RLJob) -> str:
    """The job as YAML text."""
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 120
    stream = io.StringIO()
    yaml.dump(job_data(job), stream)
    return stream.getvalue()


def job_data(job: RLJob) -> dict[str, Any]:
    """The job as plain data in YAML's names."""
    absent = set() if job.spec.trains else set(TRAINING_SECTIONS)
    data = job.model_dump(by_alias=True, exclude_none=True, exclude={"spec": absent})
    return {key: _without_empty(value) for key, value in data.items()}


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: inner if key in _OPAQUE else _without_empty(inner) for key, inner in value.items()}
    return {key: inner for key, inner in kept.items() if inner not in ("", {}, [])}


class _Representer(RoundTripRepresenter):
    """Writes 1e-06 as 1.0e-06: readers of YAML 1.1 would take the first for text."""

    def represent_float(self, value: float) -> ScalarNode:
        digits = repr(value)
        if "e" in digits and "." not in digits:
            digits = digits.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", digits)


_Representer.add_representer(float, _Representer.represent_float)
