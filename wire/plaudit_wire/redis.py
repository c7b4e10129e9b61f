"""Connect every asyncio client of this project to Redis: addresses and credentials, outages, libraries of functions.

All clients use the connections of ``redis_client``, which differ from redis-py's in four points:

- A send can be cancelled. redis-py sends through ``asyncio.wait_for``, which in Python 3.11 swallows a cancellation
  that arrives just when the send completes: the cancelled task runs on for ever.
- The connection timeout covers authentication too: a server that accepts connections but never answers AUTH is down.
- A refusal that passes is an outage (``PassingRefusalError``). READONLY also closes the connection: behind one address
  a new connection reaches the new master, the old one stays with the replica.
- A close never fails: over TLS redis-py waits for the server's goodbye, and raises where a frozen one gives none.

So ``except OUTAGE`` covers all three kinds of outage: Redis is unreachable, Redis does not answer in time, Redis
answers but refuses commands for now. All commands are idempotent: sending one again is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Connection, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from plaudit_wire.errors import causes
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import RecordError

logger = get_logger(__name__)
_FIRST_WAKE_S, _LONGEST_WAKE_S = 0.01, 1.0
T = TypeVar("T")
OUTAGE: Final = (RedisConnectionError, RedisTimeoutError, OSError)
"""The exceptions that mean that Redis is not available now. A wrong password is a connection error too."""
_PASSING_CLASSES = (ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
"""CLUSTERDOWN and MASTERDOWN, OOM, READONLY, TRYAGAIN. LOADING is a connection error already."""
_PASSING_CODES = ("BUSY ", "MISCONF ", "NOREPLICAS ", "UNBLOCKED force")
_RETRY_AFTER_S = 0.5
_LOG_EVERY_S = 30.0
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
NEEDED_PERMISSIONS: Final = "+fcall +function|load"
"""ACL rules that a user needs to load and call libraries."""
_DIGEST_DIGITS = 12
_HEADER = "#!lua"


class PassingRefusalError(RedisConnectionError):
    """Redis refused a command for a reason that passes: read-only, out of memory, a failed save, a busy script."""


class Lateness:
    """Measure by how much this process wakes up late while the context lasts: it is busy, or short of CPU.

    A reply that seems late by no more than that was only read late: its sender was fast.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = math.inf
        self._waking: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._due = time.monotonic() + _FIRST_WAKE_S
        self._waking = asyncio.create_task(self._wake())
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._late_s, self._due = self.seconds, math.inf
        if self._waking is not None:
            self._waking.cancel()

    async def _wake(self) -> None:
        pause_s = _FIRST_WAKE_S
        while True:
            await asyncio.sleep(self._due - time.monotonic())
            pause_s = min(2 * pause_s, _LONGEST_WAKE_S)
            self._late_s, self._due = self.seconds, time.monotonic() + pause_s

    @property
    def seconds(self) -> float:
        """Return the sum of the delays so far."""
        return self._late_s + max(time.monotonic() - self._due, 0.0)


class Outages:
    """Log the outages of one Redis: the first error, a reminder every 30 s, and the end. ``address``: no password."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began: float | None = None
        self._log_next = 0.0
        self._ended = self._lasted_s = 0.0
        self.password_is_final = False
        """Whoever gave the password is there to give another: one that is refused is no outage."""

    def report(self, error: BaseException) -> bool:
        """Record that a command failed with one of ``OUTAGE``. Return False for one that no retry mends."""
        if self.password_is_final and isinstance(error, AuthenticationError):
            return False
        now = time.monotonic()
        if self._began is None:
            self._began, self._log_next = now, now
        if now < self._log_next:
            return True
        self._log_next = now + _LOG_EVERY_S
        fields = {
            "address": self._address,
            "error": str(error) or type(error).__name__,
            "seconds": round(now - self._began, 1),
        }
        if isinstance(error, RecordError):
            logger.warning("cannot read the shared volume; retrying. Is it mounted?", **fields)
        elif isinstance(error, PassingRefusalError):
            logger.warning("Redis refuses commands for now; retrying", **fields)
        elif isinstance(error, AuthenticationError):
            logger.warning("Redis refuses the password; retrying. Has it changed?", **fields)
        else:
            logger.warning("cannot reach Redis; retrying. Is the service running?", **fields)
        return True

    def end(self) -> None:
        """Record that Redis has executed a command."""
        if self._began is None:
            return
        self._ended = time.monotonic()
        self._lasted_s = self._ended - self._began
        logger.info("Redis is available again", address=self._address, seconds=round(self._lasted_s, 1))
        self._began = None

    def ended_within(self, seconds: float, *, longer_than_s: float) -> bool:
        """Return True if an outage longer than ``longer_than_s`` lasts, or has ended in the last ``seconds``."""
        now = time.monotonic()
        if self._began is not None:
            return now - self._began > longer_than_s
        return self._lasted_s > longer_than_s and now - self._ended < seconds

    async def retry_through_outage(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await ``call()`` until Redis answers it, with half a second between attempts and no limit.

        Other errors than those of ``OUTAGE`` are raised, and those that ``report`` returns False for.
        """
        while True:
            try:
                answer = await call()
            except OUTAGE as error:
                if not self.report(error):
                    raise
                await asyncio.sleep(_RETRY_AFTER_S)
                continue
            self.end()
            return answer


