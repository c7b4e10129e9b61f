"""Read the address of Redis and a process's credentials: user, password, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff

from plaudit_wire.redis_connection import redis_client

_CONNECT_TIMEOUT_S = 5.0
_ALERT_WITHIN_S = 1.0
_REDIS_PORT = 6379
_MINIMUM_TLS = ssl.TLSVersion.TLSv1_2
_EXPIRED = 10
_OTHER_NAME = (62, 64)  # of a host, of an IP address (OpenSSL's X509_V_ERR_*)
_NO_CERTIFICATE = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")
_REFUSED_CERTIFICATE = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED", "CERTIFICATE_UNKNOWN")
_ASKS = (
    "asks for a client's certificate",
    "Give spec.transport.tls.certificateSecret and keySecret, or the two as files (to a process started by hand: "
    "PLAUDIT_REDIS_TLS_CERTIFICATE and PLAUDIT_REDIS_TLS_KEY)",
)


class TlsFileError(Exception):
    """A file of certificates cannot be used; the message names it."""


class PasswordFileError(Exception):
    """The file cannot be read; the message names the variable and the file."""


@dataclass(frozen=True)
class RedisTls:
    """The TLS settings of a ``rediss://`` address: trusted authorities and the client's certificate. Files are PEM."""

    ca_file: str = ""
    """``PLAUDIT_REDIS_TLS_CA``: certificates of the trusted authorities; empty: those of the system."""
    certificate_file: str = ""
    """``PLAUDIT_REDIS_TLS_CERTIFICATE``: the client's certificate; empty: none."""
    key_file: str = ""
    """``PLAUDIT_REDIS_TLS_KEY``: its key, without a passphrase."""
    check_server_name: bool = True
    """``PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME``: ``false`` accepts any certificate of the trusted authorities."""

    def context(self) -> ssl.SSLContext:
        """Return redis-py's TLS options for asyncio; raise ``TlsFileError`` if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise TlsFileError(f"{self.ca_file} holds no certificate of an authority in PEM: {error}") from error
        context.minimum_version = _MINIMUM_TLS
        context.check_hostname = self.check_server_name
        try:
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file or None)
        except OSError as error:
            raise TlsFileError(
                f"{self.certificate_file} and {self.key_file} are not a certificate and its key in PEM: {error}"
            ) from error
        return context


@dataclass(frozen=True)
class RedisAddress:
    """The address of Redis and the credentials of its user.

    Attributes:
        url: ``redis://host:port/db`` or ``rediss://…``, without a password.
        username: a user of Redis's ACL; empty: the user ``default``.
    """

    url: str
    password: str = field(default="", repr=False)
    username: str = ""
    tls: RedisTls = RedisTls()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, url: str = "") -> Self:
        """Read ``PLAUDIT_REDIS_…``; a given ``url`` takes precedence over ``PLAUDIT_REDIS_URL``.

        Raises:
            PasswordFileError: the file of ``PLAUDIT_REDIS_PASSWORD_FILE`` cannot be read.
        """
        tls = RedisTls(
            ca_file=environment.get("PLAUDIT_REDIS_TLS_CA", ""),
            certificate_file=environment.get("PLAUDIT_REDIS_TLS_CERTIFICATE", ""),
            key_file=environment.get("PLAUDIT_REDIS_TLS_KEY", ""),
            check_server_name=environment.get("PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME", "").lower() != "false",
        )
        username = environment.get("PLAUDIT_REDIS_USERNAME", "")
        return cls(url or environment.get("PLAUDIT_REDIS_URL", ""), _password(environment), username, tls)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that ``from_environment`` reads."""
        given = {
            "PLAUDIT_REDIS_USERNAME": self.username,
            "PLAUDIT_REDIS_TLS_CA": self.tls.ca_file,
            "PLAUDIT_REDIS_TLS_CERTIFICATE": self.tls.certificate_file,
            "PLAUDIT_REDIS_TLS_KEY": self.tls.key_file,
            "PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME": "" if self.tls.check_server_name else "false",
        }
        whole = {"PLAUDIT_REDIS_URL": self.url, "PLAUDIT_REDIS_PASSWORD": self.password}
        return whole | {name: value for name, value in given.items() if value}

    def client(self, *, timeout_s: float | None, retries: int) -> Redis:
        """Return a new client.

        Args:
            timeout_s: for each answer, seconds; longer than any BLOCK that it sends. None: the caller applies its own.
            retries: the number of times a lost command is sent again; 0 wherever that would repeat a read.
        """
        backoff = ExponentialBackoff(cap=1.0, base=0.02) if retries else NoBackoff()
        return redis_client(
            self.url,
            username=self.username or None,
            password=self.password or None,
            socket_timeout=timeout_s,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            retry=Retry(backoff, retries),
            protocol=2,
            driver_info=None,  # no CLIENT SETINFO, which the users of a run's own Redis may not send
            **(self._tls_options() if self.url.startswith("rediss://") else {}),
        )

    def _tls_options(self) -> dict[str, object]:
        return {
            "ssl_ca_certs": self.tls.ca_file or None,
            "ssl_certfile": self.tls.certificate_file or None,
            "ssl_keyfile": self.tls.key_file or None,
            "ssl_check_hostname": self.tls.check_server_name,
            "ssl_min_version": _MINIMUM_TLS,
        }

    async def tls_problem(self, error: BaseException) -> str:
        """Return the TLS problem that made a connection fail, with its remedy; empty for other causes.

        Args:
            error: of the connection. If it does not show the cause, the server is contacted a second time.
        """
        if not self.url.startswith("rediss://"):
            return ""
        try:
            context = self.tls.context()
        except TlsFileError as problem:
            return f"{problem}. Mend what spec.transport.tls names"
        cause = _tls_error(error) or await self._alert(context)
        if cause is None:
            return ""
        what, remedy = self._words(cause)
        return f"Redis at {self.url} {what} ({cause.reason or cause}). {remedy}"

    async def _alert(self, context: ssl.SSLContext) -> ssl.SSLError | None:
        """Return the server's TLS alert for a connection on which nothing is sent.

        In TLS 1.3 the server checks the client's certificate after the client has finished its part of the handshake.
        A client that sends a command at once may find the connection closed before it reads the alert.
        """
        server = urlsplit(self.url)
        try:
            async with asyncio.timeout(_ALERT_WITHIN_S):
                reader, writer = await asyncio.open_connection(server.hostname, server.port or _REDIS_PORT, ssl=context)
                with contextlib.closing(writer):
                    await reader.read(1)
        except OSError as error:  # includes TimeoutError: the server accepted the handshake
            return _tls_error(error)
        return None

    def _words(self, cause: ssl.SSLError) -> tuple[str, str]:
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code == _EXPIRED:
                return "shows a certificate that has expired", "Renew it there"
            if cause.verify_code in _OTHER_NAME:
                host = urlsplit(self.url).hostname
                return (
                    f"shows a certificate for another name than {host}",
                    "Use a name that it was issued for in the address, or set spec.transport.tls.checkServerName to "
                    "false",
                )
            return (
                f"shows a certificate that is not of a trusted authority: {cause.verify_message}",
                "Give its authority in spec.transport.tls.caSecret, caConfigMap or caFile (to a process started by "
                "hand: PLAUDIT_REDIS_TLS_CA)",
            )
        reason = cause.reason or ""
        if any(word in reason for word in _REFUSED_CERTIFICATE):
            return "refuses the client's certificate", "Give one that it trusts in spec.transport.tls"
        if any(word in reason for word in _NO_CERTIFICATE):
            return _ASKS
        return "cannot be spoken to by TLS", "Is rediss:// right for this port?"


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the TLS error that caused another; a connection that just ended is none, because a restart ends it too."""
    found = (each for each in _causes(error) if isinstance(each, ssl.SSLError))
    return next((each for each in found if not isinstance(each, ssl.SSLEOFError)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _password(environment: Mapping[str, str]) -> str:
    """Read the file of ``PLAUDIT_REDIS_PASSWORD_FILE``, else ``PLAUDIT_REDIS_PASSWORD``; empty for none."""
    file = environment.get("PLAUDIT_REDIS_PASSWORD_FILE")
    if not file:
        return environment.get("PLAUDIT_REDIS_PASSWORD", "")
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise PasswordFileError(f"PLAUDIT_REDIS_PASSWORD_FILE {file} cannot be read: {error.strerror}") from error
