"""The base of every section of an RLJob, and the marks of fields.

Marks sit in a field's ``Annotated`` metadata: ``MUTABLE`` (may change while the job runs), ``JobPath`` (a path that is
resolved against the job file). The reference page, the JSON Schema and the CRD read them from the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A frozen part of the job: camelCase in YAML, snake_case in Python, unknown fields and loose types refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True)
class Mutable:
    """Marks a field that may change while the job runs; all others are fixed."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the mark to the JSON Schema."""
        return {**handler(schema), "x-plaudit-mutable": True}


@dataclass(frozen=True)
class JobPath:
    """Marks a path that is relative to the job file.

    ``source``: the value may also be the id of a model on the hub; it is a path when it begins with ``.`` or ``/``, or
    when a file or folder of that name lies beside the job file. ``command``: a list whose first item is the name of a
    program, or a path if it has a slash.
    """

    kind: Literal["file", "source", "command"]


MUTABLE = Mutable()

FilePath = Annotated[str, JobPath("file")]
"""A path; relative ones are resolved against the job file's folder."""

Command = Annotated[list[str], JobPath("command")]
"""A program and its arguments; those that name a file beside the job file become its path."""

SourcePath = Annotated[str, JobPath("source")]
"""A path or a hub id."""

Opaque = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""An object that is passed on unchanged."""

_QUANTITY_SCHEMA: dict[str, Any] = {"x-kubernetes-int-or-string": True}
Quantity = Annotated[str | int, Field(json_schema_extra=_QUANTITY_SCHEMA)]
"""A Kubernetes quantity: ``4``, ``500m``, ``16Gi``."""

BYTE_QUANTITY = r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SCORER_NAME = r"^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$"
PYTHON_NAME = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"


class SecretKey(Section):
    """One key of a Secret. Under ``plaudit run``: the environment variable ``PLAUDIT_SECRET_<NAME>_<KEY>``."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the Secret in the job's namespace."""
    key: str = Field(min_length=1, max_length=253)
    """Key with the value."""

    @property
    def variable(self) -> str:
        """Return the environment variable with the value under ``plaudit run``: upper case, other signs as ``_``."""
        name = f"{self.name}_{self.key}".upper()
        return "PLAUDIT_SECRET_" + "".join(character if character.isalnum() else "_" for character in name)
