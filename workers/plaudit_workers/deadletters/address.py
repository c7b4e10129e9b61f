"""The address of a run's Redis: ``plaudit run`` writes it into the run's folder, commands on a live run read it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import msgspec

from plaudit_wire.errors import RefusedError
from plaudit_workers.process import redis_from
from plaudit_workers.stream.connection import RedisAddress

_FILE = "redis.json"


def write_redis_address(folder: Path, redis: RedisAddress) -> None:
    """Write the address into the run's folder, readable by this user only because of the password."""
    file = folder / _FILE
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode(asdict(redis)))


def redis_address(folder: Path, url: str | None) -> RedisAddress:
    """Return the address of a run's Redis, or that of ``url`` with the rest in ``PLAUDIT_REDIS_…``.

    Raises:
        RefusedError: there is no such run, or its folder does not say.
    """
    if url is not None:
        return redis_from(os.environ, url)
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=RedisAddress)
    except OSError as error:
        raise RefusedError(
            f"{folder / _FILE} cannot be read: {error.strerror}. Is {folder.name} a run in that folder "
            "(--runs-folder)? For a run on Kubernetes give --redis URL, and its password in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except msgspec.DecodeError as error:
        raise RefusedError(f"{folder / _FILE} is damaged: {error}. Give --redis URL") from error
