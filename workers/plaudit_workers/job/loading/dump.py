"""Write a job back as YAML: every default spelled out, nothing empty, no nulls; reading it gives the same job."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.resolver import VersionedResolver

from plaudit_workers.job.spec.rljob import TRAINING_SECTIONS, RLJob
from plaudit_workers.job.spec.section import Section

_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that JSON may hold as they are, and YAML only escaped, or in another sense."""


def dump_job(job: RLJob) -> str:
    """Return the job as YAML text."""
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 120
    stream = io.StringIO()
    yaml.dump(job_data(job), stream)
    return stream.getvalue()


def dump_json(data: Mapping[str, Any]) -> str:
    """Return the job as JSON, which is YAML 1.2 too: it is written a hundred times as fast as YAML."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def job_data(job: RLJob) -> dict[str, Any]:
    """Return the job as plain data in YAML's names."""
    data = section_data(job)
    if not job.spec.trains:
        for section in TRAINING_SECTIONS:
            data["spec"].pop(section, None)
    return data


def section_data(section: Section) -> dict[str, Any]:
    """Return every field of a section but those that are absent, or empty by default."""
    data = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        written = _plain(value)
        default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
        empty_by_default = written in ("", [], {}) and value == default
        if value is not None and not empty_by_default:
            data[field.alias or name] = written
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return section_data(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


_YAML_1_1 = VersionedResolver(version="1.1")
_TEXT = "tag:yaml.org,2002:str"


class _Representer(RoundTripRepresenter):
    """Write values so that readers of YAML 1.1 and 1.2 agree on them.

    To the older version 1e-06 is text, and the texts ``NO`` and ``1:30`` are a boolean and a number.
    """

    def represent_str(self, data: str) -> ScalarNode:
        plain = _YAML_1_1.resolve(ScalarNode, data, (True, False)) == _TEXT
        return self.represent_scalar(_TEXT, data, style=None if plain else "'")

    def represent_float(self, value: float) -> ScalarNode:
        digits = repr(value)
        if "e" in digits and "." not in digits:
            digits = digits.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", digits)


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)
