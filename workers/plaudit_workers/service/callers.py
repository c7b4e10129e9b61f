"""Hold the sessions of all callers at one gateway: offer their samples to Redis in order, and await and write results.

All gateways share the caller's session in Redis (``stream.sessions``). Each reads all of its results and resolves those
that a request of its own awaits. What no request awaits stays in Redis for whoever asks under its id: for ten minutes
after it was delivered (the answer may have been lost on its way), else for ``kept_s``. Later the id is scored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Service
from plaudit_workers.process import Supervised, set_within
from plaudit_workers.service.lines import SampleOutput
from plaudit_workers.service.requests import SubmittedSamples
from plaudit_workers.service.tokens import token_of
from plaudit_workers.stream.calls import Submission, SubmittedGroup
from plaudit_workers.stream.sessions import (
    CHECK_LOSSES_EVERY_S,
    KEPT_S,
    UPKEEP_EVERY_S,
    GroupResult,
    StreamSession,
    encoded_group,
)
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_OFFERED_AT_ONCE = 128
_DELETE_OLD_EVERY_S = 30.0
_DELETED_AT_ONCE = 1000
_DELIVERED_KEPT_S = 600.0
_DELIVERED_KEPT = 50_000
_ROOM_PAUSE_S = 0.05
_WAIT_S = 2.0
"""A token's samples should wait for the others' for no longer."""
_LEAST_ROOM = 8
_SHORT_OF_MEMORY = 0.9
"""Results are deleted from this part on of the share of memory above which nothing is submitted."""
_SESSION = "http."
"""Sessions of callers: this and the caller's name."""


@dataclass(frozen=True)
class Missing:
    """Hold the reason that a group has no result under its id."""

    kind: str
    message: str


_CONFLICT = Missing("conflict", "another sample was submitted under it. Give each sample an id of its own")


@dataclass(frozen=True)
class Limits:
    """Hold the bounds of one token at one gateway."""

    queued: int = 16_384
    """Samples that wait for room in Redis; more are refused."""
    queued_bytes: int = 256 << 20
    """Their bytes as they are stored."""
    kept_s: float = 3600.0