class _Connection:
    """Add these differences, and the reading of pipelines; mixed in before redis-py's own connection classes."""

    socket_timeout: float | None
    socket_connect_timeout: float | None
    _parser: Any

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect and authenticate once. Raises redis-py's ``TimeoutError`` after ``socket_connect_timeout``."""
        connection: Any = super()
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                await connection.connect_check_health(check_health, retry_socket_connect)
        except TimeoutError:
            await connection.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout connecting to Redis or authenticating") from None

    async def disconnect(self, *arguments: Any, **options: Any) -> None:
        """Close the connection. A server that does not answer the end of TLS in time is left: nothing is lost."""
        connection: Any = super()
        with contextlib.suppress(RedisTimeoutError):
            await connection.disconnect(*arguments, **options)

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Send a command. Raises redis-py's ``TimeoutError`` after ``socket_timeout``."""
        connection: Any = super()
        limit_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit_s):
                await connection.send_packed_command(command, check_health)
        except TimeoutError:
            await connection.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit_s

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Read a response. Raises ``PassingRefusalError`` for a refusal that passes."""
        connection: Any = super()
        try:
            return await connection.read_response(*arguments, **options)
        except ResponseError as error:
            if not _passes(error):
                raise
            if isinstance(error, ReadOnlyError):
                await connection.disconnect(nowait=True)
            raise PassingRefusalError(str(error)) from error

    async def read_responses(self, count: int) -> list[Any]:
        """Read the responses to ``count`` commands of one pipeline; that to a refused one is the exception.

        redis-py's ``read_response`` takes several coroutines for each. The caller limits the time, and disconnects
        after an exception, such as ``PassingRefusalError`` from a server that has become read-only.
        """
        try:
            responses = [await self._parser.read_response() for _ in range(count)]
        except OSError as error:
            raise RedisConnectionError(f"Error while reading from Redis: {error}") from error
        return [_refusal(each) if isinstance(each, ResponseError) else each for each in responses]


def _refusal(error: ResponseError) -> ResponseError | PassingRefusalError:
    """Return a refusal that passes as ``PassingRefusalError``; raise it where a new connection may reach a master."""
    if not _passes(error):
        return error
    passing = PassingRefusalError(str(error))
    if isinstance(error, ReadOnlyError):
        raise passing from error
    return passing


def _passes(error: ResponseError) -> bool:
    return isinstance(error, _PASSING_CLASSES) or str(error).startswith(_PASSING_CODES)


class PlainConnection(_Connection, Connection):
    """Connect to ``redis://``."""


class TlsConnection(_Connection, SSLConnection):
    """Connect to ``rediss://``."""


