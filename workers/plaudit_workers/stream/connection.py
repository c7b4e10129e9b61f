"""One process's connection to the transport: opened once, checked once, shared by all that speak the protocol."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Self

import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ResponseError

from plaudit_wire.codec import decode, decoder
from plaudit_wire.messages import Announcement
from plaudit_wire.names import CONSUMER_GROUPS, Names
from plaudit_wire.records import WorkerRecord
from plaudit_wire.redis_address import RedisAddress
from plaudit_workers.process import RefusedError
from plaudit_workers.stream.transitions.runner import ScriptRunner
from plaudit_workers.stream.transitions.scripts import OUTAGE, Scripts
from plaudit_workers.stream.volume import SpillFolder

__all__ = ["HEARD_WITHIN_S", "RedisAddress", "Transport"]

HEARD_WITHIN_S = 20.0
"""A process whose last heartbeat is older is not listed as alive."""

_COMMAND_TIMEOUT_S = 5.0
_BLOCKING_TIMEOUT_S = 10.0
_MEMORY_ASKED_EVERY_S = 1.0


class Transport:
    """A process's way to the run's streams. Open it with ``await Transport.open(address, run)``.

    Attributes:
        names: the run's keys.
        commands: a client for plain commands, which it sends again when a connection breaks.
        scripts: sends transitions and waits out an outage of Redis.
        reads: sends transitions that must not run as if nothing had happened after an outage; raises instead.
        volume: records that are too large for Redis.
    """

    def __init__(self, address: RedisAddress, run: str, spill: Path | None, scripts: Scripts) -> None:
        self.address = address
        self.names = Names(run)
        self.commands = address.client(timeout_s=_COMMAND_TIMEOUT_S, retries=5)
        self._client = address.client(timeout_s=None, retries=0)
        self.scripts = ScriptRunner(self._client, self.names.prefix, scripts)
        self.reads = ScriptRunner(self._client, self.names.prefix, scripts, patience_s=0.0)
        self.volume = SpillFolder(spill)
        self._blocking: list[Redis] = []
        self._memory_share = 0.0
        self._memory_asked = 0.0

    @classmethod
    async def open(
        cls, address: RedisAddress, run: str, spill: Path | None = None, scripts: Scripts | None = None
    ) -> Self:
        """Connects, checks the server and creates the streams' consumer groups.

        Args:
            address: of Redis.
            run: the run's id.
            spill: folder on the shared volume for records above 256 KiB; None keeps all in Redis.
            scripts: other texts of the transitions.

        Raises:
            RefusedError: Redis cannot be reached, refuses the password, or is older than 7.0.
        """
        transport = cls(address, run, spill, scripts or Scripts())
        try:
            await transport._check_server()
            await transport.create_groups()
        except RefusedError:
            await transport.close()
            raise
        return transport

    async def _check_server(self) -> None:
        try:
            about: dict[str, Any] = {**await self.commands.info("server"), **await self.commands.info("memory")}
        except (AuthenticationError, ResponseError) as error:
            raise RefusedError(
                f"Redis at {self.address.url} refuses the password: {error}. Give it in "
                "spec.transport.passwordSecret (to a process started by hand: PLAUDIT_REDIS_PASSWORD)"
            ) from error
        except OUTAGE as error:
            raise RefusedError(
                await self.address.tls_problem(error)
                or f"Redis at {self.address.url} cannot be reached: {error}. Is it running, and is "
                "spec.transport.url right (rediss:// where it speaks TLS)?"
            ) from error
        policy = about.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise RefusedError(
                f"Redis at {self.address.url} has maxmemory-policy {policy}: it would delete samples silently. "
                "Set it to noeviction"
            )
        version = str(about.get("redis_version", "0"))
        if int(version.split(".")[0]) < 7:
            raise RefusedError(f"Redis at {self.address.url} is version {version}; Plaudit needs 7.0 or Valkey")

    async def create_groups(self) -> int:
        """Creates the consumer groups that are missing, from each stream's begin; returns how many were."""
        created = 0
        for stream, group in CONSUMER_GROUPS.items():
            try:
                await self.commands.xgroup_create(self.names.stream(stream), group, id="0", mkstream=True)
                created += 1
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        return created

    async def recreate_groups(self) -> None:
        """After Redis has lost them (FLUSHALL, failover): creates them, and counts it for an alert."""
        if await self.create_groups():
            await self.commands.hincrby(self.names.counters, "groups_recreated", 1)

    def blocking_client(self) -> Redis:
        """A client for one blocking read; ``close`` of the transport closes it.

        No retries: a repeated read would hide the entries of the reply that was lost.
        """
        client = self.address.client(timeout_s=_BLOCKING_TIMEOUT_S, retries=0)
        self._blocking.append(client)
        return client

    async def now(self) -> float:
        """The transport's clock, seconds since the epoch."""
        seconds, microseconds = await self.commands.time()
        return float(seconds) + float(microseconds) / 1e6

    async def announced(self) -> Announcement | None:
        """The policy that rollouts must hold; None before the first."""
        stored: Any = await self.commands.hget(self.names.state, "announced")
        return None if stored is None else decode(stored, Announcement)

    async def beat(self, record: WorkerRecord) -> None:
        """Tells that this process lives; to be repeated every 5 s."""
        await self.scripts.call("beat", "", record.worker, msgspec.msgpack.encode(record))

    async def workers(self) -> list[WorkerRecord]:
        """The processes heard within the last 20 s."""
        since = await self.now() - HEARD_WITHIN_S
        names: Any = await self.commands.zrangebyscore(self.names.workers, since, "+inf")
        records: Any = await self.commands.hmget(self.names.worker_records, names) if names else []
        return [decoder(WorkerRecord).decode(record) for record in records if record is not None]

    async def memory_share(self) -> float:
        """Used memory of Redis ÷ its limit (0 without one), at most a second old."""
        if time.monotonic() - self._memory_asked > _MEMORY_ASKED_EVERY_S:
            self._memory_asked = time.monotonic()
            about = await self.commands.info("memory")
            limit = int(about["maxmemory"])
            self._memory_share = int(about["used_memory"]) / limit if limit else 0.0
        return self._memory_share

    async def close(self) -> None:
        """Closes the connections; calls that still wait for Redis are cancelled."""
        await asyncio.gather(self.scripts.stop(), self.reads.stop())
        for client in (self.commands, self._client, *self._blocking):
            await client.aclose(close_connection_pool=True)
