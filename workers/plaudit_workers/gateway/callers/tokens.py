"""The callers of a gateway: a folder with one file for each, its name the caller's and its content the token.

On Kubernetes the folder is a Secret's volume, whose files change when the Secret does; they are read again every ten
seconds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_READ_AGAIN_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHORTEST = 16


class Tokens:
    """Hold the tokens of all callers, read from a folder of files.

    Raises:
        RefusedError: there is no token, or one is too short to be a secret.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests = self._read()
        self._read_at = time.monotonic()
        if not self._digests:
            raise RefusedError(f"{folder} has no token: give it a file for each caller, its content the token")

    @property
    def callers(self) -> list[str]:
        """Return the names of all callers."""
        return list(self._digests)

    def caller(self, authorization: str) -> str | None:
        """Return the caller of a request; None for an unknown token.

        Args:
            authorization: header of the request: ``Bearer TOKEN``, or ``Basic …`` with the token as password, for
                programs that can only be given a URL (``http://any:TOKEN@host``).
        """
        if time.monotonic() - self._read_at > _READ_AGAIN_S:
            self._read_at = time.monotonic()
            self._digests = self._read_again() or self._digests
        given = _digest(_token(authorization))
        found = None
        for caller, digest in self._digests.items():  # all of them: the time must not depend on the match
            if hmac.compare_digest(given, digest):
                found = caller
        return found

    def _read_again(self) -> dict[str, bytes]:
        """Return the tokens as they are now; none if they cannot be used, and the earlier ones stay."""
        try:
            return self._read()
        except (RefusedError, OSError) as error:
            logger.error("cannot use the changed tokens; keeping the earlier ones", error=str(error))
            return {}

    def _read(self) -> dict[str, bytes]:
        found = {}
        for file in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            if not _NAME.fullmatch(file.name) or not file.is_file():  # Kubernetes adds ``..data`` to a volume
                continue
            token = file.read_text().strip()
            if len(token) < _SHORTEST:
                raise RefusedError(f"{file}: a token of {len(token)} characters; give it at least {_SHORTEST}")
            found[file.name] = _digest(token)
        return found


def _token(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return ""
        return password or user
    return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
