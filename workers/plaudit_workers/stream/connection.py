"""One process's connection to the transport: opened once, checked once, shared by everything that uses the streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from plaudit_wire.codec import decode, decoder
from plaudit_wire.errors import RefusedError, StoppedError
from plaudit_wire.function_library import NEEDED_PERMISSIONS, LibraryMissingError
from plaudit_wire.limits import LIVE_WITHIN_S
from plaudit_wire.messages import Announcement
from plaudit_wire.names import Names
from plaudit_wire.outage import OUTAGE, Outages
from plaudit_wire.records import WorkerRecord
from plaudit_wire.redis_access import GRANTS
from plaudit_wire.redis_address import RedisAddress
from plaudit_workers.stream.transitions.process import beat, open_streams
from plaudit_workers.stream.transitions.runner import ScriptRunner
from plaudit_workers.stream.transitions.scripts import Scripts
from plaudit_workers.stream.volume import SpillFolder

__all__ = ["RedisAddress", "Transport"]

T = TypeVar("T")

_COMMAND_TIMEOUT_S = 5.0
_BLOCKING_TIMEOUT_S = 10.0
_MEMORY_ASKED_EVERY_S = 1.0
_TRY_AGAIN_S = 0.5


class Transport:
    """Give a process access to the run's streams. Open it with ``await Transport.open(address, run)``.

    Attributes:
        commands: a client for plain commands, which it sends again when a connection breaks.
        scripts: sends transitions; waits through outages of Redis.
        reads: sends transitions that must not run as usual after an outage; raises the outage instead.
    """

    def __init__(self, address: RedisAddress, run: str, spill: Path | None, scripts: Scripts) -> None:
        self.address = address
        self.names = Names(run)
        self.commands = address.client(timeout_s=_COMMAND_TIMEOUT_S, retries=5)
        self._client = address.client(timeout_s=None, retries=0)
        self.outages = Outages(address.url)
        self.scripts = ScriptRunner(self._client, self.names.prefix, scripts, self.outages)
        self.reads = ScriptRunner(self._client, self.names.prefix, scripts, self.outages, waits=False)
        self.volume = SpillFolder(spill)
        self._blocking: list[Redis] = []
        self._memory_share = 0.0
        self._memory_asked = 0.0

    @classmethod
    async def open(
        cls,
        address: RedisAddress,
        run: str,
        spill: Path | None = None,
        scripts: Scripts | None = None,
        stop: asyncio.Event | None = None,
    ) -> Self:
        """Connect, check the server and create the streams' consumer groups.

        Args:
            spill: folder on the shared volume for records above 256 KiB; None keeps all in Redis.
            stop: wait while Redis is unavailable, until this is set; None: raise at once.

        Raises:
            RefusedError: Redis refuses the password or the certificate, denies a command, is older than 7.0, or may
                evict keys; without ``stop`` also when it cannot be reached.
            StoppedError: ``stop`` was set before Redis became available.
        """
        transport = cls(address, run, spill, scripts or Scripts())
        try:
            while not await transport._opened(wait=stop is not None):
                assert stop is not None
                await _pause(stop)
        except BaseException:
            await transport.close()
            raise
        return transport

    async def _opened(self, *, wait: bool) -> bool:
        """Return False while Redis is unavailable and the caller waits for it."""
        try:
            check_server(self.address.url, await self._about_server())
            await self.reads.run(open_streams(lost=False))
        except AuthenticationError as error:
            raise self._refused(error) from error
        except NoPermissionError as error:
            raise self._not_permitted(error) from error
        except OUTAGE as error:
            if isinstance(error, LibraryMissingError) and self.address.username not in GRANTS:
                raise self._not_permitted(error) from error
            if problem := await self.address.tls_problem(error):
                raise RefusedError(problem) from error
            if not wait:
                raise RefusedError(
                    f"Redis at {self.address.url} cannot be reached: {error}. Is it running, and is "
                    "spec.transport.url right (rediss:// where it speaks TLS)?"
                ) from error
            self.outages.report(error)
            return False
        except ResponseError as error:
            raise self._refused(error) from error
        self.outages.end()
        return True

    def _refused(self, error: Exception) -> RefusedError:
        return RefusedError(
            f"Redis at {self.address.url} refuses the password: {error}. Give it in "
            "spec.transport.passwordSecret (to a process started by hand: PLAUDIT_REDIS_PASSWORD)"
        )

    def _not_permitted(self, error: Exception) -> RefusedError:
        user = self.address.username or "default"
        return RefusedError(
            f"Redis at {self.address.url} denies user {user} a command: {error}. Give the user that "
            f"spec.transport.username names these rules: ~{self.names.prefix}* +@all -@dangerous +info "
            f"{NEEDED_PERMISSIONS} (~plaudit:* for all runs)"
        )

    async def _about_server(self) -> dict[str, Any]:
        client = self.address.client(timeout_s=_COMMAND_TIMEOUT_S, retries=0)
        try:
            return {**await client.info("server"), **await client.info("memory")}
        finally:
            await client.aclose(close_connection_pool=True)

    async def retry_through_outage(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await ``call()`` until Redis answers it, however long an outage lasts; see ``Outages``."""
        return await self.outages.retry_through_outage(call)

    async def spill(self, group: str, name: str, record: bytes) -> bytes:
        """Write a record to the shared volume, waiting while it is unavailable; return the value for Redis."""
        return await self.retry_through_outage(lambda: self.volume.store(group, name, record))

    async def recreate_groups(self) -> None:
        """Create the consumer groups that Redis has lost (FLUSHALL, failover), and count it for an alert."""
        await self.scripts.run(open_streams(lost=True))

    def blocking_client(self) -> Redis:
        """Return a client for blocking reads; ``close`` of the transport closes it.

        It does not retry: a repeated read would hide the entries of the lost reply.
        """
        client = self.address.client(timeout_s=_BLOCKING_TIMEOUT_S, retries=0)
        self._blocking.append(client)
        return client

    async def now(self) -> float:
        """Return the transport's clock, seconds since the epoch."""
        seconds, microseconds = await self.commands.time()
        return float(seconds) + float(microseconds) / 1e6

    async def announced(self) -> Announcement | None:
        """Return the policy that rollouts must load; None before the first announcement."""
        stored: Any = await self.commands.hget(self.names.state, "announced")
        return None if stored is None else decode(stored, Announcement)

    async def beat(self, record: WorkerRecord) -> None:
        """Record that this process is alive; to be repeated every 5 s."""
        await self.scripts.run(beat(record))

    async def workers(self) -> list[WorkerRecord]:
        """Return the processes whose last heartbeat is at most ``LIVE_WITHIN_S`` old."""
        since = await self.now() - LIVE_WITHIN_S
        names: Any = await self.commands.zrangebyscore(self.names.workers, since, "+inf")
        records: Any = await self.commands.hmget(self.names.worker_records, names) if names else []
        return [decoder(WorkerRecord).decode(record) for record in records if record is not None]

    async def memory_share(self) -> float:
        """Return Redis's used memory ÷ its limit (0 without one), at most a second old."""
        if time.monotonic() - self._memory_asked > _MEMORY_ASKED_EVERY_S:
            self._memory_asked = time.monotonic()
            about = await self.commands.info("memory")
            limit = int(about["maxmemory"])
            self._memory_share = int(about["used_memory"]) / limit if limit else 0.0
        return self._memory_share

    async def close(self) -> None:
        """Close the connections; calls that still wait for Redis are cancelled."""
        await asyncio.gather(self.scripts.stop(), self.reads.stop())
        for client in (self.commands, self._client, *self._blocking):
            await client.aclose(close_connection_pool=True)


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TRY_AGAIN_S):
            await stop.wait()
    if stop.is_set():
        raise StoppedError("stopped while Redis was unavailable")


def check_server(url: str, about: Mapping[str, Any]) -> None:
    """Check what Redis's ``INFO`` reports.

    Raises:
        RefusedError: the server is a Sentinel or a node of a cluster, too old, or evicts keys.
    """
    if (mode := about.get("redis_mode", "standalone")) != "standalone":
        raise RefusedError(
            f"Redis at {url} runs in mode {mode}, which Plaudit does not support yet: a run needs one server. Give the "
            "address of a standalone Redis, or of a proxy or Service that always leads to the current master"
        )
    version = str(about.get("redis_version", "0"))
    if int(version.split(".")[0]) < 7:
        raise RefusedError(f"Redis at {url} is version {version}; Plaudit needs 7.0 or Valkey")
    policy = about.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise RefusedError(
            f"Redis at {url} has maxmemory-policy {policy}: it would delete samples silently. Set it to noeviction"
        )
