"""Where a process finds the password of Redis: in a file (a mounted Secret) or in its environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class PasswordFileError(Exception):
    """The file cannot be read; the message names the variable and the file."""


def redis_password(environment: Mapping[str, str]) -> str:
    """Reads the file of ``PLAUDIT_REDIS_PASSWORD_FILE``, else ``PLAUDIT_REDIS_PASSWORD``; empty for none.

    Raises:
        PasswordFileError: the file cannot be read.
    """
    file = environment.get("PLAUDIT_REDIS_PASSWORD_FILE")
    if not file:
        return environment.get("PLAUDIT_REDIS_PASSWORD", "")
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise PasswordFileError(f"PLAUDIT_REDIS_PASSWORD_FILE {file} cannot be read: {error.strerror}") from error
