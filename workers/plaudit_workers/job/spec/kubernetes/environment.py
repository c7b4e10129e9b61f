"""``pod.env``: environment variables, in the form of Kubernetes' ``EnvVar``."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.section import Quantity, Section


class KeyReference(Section):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the object."""
    key: str = Field(min_length=1, max_length=253)
    """Key with the value."""
    optional: bool = False
    """Start the container even if object or key is missing. Default false."""


class FieldReference(Section):
    """A field of the pod."""

    field_path: str = Field(min_length=1, max_length=512)
    """The field, such as ``status.podIP`` or ``metadata.labels['team']``."""


class ResourceReference(Section):
    """An amount of a container's resources."""

    resource: str = Field(min_length=1, max_length=253)
    """The resource, such as ``limits.memory``."""
    container_name: str = Field(default="", max_length=63)
    """Container of the pod. Default empty: the one of the variable."""
    divisor: Quantity = ""
    """Unit of the value, such as ``1Mi``. Default empty: 1."""


class EnvironmentSource(Section):
    """Source of a variable's value: exactly one of the fields."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""
    field_ref: FieldReference | None = None
    """A field of the pod."""
    resource_field_ref: ResourceReference | None = None
    """An amount of a container's resources."""


class EnvironmentVariable(Section):
    """One environment variable, in the form of Kubernetes' ``EnvVar``."""

    name: str = Field(min_length=1)
    """Its name."""
    value: str = ""
    """Its value. Default empty."""
    value_from: EnvironmentSource | None = None
    """Source of its value instead of ``value``. Default: ``value``."""
