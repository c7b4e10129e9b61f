"""The base of every section of an RLJob, and the marks of fields.

Marks sit in a field's ``Annotated`` metadata: ``MUTABLE`` (may change while the job runs), ``JobPath`` (a path that is
resolved against the job file), ``KeyOf`` (a key of a table). The reference page, the JSON Schema and the CRD read them
from the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema


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
        defer_build=True,  # every process imports all sections, and few read a job
    )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the section itself: it is frozen, so jobs share the sections that are defaults of others."""
        return self


@dataclass(frozen=True)
class Mutable:
    """Mark a field that may change while the job runs; all others are fixed."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the mark to the JSON Schema."""
        return {**handler(schema), "x-plaudit-mutable": True}


@dataclass(frozen=True)
class JobPath:
    """Mark a path that is relative to the job file.

    ``source``: the value may also be the id of a model on the hub; it is a path when it begins with ``.`` or ``/``, or
    when a file or folder of that name lies beside the job file. ``command``: a list whose first item is the name of a
    program, or a path if it has a slash.
    """

    kind: Literal["file", "source", "command"]


class HasMeaning(Protocol):
    """Describe a value: a row of a table of values."""

    @property
    def meaning(self) -> str:
        """The value's meaning, as the reference describes it."""


@dataclass(frozen=True)
class KeyOf:
    """Mark a text that is a key of a table, which is the only list of the field's values.

    Messages, the JSON Schema, the reference and the CRD read the values and their meanings from the table.
    """

    table: Mapping[str, HasMeaning]
    default: str = ""
    """The last sentence of the field's description: its default and why."""

    @property
    def description(self) -> str:
        """Return the field's description: the values with their meanings, and the default."""
        meanings = "; ".join(f"`{value}`: {row.meaning}" for value, row in self.table.items())
        return f"{meanings}. {self.default}".strip()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept the keys that the table has at the time."""
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """List the keys and describe the field by their meanings."""
        return {"description": self.description, "enum": [*self.table], "type": "string"}

    def _checked(self, value: object) -> str:
        if isinstance(value, str) and value in self.table:
            return value
        *others, last = (repr(key) for key in self.table)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})


def written_fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their names in YAML."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def differs(section: Section, written: str) -> bool:
    """Return True where a field, named as in YAML (``reward.networkPolicy``), differs from its default."""
    first, _, rest = written.partition(".")
    fields = type(section).model_fields.items()
    name, field = next((name, field) for name, field in fields if first == (field.alias or name))
    value = getattr(section, name)
    return differs(value, rest) if rest else bool(value != field.get_default(call_default_factory=True))


def choices(field: FieldInfo) -> list[Any]:
    """Return the values that a field can have, where they are listed; else an empty list."""
    if get_origin(field.annotation) is Literal:
        return [*get_args(field.annotation)]
    return [key for mark in field.metadata if isinstance(mark, KeyOf) for key in mark.table]


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
