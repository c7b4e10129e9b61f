"""Connect one process to the run's streams (``Transport``), and send its transitions to Redis (``ScriptRunner``).

A transport is opened once, checked once, and shared by everything that uses the streams. Concurrent calls share a
pipeline: a batch holds the calls that wait when it begins; no call waits for a batch to fill. Every transition is
idempotent, so a call whose reply was lost is sent again until Redis has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import hiredis
import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import RefusedError, StoppedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, decode, decoder
from plaudit_wire.names import Names
from plaudit_wire.records import LIVE_WITHIN_S, WorkerRecord
from plaudit_wire.redis import (
    NEEDED_PERMISSIONS,
    OUTAGE,
    Lateness,
    LibraryMissingError,
    Outages,
    PassingRefusalError,
    RedisAddress,
    is_missing,
    missing_error,
)
from plaudit_wire.redis_access import GRANTS
from plaudit_workers.process import unless_stopped
from plaudit_workers.stream.calls import Argument, Call, beat, open_streams
from plaudit_workers.stream.libraries import Scripts
from plaudit_workers.stream.volume import SpillFolder

logger = get_logger(__name__)
Answer = TypeVar("Answer")
T = TypeVar("T")
_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment] # says: of one part
_CALLS_A_PIPELINE = 256
_ANSWERED_WITHIN_S = 5.0
_LEAST_BYTES_PER_S = 1e6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_COMMAND_TIMEOUT_S = 5.0
_BLOCKING_TIMEOUT_S = 10.0
_REPLIES = 2
"""Of heartbeats: a single reply is late too after a pause of Redis, and when this process starts."""
_MEMORY_ASKED_EVERY_S = 1.0
_TRY_AGAIN_S = 0.5


class Transport:
    """Give a process access to the run's streams. Open it with ``await Transport.open(address, run)``.

    Records above 256 KiB go to ``spill`` on the shared volume; None keeps all in Redis.
    """

    def __init__(
        self, address: RedisAddress, run: str, spill: Path | None = None, scripts: Scripts | None = None
    ) -> None:
        scripts = scripts or Scripts()
        self.address = address
        self.names = Names(run)
        self.commands = address.client(timeout_s=_COMMAND_TIMEOUT_S, retries=5)
        """A client for plain commands, which it sends again when a connection breaks."""
        self._client = address.client(timeout_s=None, retries=0)
        self.outages = Outages(address.url)
        self.scripts = ScriptRunner(self._client, self.names.prefix, scripts, self.outages)
        """Sends transitions; waits through outages of Redis."""
        self.reads = ScriptRunner(self._client, self.names.prefix, scripts, self.outages, waits=False)
        """Sends transitions that must not run as usual after an outage; raises the outage instead."""
        self.volume = SpillFolder(spill)
        self._blocking: list[Redis] = []
        self._memory_share = 0.0
        self._memory_asked = 0.0
        self._replies_s: deque[float] = deque(maxlen=_REPLIES)
        """Seconds until Redis replied to the newest heartbeats."""

    @classmethod
    async def open(
        cls,
        address: RedisAddress,
        run: str,
        spill: Path | None = None,
        scripts: Scripts | None = None,
        stop: asyncio.Event | None = None,
    ) -> Self:
        """Connect, check the server and create the streams' consumer groups; raise ``RefusedError`` if it is unfit.

        While Redis is unavailable, wait until ``stop`` is set, then raise ``StoppedError``; without ``stop`` refuse at
        once.
        """
        transport = cls(address, run, spill, scripts)
        try:
            while not await transport._try_to_open(wait=stop is not None):
                assert stop is not None
                if not await unless_stopped(stop, asyncio.sleep(_TRY_AGAIN_S)):
                    raise StoppedError("stopped while Redis was unavailable")
        except BaseException:
            await transport.close()
            raise
        return transport

    async def _try_to_open(self, *, wait: bool) -> bool:
        """Return False while Redis is unavailable and the caller waits for it."""
        try:
            check_server(self.address.url, await self._about_server())
            await self.reads.run(open_streams(lost=False))
        except NoPermissionError as error:
            raise self._not_permitted(error) from error
        except (AuthenticationError, ResponseError) as error:
            raise RefusedError(
                f"Redis at {self.address.url} refuses the password: {error}. Give it in "
                "spec.transport.passwordSecret (to a process started by hand: PLAUDIT_REDIS_PASSWORD)"
            ) from error
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
        self.outages.end()
        return True

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
        logger.error("the streams' consumer groups are missing; creating them again")
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
        """Record that this process is alive, and how fast Redis replied to it; to be repeated every 5 s."""
        reply_s = min(self._replies_s) if len(self._replies_s) == _REPLIES else 0.0
        asked = time.monotonic()
        with Lateness() as late:
            await self.scripts.run(beat(msgspec.structs.replace(record, reply_s=reply_s)))
        self._replies_s.append(max(time.monotonic() - asked - late.seconds, 0.0))

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


def check_server(url: str, about: Mapping[str, Any]) -> None:
    """Refuse a server whose ``INFO`` says that it is a Sentinel or a cluster's node, too old, or evicts keys."""
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


