"""Read the Secrets that a job names: files in a pod, environment variables under ``plaudit run``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.spec.rewards.reward import RewardSpec
from plaudit_workers.job.spec.section import SecretKey

SECRETS_FOLDER = "PLAUDIT_SECRETS_FOLDER"
"""Environment variable: a folder with a file ``<name>/<key>`` for each key that this process may read."""


def secret_value(reference: SecretKey, field: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of a Secret without the trailing line end.

    Args:
        reference: name and key.
        field: the job's field, for the message.
        environment: the process's variables.

    Raises:
        RefusedError: the value is missing or empty.
    """
    folder = environment.get(SECRETS_FOLDER)
    file = Path(folder, reference.name, reference.key) if folder else None
    if file is not None and file.is_file():
        value, place = file.read_text(encoding="utf-8"), f"file {file}"
    elif reference.variable in environment:
        value, place = environment[reference.variable], f"environment variable {reference.variable}"
    else:
        raise RefusedError(
            f"{field}: key {reference.key!r} of Secret {reference.name!r} has no value. Under plaudit run set "
            f"the environment variable {reference.variable}; on Kubernetes the Secret must have that key"
        )
    if not value.strip():
        raise RefusedError(f"{field}: the {place} is empty; set it to the value")
    return value.strip()


def reward_secrets(reward: RewardSpec) -> Iterator[tuple[str, SecretKey]]:
    """Yield the Secrets that reward workers read, each with the field that names it."""
    for index, scorer in enumerate(reward.scorers):
        field = f"spec.reward.scorers[{index}]"
        if scorer.judge and scorer.judge.api_key_secret:
            yield f"{field}.judge.apiKeySecret", scorer.judge.api_key_secret
        if scorer.http and scorer.http.api_key_secret:
            yield f"{field}.http.apiKeySecret", scorer.http.api_key_secret
        if scorer.service and scorer.service.token_secret:
            yield f"{field}.service.tokenSecret", scorer.service.token_secret
        if scorer.limits and scorer.limits.shared and scorer.limits.shared.password_secret:
            yield f"{field}.limits.shared.passwordSecret", scorer.limits.shared.password_secret
