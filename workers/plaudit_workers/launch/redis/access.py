"""Give each role its address and password file for the run's Redis, and people the admin's."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plaudit_wire.redis_access import ADMIN, PROBE, users
from plaudit_wire.redis_address import RedisAddress
from plaudit_workers.launch.redis.private_files import write_private

_FOLDER = "secrets"


@dataclass(frozen=True)
class RedisAccess:
    """Hold the addresses of one Redis.

    Attributes:
        admin: may do everything; ``plaudit run`` itself and commands on a live run use it.
        of_roles: by role; empty for an external Redis, which has one user for all.
        folder: of the run. Processes get the names of password files in it, never a password: Ray writes the
            environment of an actor into a log that every user of the machine can read.
    """

    admin: RedisAddress
    folder: Path
    of_roles: Mapping[str, RedisAddress] = field(default_factory=dict)

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
        return self.folder / _FOLDER / f"redis-{address.username or 'default'}"


def new_passwords(*, trains: bool) -> dict[str, str]:
    """Return a password for each user of a run's own Redis."""
    return {user: secrets.token_urlsafe(24) for user in users(trains=trains)}


def own_access(url: str, passwords: Mapping[str, str], folder: Path) -> RedisAccess:
    """Return the access to a run's own Redis."""
    addresses = {user: RedisAddress(url, password, user) for user, password in passwords.items()}
    return RedisAccess(addresses.pop(ADMIN), folder, addresses)