def redis_client(url: str, **options: Any) -> Redis:
    """Return ``Redis.from_url`` with these connections; ``options`` are those of redis-py."""
    client = Redis.from_url(url, **options)
    pool = client.connection_pool
    # Not by an argument: for rediss:// redis-py puts its own class in the place of a given one.
    pool.connection_class = TlsConnection if issubclass(pool.connection_class, SSLConnection) else PlainConnection
    return client


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
    """The address of Redis and the credentials of its user."""

    url: str
    """``redis://host:port/db`` or ``rediss://…``, without a password."""
    password: str = field(default="", repr=False)
    username: str = ""
    """A user of Redis's ACL; empty: the user ``default``."""
    tls: RedisTls = RedisTls()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, url: str = "") -> Self:
        """Read ``PLAUDIT_REDIS_…``; a given ``url`` goes first. Raises ``PasswordFileError`` for an unreadable file."""
        tls = RedisTls(
            ca_file=environment.get("PLAUDIT_REDIS_TLS_CA", ""),
            certificate_file=environment.get("PLAUDIT_REDIS_TLS_CERTIFICATE", ""),
            key_file=environment.get("PLAUDIT_REDIS_TLS_KEY", ""),
            check_server_name=environment.get("PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME", "").lower() != "false",
        )
        username = environment.get("PLAUDIT_REDIS_USERNAME", "")
        return cls(url or environment.get("PLAUDIT_REDIS_URL", ""), _password(environment), username, tls)

    def check(self) -> None:
        """Raise ``ValueError`` if ``url`` is none of a Redis; it may hold a password, and is not shown."""
        try:
            parse_url(self.url)
            int(urlsplit(self.url).path.strip("/") or 0)  # redis-py takes any other text for database 0
        except ValueError as error:
            raise ValueError(
                f"the URL of Redis cannot be read ({error}): write redis://host:port/0, or rediss:// for TLS"
            ) from error

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
        """Return a new client, which sends a lost command again up to ``retries`` times; 0 if that repeats a read.

        ``timeout_s`` is for each answer, longer than any BLOCK that it sends. None: the caller applies its own.
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

        If the connection's ``error`` does not show the cause, the server is contacted a second time.
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
        what, remedy = self._cause_and_remedy(cause)
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

    def _cause_and_remedy(self, cause: ssl.SSLError) -> tuple[str, str]:
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
    found = (each for each in causes(error) if isinstance(each, ssl.SSLError))
    return next((each for each in found if not isinstance(each, ssl.SSLEOFError)), None)


def _password(environment: Mapping[str, str]) -> str:
    """Read the file of ``PLAUDIT_REDIS_PASSWORD_FILE``, else ``PLAUDIT_REDIS_PASSWORD``; empty for none."""
    file = environment.get("PLAUDIT_REDIS_PASSWORD_FILE")
    if not file:
        return environment.get("PLAUDIT_REDIS_PASSWORD", "")
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise PasswordFileError(f"PLAUDIT_REDIS_PASSWORD_FILE {file} cannot be read: {error.strerror}") from error


class LibraryMissingError(PassingRefusalError):
    """Redis lacks a library of functions, and this user may not load it. It passes: an admin may load it."""


class FunctionLibrary:
    """Hold the text of a library of Redis Functions: the code that changes several keys of Redis at once.

    The names of the library and its functions hold a digest of its code. Versions of the code live side by side in one
    Redis, as during an upgrade, and a caller never runs another version than its own. Redis keeps libraries in its
    append-only file, on its replicas and through FLUSHALL. In a run's own Redis only ``admin`` may load one; the users
    of the roles may only call functions, so that no process can run code of its own there.

    Args:
        bodies: by function, its Lua code. The first line is ``#!lua``, with ``flags=…`` if it has any; the code refers
            to ``KEYS`` and ``ARGV``.
        shared: Lua code in front of the functions; Redis executes it once, when it loads the library.
        begin: Lua code with which every function begins.
    """

    def __init__(self, family: str, bodies: Mapping[str, str], *, shared: str = "", begin: str = "") -> None:
        digest = hashlib.sha256(repr((shared, begin, sorted(bodies.items()))).encode()).hexdigest()[:_DIGEST_DIGITS]
        self.name: Final = f"{family}_{digest}"
        self.functions: Final[Mapping[str, str]] = {name: f"{self.name}_{name}" for name in bodies}
        functions = "".join(_registered(self.functions[name], body, begin) for name, body in bodies.items())
        self.text: Final = f"{_HEADER} name={self.name}\n{shared}\n{functions}"


def _registered(function: str, body: str, begin: str) -> str:
    header, _, code = body.partition("\n")
    if not header.startswith(_HEADER):
        raise ValueError(f"function {function} begins with {header!r} instead of {_HEADER}")
    given = header.removeprefix(_HEADER).strip().removeprefix("flags=")
    flags = ", ".join(f"'{flag}'" for flag in given.split(",") if flag)
    return (
        f"redis.register_function{{function_name='{function}', flags={{{flags}}}, callback=function(KEYS, ARGV)\n"
        f"{begin}\n{code}end}}\n"
    )


def is_missing(error: object) -> bool:
    """Return True for Redis's answer to a call of a function that no loaded library has."""
    return isinstance(error, ResponseError) and str(error).endswith("Function not found")


def missing_error(library: FunctionLibrary, load_error: object) -> LibraryMissingError:
    """Return the error for a library that is still missing after an attempt to load it, which ``load_error`` ended."""
    forbidden = f"this user may not load it (that takes {NEEDED_PERMISSIONS})"
    reason = forbidden if isinstance(load_error, NoPermissionError) else load_error
    return LibraryMissingError(f"Redis lacks the functions {library.name}, and {reason}")