class FairRoom:
    """Choose how many samples a token may have in work, so that another's next sample waits for few seconds.

    Workers take samples in the order of their submission, so what one token has in work is what the others wait for.
    The room follows the waits that results report: it shrinks where they exceed ``_WAIT_S``, and doubles while it is
    used up and nobody waits for half as long. It is judged once a turnover, by the last quarter of its results, and
    only by samples that were submitted since it was set: the first ones of a burst wait for nothing.

    Args:
        most: of samples, so many that no worker runs out of work; it begins with half.
    """

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self.size = max(min(most, _LEAST_ROOM), most // 2)
        self._set_at = now
        self._seen: list[tuple[float, float]] = []
        """Seconds of waiting, and in all, of the samples since it was judged."""
        self.is_used_up = False
        """A group has found no room since it was set."""

    def note(self, result: GroupResult, now: float) -> None:
        """Learn from the result of a group, at monotonic seconds."""
        self._seen += [
            (sample.waited_s, sample.seconds) for sample in result.samples if now - sample.seconds >= self._set_at
        ]
        if len(self._seen) < max(self.size, _LEAST_ROOM):
            return
        last = sorted(self._seen[-(len(self._seen) // 4) :])
        waited_s, seconds = last[len(last) // 2]
        if waited_s > _WAIT_S:
            # At the same pace (Little's law), so that as many are in work and fewer wait.
            self._set(max(_LEAST_ROOM, round(self.size * (seconds - waited_s + _WAIT_S) / seconds)), now)
        elif last[-1][0] < _WAIT_S / 2 and self.is_used_up:
            self._set(2 * self.size, now)
        self._seen.clear()

    def _set(self, size: int, now: float) -> None:
        self.size = min(size, self._most)
        self._set_at, self.is_used_up = now, False


class Awaited:
    """Hold one group that requests of this gateway await."""

    __slots__ = (
        "accepted",
        "early",
        "encoded",
        "is_named",
        "is_pending",
        "num_bytes",
        "num_requests",
        "result",
        "since",
    )

    def __init__(self, encoded: SubmittedGroup, *, is_named: bool) -> None:
        self.encoded = encoded
        self.is_named = is_named
        self.is_pending = False
        """It waits for room in Redis, or for the answer to its submission."""
        self.num_bytes = len(encoded.prompt) + sum(len(record) for _, record in encoded.samples)
        self.num_requests = 0
        self.accepted = asyncio.Event()
        """Set once Redis holds the group, or never will."""
        self.early: GroupResult | None = None
        """A result under its id that came while it was pending: of these samples, or of others."""
        self.result: asyncio.Future[GroupResult | Missing] = asyncio.get_running_loop().create_future()
        self.since = time.monotonic()

    @property
    def group(self) -> str:
        """Return the group's id in the run."""
        return self.encoded.id

    def resolve(self, result: GroupResult | Missing) -> None:
        """Pass the result to the requests that await it."""
        self.accepted.set()
        if not self.result.done():
            self.result.set_result(result)


class CallerSession:
    """Submit one caller's samples, as many as its token has room for, and wait for results. ``run`` must be running.

    ``make_room`` deletes results that are no longer needed; it is called while Redis's memory is too full for more.
    """

    def __init__(
        self,
        transport: Transport,
        caller: str,
        service: Service,
        limits: Limits,
        room: FairRoom,
        make_room: Callable[[], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._session = StreamSession(transport, f"{_SESSION}{caller}", service, KEPT_S, shared=True)
        self._limits = limits
        self._room = room
        self._make_room = make_room
        self._awaited: dict[str, Awaited] = {}
        self._queue: deque[Awaited] = deque()
        self._queued = asyncio.Event()
        self._freed = asyncio.Event()
        self._delivered: deque[tuple[float, str, str]] = deque()
        self._open = asyncio.Event()
        self.num_queued = self._queued_bytes = 0
        self._delete_old_at = 0.0

    @property
    def num_awaited(self) -> int:
        """Return the number of groups that requests await."""
        return len(self._awaited)

    def is_full(self, num_sharing: int) -> bool:
        """Return True while this caller's part of what a token may have waiting for room in Redis is used up."""
        queued, queued_bytes = self._limits.queued / num_sharing, self._limits.queued_bytes / num_sharing
        return self.num_queued >= queued or self._queued_bytes >= queued_bytes

    async def run(self) -> None:
        """Open the session and serve it until cancelled."""
        await self._session.open()
        self._open.set()
        async with Supervised() as tasks:
            tasks.start(self._read_forever())
            tasks.start(self._offer_forever())
            tasks.start(self._maintain_forever())
            await asyncio.Event().wait()

    def await_result(self, submitted: SubmittedSamples) -> Awaited:
        """Submit a group, or join the wait for it; end it with ``leave``.

        Raise what ``encoded_group`` raises: nothing that cannot be sent gets as far as the queue.
        """
        group = self._session.group_id(submitted.id)
        samples = [sample.sample(group, index) for index, sample in enumerate(submitted.samples)]
        encoded = encoded_group(group, samples, is_group=submitted.is_group)
        awaited = self._awaited.get(group)
        if awaited is None:
            awaited = self._awaited[group] = Awaited(encoded, is_named=submitted.is_named)
            self._enqueue(awaited)
        elif awaited.encoded.digest != encoded.digest:
            awaited = Awaited(encoded, is_named=True)
            awaited.resolve(_CONFLICT)
            return awaited
        awaited.num_requests += 1
        return awaited

    def leave(self, awaited: Iterable[Awaited], *, delivered: bool) -> None:
        """End the wait for groups; a result that was not delivered waits in Redis for its id.

        What still waits for room is submitted all the same, unless it has no id by which its result could be fetched.
        """
        now = time.monotonic()
        for each in awaited:
            each.num_requests -= 1
            if each.num_requests <= 0 and not (each.is_pending and each.is_named):
                self._forget(each)
            if delivered and each.result.done() and isinstance(result := each.result.result(), GroupResult):
                self._delivered.append((now, each.group, result.entry))

    async def find(self, own_id: str) -> tuple[bool, GroupResult | None]:
        """Return (the service holds this id, its result if it has one)."""
        await self._open.wait()
        group = self._session.group_id(own_id)
        found = await self._session.find([group])
        return group in found or group in self._awaited, found.get(group)

    async def drop_delivered(self) -> bool:
        """Delete the oldest results that were delivered; return False if there are none."""
        return await self._delete(
            [self._delivered.popleft()[1:] for _ in range(min(_DELETED_AT_ONCE, len(self._delivered)))]
        )

    async def drop_older(self, than_s: float) -> bool:
        """Delete results that are older than so many seconds, at most ``_DELETED_AT_ONCE``; return False for none."""
        return await self._delete(await self._session.oldest_results(than_s, _DELETED_AT_ONCE))

    async def _delete(self, results: Sequence[tuple[str, str]]) -> bool:
        if results:
            await self._session.keep(results)
        return bool(results)

    def _forget(self, awaited: Awaited) -> None:
        self._count_out(awaited)
        if self._awaited.get(awaited.group) is awaited:
            del self._awaited[awaited.group]

    def _enqueue(self, awaited: Awaited) -> None:
        if awaited.is_pending:
            return
        awaited.is_pending = True
        self._queue.append(awaited)
        self.num_queued += len(awaited.encoded.samples)
        self._queued_bytes += awaited.num_bytes
        self._queued.set()

    def _count_out(self, awaited: Awaited) -> None:
        if awaited.is_pending:
            awaited.is_pending = False
            self.num_queued -= len(awaited.encoded.samples)
            self._queued_bytes -= awaited.num_bytes

    async def _offer_forever(self) -> None:
        while True:
            await self._queued.wait()
            batch: list[Awaited] = []
            while self._queue and len(batch) < _OFFERED_AT_ONCE:
                awaited = self._queue.popleft()
                if awaited.is_pending:
                    batch.append(awaited)
            if not self._queue:
                self._queued.clear()
            if batch:
                await self._offer(batch)

    async def _offer(self, batch: Sequence[Awaited]) -> None:
        """Submit groups; those without room go back to the head of the queue."""
        self._session.room = self._room.size
        try:
            answers = await self._session.offer([each.encoded for each in batch])
        except Exception as error:  # what Redis refuses for good ends the group that it refuses, not the queue
            if len(batch) > 1:
                for each in batch:
                    await self._offer([each])
                return
            logger.error("Redis refuses a group", group=batch[0].group, error=str(error))
            self._settle(batch[0], Missing("refused", f"it cannot be submitted: {error}"))
            return
        scored = []
        for awaited, answer in zip(batch, answers, strict=True):
            if answer is Submission.conflict:
                self._settle(awaited, _CONFLICT)
            elif answer in (Submission.submitted, Submission.scored):
                self._accept(awaited)
                if answer is Submission.scored and not awaited.result.done():
                    scored.append(awaited)
        if scored:
            await self._fetch(scored)
        refused = [each for each in batch if each.is_pending]
        if refused:
            self._queue.extendleft(reversed(refused))
            self._queued.set()
            self._room.is_used_up |= Submission.full in answers
            if Submission.memory in answers:
                async with self._session.tolerate_outage():
                    await self._make_room()
            await set_within(self._freed, _ROOM_PAUSE_S)

    def _accept(self, awaited: Awaited) -> None:
        """Note that Redis holds the group, with these samples."""
        awaited.accepted.set()
        self._settle(awaited, awaited.early)

    def _settle(self, awaited: Awaited, result: GroupResult | Missing | None) -> None:
        """Take a group out of the queue, with its result if it has one."""
        self._count_out(awaited)
        if result is not None:
            awaited.resolve(result)
        if awaited.num_requests <= 0:
            self._forget(awaited)

    async def _fetch(self, scored: Sequence[Awaited]) -> None:
        """Take results that wait in Redis; a group whose result was deleted meanwhile is submitted again."""
        found = await self._transport.retry_through_outage(lambda: self._session.find([each.group for each in scored]))
        for each in scored:
            result = found.get(each.group)
            if result is not None:
                each.resolve(result)
            elif each.group not in found and each.num_requests > 0:
                self._enqueue(each)

    async def _read_forever(self) -> None:
        while True:
            async with self._session.tolerate_outage():
                for result in await self._session.read():
                    self._take(result)

    def _take(self, result: GroupResult) -> None:
        self._freed.set()
        self._room.note(result, time.monotonic())
        awaited = self._awaited.get(result.group)
        if awaited is not None and awaited.is_pending:  # other samples may have been submitted under the id
            awaited.early = result
        elif awaited is not None:
            awaited.resolve(result)

    async def _maintain_forever(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            async with self._session.tolerate_outage():
                await self._maintain()

    async def _maintain(self) -> None:
        """Keep the session alive, delete old results, and submit again what Redis has lost."""
        now = time.monotonic()
        old = []
        while self._delivered and (
            len(self._delivered) > _DELIVERED_KEPT or now - self._delivered[0][0] > _DELIVERED_KEPT_S
        ):
            old.append(self._delivered.popleft()[1:])
        for start in range(0, len(old) or 1, _DELETED_AT_ONCE):
            await self._session.keep(old[start : start + _DELETED_AT_ONCE])
        if now >= self._delete_old_at:
            self._delete_old_at = now + _DELETE_OLD_EVERY_S
            while await self.drop_older(self._limits.kept_s):
                pass
        if self._session.losses_due():
            await self._repair_losses()

    async def _repair_losses(self) -> None:
        """Submit again the groups that Redis has lost; take results whose entry was not read."""
        since = max(time.monotonic() - CHECK_LOSSES_EVERY_S, self._session.reopened_at)
        waiting = [
            each
            for each in self._awaited.values()
            if not each.is_pending and not each.result.done() and each.since < since
        ]
        if not waiting:
            return
        found = await self._session.find([each.group for each in waiting])
        lost = [each for each in waiting if each.group not in found]
        for result in found.values():
            if result is not None:
                self._take(result)
        if lost:
            logger.error("Redis has lost submissions; submitting them again", groups=len(lost))
        for each in lost:
            self._enqueue(each)


_CLEAN_UP_EVERY_S = 2.0
_IDLE_KEPT_S = 3600.0
"""Seconds after its last request in which a caller keeps its place here; its results stay in Redis for longer."""


class Callers:
    """Hold the sessions by caller. ``run`` must be running."""

    def __init__(self, transport: Transport, service: Service, limits: Limits | None = None) -> None:
        self.transport = transport
        self.service = service
        self._limits = limits or Limits()
        self._sessions: dict[str, CallerSession] = {}
        self._rooms: dict[str, FairRoom] = {}
        """By token."""
        self._making_room = asyncio.Lock()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._used_at: dict[str, float] = {}
        self._tasks = Supervised()
        self.is_running = asyncio.Event()

    @property
    def names(self) -> Set[str]:
        """Return the callers that have sessions now."""
        return self._sessions.keys()

    @property
    def num_awaited(self) -> int:
        """Return the number of samples and groups that requests await."""
        return sum(session.num_awaited for session in self._sessions.values())

    def session(self, caller: str) -> CallerSession:
        """Return the session of a caller."""
        session = self._sessions.get(caller)
        if session is None:
            room = self._rooms.setdefault(token_of(caller), FairRoom(self.service.room, time.monotonic()))
            session = CallerSession(self.transport, caller, self.service, self._limits, room, self.make_room)
            self._sessions[caller] = session
            self._running[caller] = self._tasks.start(session.run())
        self._used_at[caller] = time.monotonic()
        return session

    def is_full(self, caller: str) -> bool:
        """Return True while so much of a caller waits for room in Redis that further requests must be refused.

        Callers of one token that have anything waiting have equal parts of what the token may.
        """
        own, token = self.session(caller), token_of(caller)
        of_token = [session for name, session in self._sessions.items() if token_of(name) == token]
        return own.is_full(sum(session is own or session.num_queued > 0 for session in of_token))

    async def make_room(self) -> None:
        """Delete results, to free Redis's memory: those that were delivered, oldest first.

        Once there are none, those that nobody has fetched for as long as delivered ones are kept.
        """
        if self._making_room.locked():
            return
        async with self._making_room:
            dropped = [await session.drop_delivered() for session in list(self._sessions.values())]
            if not any(dropped):
                await self._drop_unfetched()

    async def _drop_unfetched(self) -> None:
        """Delete old results of all callers, also of those that this gateway has not served."""
        known: Any = await self.transport.commands.zrangebyscore(self.transport.names.sessions, "-inf", "+inf")
        for name in known:
            kind, _, caller = name.decode().partition(_SESSION)
            if not kind and caller:
                await self.session(caller).drop_older(_DELIVERED_KEPT_S)

    async def memory(self) -> dict[str, Any]:
        """Return the used share of Redis's memory, the share above which nothing is submitted, and if it is reached."""
        used, most = await self.transport.memory_share(), self.service.memory_share
        return {"share": round(used, 3), "most": most, "is_short": used > most * _SHORT_OF_MEMORY}

    async def run(self) -> None:
        """Serve the sessions until cancelled. Raises what ends one of them."""
        async with self._tasks:
            self.is_running.set()
            await self._clean_up_forever()

    def _end_idle(self) -> None:
        now = time.monotonic()
        for caller in [each for each, at in self._used_at.items() if now - at > _IDLE_KEPT_S]:
            if self._sessions[caller].num_awaited == 0:
                self._running.pop(caller).cancel()
                del self._sessions[caller], self._used_at[caller]
                if not any(token_of(other) == token_of(caller) for other in self._sessions):
                    del self._rooms[token_of(caller)]

    async def _clean_up_forever(self) -> None:
        """Release overdue groups and end expired sessions, as every client of the service does."""
        session = StreamSession(self.transport, "http", self.service, keep_s=0.0)
        while True:
            await asyncio.sleep(_CLEAN_UP_EVERY_S)
            self._end_idle()
            async with session.tolerate_outage():
                await session.clean_up()
                if (await self.memory())["is_short"]:
                    await self.make_room()


class SampleAnswer(SampleOutput, frozen=True, omit_defaults=True, kw_only=True):
    """Hold the result of one sample, as callers and clients get it."""

    seconds: float
    """Seconds from its submission to its score."""
    index: int = 0
    """Index in its group."""
    drop_group: bool = False


class GroupAnswer(msgspec.Struct, frozen=True):
    """Hold the results of one group, in the order of its samples."""

    id: str
    results: list[SampleAnswer]


class MissingAnswer(msgspec.Struct, frozen=True):
    """Name a sample or group that the service cannot score under this id."""

    id: str
    error: dict[str, Any]


GatewayAnswer = SampleAnswer | GroupAnswer | MissingAnswer
encode = msgspec.json.Encoder().encode


def answer_of(submitted: SubmittedSamples, result: GroupResult | Missing) -> GatewayAnswer:
    """Return the answer to one submitted sample or group."""
    if isinstance(result, Missing):
        return MissingAnswer(submitted.id, {"type": result.kind, "message": f"id {submitted.id!r}: {result.message}"})
    return stored_answer(submitted.id, result, is_group=submitted.is_group)


def stored_answer(own_id: str, result: GroupResult, *, is_group: bool) -> SampleAnswer | GroupAnswer:
    """Return the answer for a result that Redis holds."""
    samples = sample_answers(own_id, result)
    return GroupAnswer(own_id, samples) if is_group else samples[0]


def sample_answers(own_id: str, result: GroupResult) -> list[SampleAnswer]:
    """Return the results of a group's samples."""
    return [
        SampleAnswer.from_record(
            sample.scoring,
            own_id,
            seconds=round(sample.seconds, 6),
            index=index,
            drop_group=sample.scoring.drop_group,
        )
        for index, sample in enumerate(result.samples)
    ]


Receive = Callable[[], Awaitable[Any]]


class DisconnectedError(Exception):
    """The caller has closed its connection."""


async def wait_for_all(awaited: Sequence[Awaited], receive: Receive, timeout_s: float) -> bool:
    """Wait for all results; return False when time is up first.

    ``receive`` of the request, whose body has been read, returns when the caller leaves: then ``DisconnectedError``.
    """
    left = asyncio.ensure_future(receive())
    try:
        async with asyncio.timeout(timeout_s):
            for each in awaited:
                if not each.result.done():
                    await asyncio.wait((each.result, left), return_when=asyncio.FIRST_COMPLETED)
                if not each.result.done():
                    raise DisconnectedError
    except TimeoutError:
        return False
    finally:
        left.cancel()
    return True


async def wait_for_accepted(awaited: Sequence[Awaited], timeout_s: float) -> None:
    """Wait until Redis holds all of these, or until time is up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for each in awaited:
                await each.accepted.wait()


async def as_they_come(
    awaited: Sequence[Awaited], receive: Receive, timeout_s: float, quiet_s: float
) -> AsyncIterator[list[int]]:
    """Yield the positions of results as they come, all that are there at once; [] after ``quiet_s`` without any.

    Ends when all have come or when time is up; raises ``DisconnectedError`` when the caller has left.
    """
    loop = asyncio.get_running_loop()
    ended: list[int] = []
    changed = asyncio.Event()
    left = asyncio.ensure_future(receive())
    left.add_done_callback(lambda _: changed.set())

    def note(position: int) -> None:
        ended.append(position)
        changed.set()

    for position, each in enumerate(awaited):
        each.result.add_done_callback(lambda _, position=position: note(position))  # type: ignore[misc]
    deadline, num_left = loop.time() + timeout_s, len(awaited)
    try:
        while num_left and loop.time() < deadline:
            changed.clear()
            if not ended:
                timer = loop.call_later(min(quiet_s, deadline - loop.time()), changed.set)
                await changed.wait()
                timer.cancel()
            if left.done():
                raise DisconnectedError
            come, ended[:] = ended[:], []
            num_left -= len(come)
            yield come
    finally:
        left.cancel()
