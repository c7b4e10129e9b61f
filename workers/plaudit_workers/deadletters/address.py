"""Where the Redis of a run is: written into the run's folder by ``plaudit run``, read by commands on a live run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from plaudit_workers.process import RefusedError
from plaudit_workers.stream.connection import RedisAddress

_FILE = "redis.json"


class _Stored(msgspec.Struct):
    url: str
    password: str


def write_redis_address(folder: Path, redis: RedisAddress) -> None:
    """Leaves the address in the run's folder, for this user only: the password is in it."""
    file = folder / _FILE
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode(_Stored(redis.url, redis.password)))


def redis_address(folder: Path, url: str | None) -> RedisAddress:
    """The address of a run's Redis.

    Args:
        folder: of the run.
        url: given by hand instead; its password is in ``PLAUDIT_REDIS_PASSWORD``.

    Raises:
        RefusedError: there is no such run, or its folder does not say.
    """
    if url is not None:
        return RedisAddress(url, os.environ.get("PLAUDIT_REDIS_PASSWORD", ""))
    try:
        stored = msgspec.json.decode((folder / _FILE).read_bytes(), type=_Stored)
    except OSError as error:
        raise RefusedError(
            f"{folder / _FILE} cannot be read: {error.strerror}. Is {folder.name} a run in that folder "
            "(--runs-folder)? For a run on Kubernetes give --redis URL, and its password in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except msgspec.DecodeError as error:
        raise RefusedError(f"{folder / _FILE} is damaged: {error}. Give --redis URL") from error
    return RedisAddress(stored.url, stored.password)
