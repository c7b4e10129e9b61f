"""Read the Secrets that a job names: files in a pod, environment variables under ``plaudit run``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from plaudit_job.spec.rewards import RewardSpec
from plaudit_job.spec.section import SecretKey, Section
from plaudit_job.spec.transport import TransportSpec
from plaudit_wire.errors import RefusedError

SECRETS_FOLDER = "PLAUDIT_SECRETS_FOLDER"
"""Environment variable: a folder with a file ``<name>/<key>`` for each key that this process may read."""


def secret_value(reference: SecretKey, field: str) -> str:
    """Return the value of a Secret; raise ``RefusedError`` for the field if the value is missing or empty."""
    folder = os.environ.get(SECRETS_FOLDER)
    file = Path(folder, reference.name, reference.key) if folder else None
    if file is not None and file.is_file():
        value, place = file.read_text(encoding="utf-8"), f"file {file}"
    elif reference.variable in os.environ:
        value, place = os.environ[reference.variable], f"environment variable {reference.variable}"
    else:
        raise RefusedError(
            f"{field}: key {reference.key!r} of Secret {reference.name!r} has no value. Under plaudit run set "
            f"the environment variable {reference.variable}; on Kubernetes the Secret must have that key"
        )
    if not value.strip():
        raise RefusedError(f"{field}: the {place} is empty. Set it to the value")
    return value.strip()


def reward_secrets(reward: RewardSpec) -> Iterator[tuple[str, SecretKey]]:
    """Yield the Secrets that reward workers read, each with the field that names it."""
    for field, scorer in reward.by_field.items():
        yield from _secrets(field, scorer)


def transport_secrets(transport: TransportSpec) -> Iterator[tuple[str, SecretKey]]:
    """Yield the Secrets of an external Redis, each with the field that names it."""
    yield from _secrets("spec.transport", transport)


def _secrets(field: str, section: Section) -> Iterator[tuple[str, SecretKey]]:
    """Yield the Secrets that a section names, and those below it, in the order of the fields."""
    for name, described in type(section).model_fields.items():
        value, written = getattr(section, name), f"{field}.{described.alias}"
        if isinstance(value, SecretKey):
            yield written, value
        elif isinstance(value, Section):
            yield from _secrets(written, value)