class ScriptRunner:
    """Send calls of transitions, concurrent ones in one pipeline.

    Args:
        client: without retries and timeouts; the runner applies its own.
        scripts: the code. Where this user may, the runner loads it into a Redis that lacks it; else it waits for it.
        waits: retries calls through an outage, however long it lasts; False: raises it to the caller.
    """

    def __init__(self, client: Redis, prefix: str, scripts: Scripts, outages: Outages, *, waits: bool = True) -> None:
        self._client = client
        self._library = scripts.library
        self._outages = outages
        self._waits = waits
        self._waiting: deque[_Request] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._stopped = False
        self._heads = {name: ("FCALL", function, "1", prefix) for name, function in self._library.functions.items()}

    async def run(self, call: Call[Answer]) -> Answer:
        """Run one transition and return its answer.

        Raise ``redis.RedisError`` if Redis refused the call for good; with ``waits=False`` also in an outage.
        """
        (answer,) = await self.answers((call,))
        return call.read(answer)

    async def run_many(self, calls: Sequence[Call[Answer]]) -> list[Answer]:
        """Run several transitions and return their answers, in the same order. Raises as ``run``."""
        answers = await self.answers(calls)
        return [call.read(answer) for call, answer in zip(calls, answers, strict=True)]

    async def answers(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return Redis's unconverted answers to several transitions. Raises as ``run``."""
        if not calls:
            return []
        # Encoded here: what cannot be fails its caller only.
        request = _Request([_pack((*self._heads[call.script], call.group, *call.arguments)) for call in calls])
        self._enqueue(request)
        return await request.done

    async def stop(self) -> None:
        """Cancel the calls that still wait for Redis."""
        self._stopped = True
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft().done.cancel()

    def _enqueue(self, request: _Request) -> None:
        if self._stopped:
            request.done.cancel()
            return
        self._waiting.append(request)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            batch, size = [], 0
            while self._waiting and size < _CALLS_A_PIPELINE:
                batch.append(self._waiting.popleft())
                size += len(batch[-1].left)
            try:
                await self._send(batch)
            except OUTAGE as error:
                await self._after_outage(batch, error)
            except asyncio.CancelledError:
                self._waiting.extendleft(reversed(batch))
                raise
            except Exception as error:  # the boundary to the callers: each of them raises it
                for request in batch:
                    request.fail(error)

    async def _send(self, batch: Sequence[_Request]) -> None:
        """Send the calls that have no answer yet; those that Redis refuses for now are sent again after a pause."""
        places = [(request, i) for request in batch for i in request.left]
        replies = await self._replies([request.calls[i] for request, i in places])
        for (request, i), reply in zip(places, replies, strict=True):
            request.answers[i] = reply
        if not isinstance(replies[0], PassingRefusalError):
            self._outages.end()
        for request in batch:
            request.left = [i for i in request.left if isinstance(request.answers[i], PassingRefusalError)]
            if not request.left or not self._waits or request.done.done():
                request.resolve()
                continue
            self._outages.report(request.answers[request.left[0]])
            asyncio.get_running_loop().call_later(request.next_pause_s(), self._enqueue, request)

    async def _after_outage(self, batch: Sequence[_Request], error: Exception) -> None:
        """Return the batch to the head of the queue and pause; or raise the outage to the callers."""
        if not self._outages.report(error) or not self._waits:
            for request in batch:
                request.fail(error)
            return
        self._waiting.extendleft(request for request in reversed(batch) if not request.done.done())
        if self._waiting:
            await asyncio.sleep(self._waiting[0].next_pause_s())

    async def _replies(self, packed: Sequence[bytes]) -> list[Any]:
        replies = await self._pipeline(packed)
        unknown = [i for i, reply in enumerate(replies) if is_missing(reply)]
        if unknown:
            load = _pack(("FUNCTION", "LOAD", "REPLACE", self._library.text))
            loaded, *again = await self._pipeline([load, *(packed[i] for i in unknown)])
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = missing_error(self._library, loaded) if is_missing(reply) else reply
        return replies

    async def _pipeline(self, packed: Sequence[bytes]) -> list[Any]:
        pool: Any = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            async with asyncio.timeout(_ANSWERED_WITHIN_S + sum(map(len, packed)) / _LEAST_BYTES_PER_S):
                await connection.send_packed_command(packed)
                replies: list[Any] = await connection.read_responses(len(packed))
                return replies
        except BaseException:
            await connection.disconnect(nowait=True)  # replies may still arrive and would reach its next user
            raise
        finally:
            await pool.release(connection)


class _Request:
    """Hold the calls of one caller that wait for their answers, in Redis's protocol."""

    def __init__(self, calls: Sequence[bytes]) -> None:
        self.calls = calls
        self.answers: list[Any] = [None] * len(calls)
        self.left = list(range(len(calls)))
        self._failures = 0
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def resolve(self) -> None:
        """Resolve the caller's future with the answers, or with the first error among them."""
        if self.done.done():
            return
        failed = next((answer for answer in self.answers if isinstance(answer, Exception)), None)
        if failed is None:
            self.done.set_result(self.answers)
        else:
            self.done.set_exception(failed)

    def fail(self, error: Exception) -> None:
        """Resolve the caller's future with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def next_pause_s(self) -> float:
        """Return the pause before the next attempt; it doubles up to a second."""
        self._failures += 1
        return backoff_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
