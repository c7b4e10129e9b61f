"""Provide the Redis of a run: the one that ``spec.transport.url`` names, or one that lives as long as the run.

Each role gets its address and password file, people the admin's. ``plaudit run`` writes the address into the run's
folder, where commands on a live run read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from plaudit_job.secrets import secret_value
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.section import SecretKey
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.redis import RedisAddress, RedisTls
from plaudit_wire.redis_access import ADMIN, PROBE, acl_file, users
from plaudit_workers.launch.redis import RedisServer, ServerAccess, write_private
from plaudit_workers.process import redis_from
from plaudit_workers.stream.transport import Transport

_PASSWORDS_FOLDER = "secrets"
logger = get_logger(__name__)
_CHECK_EVERY_S = 0.25
_ADDRESS_FILE = "redis.json"
SERVICE_FILE = "service.json"
"""In the run's folder, for ``plaudit submit`` on the same machine; only its owner can read it."""


@contextlib.asynccontextmanager
async def run_redis(job: RLJob, folder: Path, *, host: str) -> AsyncIterator[RedisAccess]:
    """Open the Redis of a run; a private one is restarted if it dies and ends with the body."""
    transport = job.spec.transport
    if transport.url:
        access = RedisAccess(external_redis(job, folder), folder)
        await (await Transport.open(access.admin, folder.name)).close()
        access.write_passwords()
        yield access
        return
    passwords = new_passwords(trains=job.spec.trains)
    server = RedisServer(
        folder / "redis",
        host=host,
        max_memory_bytes=transport.managed.max_memory_bytes,
        persistence=transport.managed.persistence,
        access=ServerAccess(passwords[ADMIN], acl_file(folder.name, passwords)),
    )
    access = own_access(server.url, passwords, folder)
    access.write_passwords()
    try:
        await asyncio.to_thread(server.start)
        restarting = asyncio.create_task(_restart_when_dead(server))
        try:
            yield access
        finally:
            restarting.cancel()
    finally:
        await asyncio.to_thread(server.stop)


async def _restart_when_dead(server: RedisServer) -> None:
    """Restart Redis when it dies; it loads its append-only file, and the ledger finds what that lacks."""
    while True:
        if not server.running():
            logger.warning("redis died, restarting it")
            await asyncio.to_thread(server.start)
        await asyncio.sleep(_CHECK_EVERY_S)


@dataclass(frozen=True)
class RedisAccess:
    """Hold the addresses of one Redis.

    Processes get the names of password files in the run's folder, never a password: Ray writes the environment of an
    actor into a log that every user of the machine can read.
    """

    admin: RedisAddress
    """It may do everything; ``plaudit run`` itself and commands on a live run use it."""
    folder: Path
    of_roles: Mapping[str, RedisAddress] = field(default_factory=dict)
    """Empty for an external Redis, which has one user for all."""

    def of(self, role: str) -> RedisAddress:
        """Return the address for a role; a role without a user of its own may only check that Redis responds."""
        return self.of_roles.get(role) or self.of_roles.get(PROBE, self.admin)

    def environment(self, role: str) -> dict[str, str]:
        """Return the variables that ``RedisAddress.from_environment`` reads, with a file in place of the password."""
        address = self.of(role)
        variables = address.environment()
        if variables.pop("PLAUDIT_REDIS_PASSWORD"):
            variables["PLAUDIT_REDIS_PASSWORD_FILE"] = str(self._password_file(address))
        return variables

    def write_passwords(self) -> None:
        """Write a file for each password, readable by this user only."""
        for address in {self.admin, *self.of_roles.values()}:
            if address.password:
                write_private(self._password_file(address), address.password)

    def _password_file(self, address: RedisAddress) -> Path:
        return self.folder / _PASSWORDS_FOLDER / f"redis-{address.username or 'default'}"


def new_passwords(*, trains: bool) -> dict[str, str]:
    """Return a password for each user of a run's own Redis."""
    return {user: secrets.token_urlsafe(24) for user in users(trains=trains)}


def own_access(url: str, passwords: Mapping[str, str], folder: Path) -> RedisAccess:
    """Return the access to a run's own Redis."""
    addresses = {user: RedisAddress(url, password, user) for user, password in passwords.items()}
    return RedisAccess(addresses.pop(ADMIN), folder, addresses)


def external_redis(job: RLJob, folder: Path) -> RedisAddress:
    """Return the address with user, password and certificates; Secrets that have to be files go into ``folder``."""
    transport = job.spec.transport
    secret = transport.password_secret
    password = secret_value(secret, "spec.transport.passwordSecret") if secret else ""
    if (tls := transport.tls) is None:
        return RedisAddress(transport.url, password, transport.username)
    certificate = _written_secret("certificateSecret", tls.certificate_secret, folder / "redis-tls/certificate.pem")
    files = RedisTls(
        ca_file=tls.ca_file or _written_secret("caSecret", tls.ca_secret, folder / "redis-tls/ca.pem"),
        certificate_file=tls.certificate_file or certificate,
        key_file=tls.key_file or _written_secret("keySecret", tls.key_secret, folder / "redis-tls/key.pem"),
        check_server_name=tls.check_server_name,
    )
    return RedisAddress(transport.url, password, transport.username, files)


def _written_secret(field: str, secret: SecretKey | None, file: Path) -> str:
    if secret is None:
        return ""
    value = secret_value(secret, f"spec.transport.tls.{field}")
    write_private(file, value + "\n")
    return str(file)


def write_redis_address(folder: Path, redis: RedisAddress) -> None:
    """Write the address into the run's folder, readable by this user only because of the password."""
    file = folder / _ADDRESS_FILE
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode(asdict(redis)))


def redis_address(folder: Path, url: str | None) -> RedisAddress:
    """Return the address of a run's Redis, or that of ``url`` with the rest in ``PLAUDIT_REDIS_…``."""
    if url is not None:
        return redis_from(os.environ, url)
    try:
        address = msgspec.json.decode((folder / _ADDRESS_FILE).read_bytes(), type=RedisAddress)
        address.check()
        return address
    except OSError as error:
        raise RefusedError(
            f"{folder / _ADDRESS_FILE} cannot be read: {error.strerror}. Is {folder.name} a run in that folder "
            "(--runs-folder)? For a run on Kubernetes give --redis URL, and its password in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{folder / _ADDRESS_FILE} is damaged: {error}. Give --redis URL") from error
