"""Serve a client of a scoring service: a session submits groups of finished samples and receives their scores.

A session is a name, owned by the client that opened it last. Its submissions and results stay until they are
acknowledged, or until no client has sent a keep-alive for ``keep_s``. No further process is needed: every client
releases overdue groups and ends expired sessions, including those of other clients.

A client offers groups, receives results, and every ``UPKEEP_EVERY_S`` keeps the session alive; when ``losses_due``, it
looks for submissions that Redis has lost and offers them again. ``service.client`` does so for one client over Redis,
``service.callers`` for the callers of a gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import (
    PolicyVersion,
    Prompt,
    RecordError,
    Sampling,
    Service,
    decoder,
    digest_of,
    encode,
)
from plaudit_wire.records import NO_STEP, Sample, ScoringRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.stream import calls as transitions
from plaudit_workers.stream.calls import SessionGoneError, SessionTakenError, Submission, SubmittedGroup
from plaudit_workers.stream.groups import Deadlines, entries_by_id, read_entries, read_group, release_call
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
LARGEST_GROUP: Final = 1024
"""Samples that one submitted group may have: its scores are one stream entry."""
KEPT_S: Final = 86_400.0
"""Seconds that a session and its results are kept without a keep-alive of its client: a day."""
UPKEEP_EVERY_S: Final = 1.0
CHECK_LOSSES_EVERY_S: Final = 5.0
_OUTAGE_PAUSE_S = 0.2
_READ_AT_ONCE = 512
_SUBMITTED_AT_ONCE, _SUBMITTED_BYTES = 32, 1 << 20
_canonical = msgspec.msgpack.Encoder(order="deterministic").encode
_GROUP_MARK = "g"


@dataclass(frozen=True)
class SampleResult:
    """Hold the result of scoring one sample."""

    scoring: ScoringRecord
    seconds: float
    """Seconds from its submission to its score, on Redis's clock."""
    deliveries: int
    """Deliveries to reward workers: the first one, and one for each lapsed lease."""

    @property
    def waited_s(self) -> float:
        """Return the seconds in which nobody worked on it: in the stream, for a process, for a limit."""
        return max(0.0, self.seconds - self.scoring.retry_s - self.scoring.call_s)


@dataclass(frozen=True)
class GroupResult:
    """Hold the scores of one group, in the order of its samples; acknowledged by ``entry``."""

    group: str
    entry: str
    samples: list[SampleResult]
    is_group: bool = False
    """It was submitted as a group; known only where it was found by its id."""


class StreamSession:
    """Hold one client's session, which is kept for ``keep_s`` without a keep-alive of its client.

    Several processes use a ``shared`` session at once, each with an object of its own; every one reads all results.
    """

    def __init__(
        self, transport: Transport, name: str, service: Service, keep_s: float, *, shared: bool = False
    ) -> None:
        self._transport = transport
        self.name = name
        self._service = service
        self.room = service.room
        """Samples that its owner may have in work."""
        self._keep_s = keep_s
        self._shared = shared
        self._epoch = 0
        self._reopening = asyncio.Lock()
        self._groups_key = transport.names.session(name, "groups")
        self._results_key = transport.names.session(name, "results")
        self.deadlines = Deadlines(transport)
        self._reader = transport.blocking_client()
        self._seen = "0"
        self._check_losses_at = 0.0
        self.reopened_at = 0.0
        """When it was opened again because Redis had lost it (monotonic seconds)."""

    async def open(self) -> None:
        """Open the session.

        One that is not shared is taken over: its earlier client is refused from now on, and results are read again from
        the start. A shared one is read from its newest result on.
        """
        await self._transport.retry_through_outage(self.deadlines.overdue)  # a step before this is no step of now
        opening = transitions.open_session(self.name, self._epoch, self._keep_s, shared=self._shared)
        self._epoch = await self._transport.scripts.run(opening)
        if not self._shared:
            self.read_again()
            return
        commands, key = self._transport.commands, self._results_key
        rows: Any = await self._transport.retry_through_outage(lambda: commands.xrevrange(key, count=1))
        self._seen = rows[0][0].decode() if rows else "0"

    def group_id(self, own_id: str) -> str:
        """Return the run's id of the group that this session calls ``own_id``."""
        return f"s:{self.name}:{own_id}"

    async def offer(self, groups: Sequence[SubmittedGroup]) -> list[Submission]:
        """Submit groups as ``submit_many``. A session that Redis has lost is opened again; no group has room then.

        Raise ``SessionTakenError`` if another client has opened the session.
        """
        epoch = self._epoch
        try:
            return await self.submit_many(groups)
        except (SessionGoneError, SessionTakenError) as error:
            await self._reopen(error, epoch)
            return [Submission.full] * len(groups)

    async def keep(self, acknowledged: Sequence[tuple[str, str]] = ()) -> None:
        """Keep the session alive and acknowledge results (group, entry); open it again if Redis has lost it.

        Raise ``SessionTakenError`` if another client has opened the session.
        """
        epoch = self._epoch
        try:
            await self.acknowledge(acknowledged)
        except (SessionGoneError, SessionTakenError) as error:  # the results are lost with it
            await self._reopen(error, epoch)

    def losses_due(self) -> bool:
        """Return True every five seconds, and once after Redis has lost the session: look for lost submissions now."""
        if time.monotonic() < self._check_losses_at:
            return False
        self._check_losses_at = time.monotonic() + CHECK_LOSSES_EVERY_S
        return True

    @asynccontextmanager
    async def tolerate_outage(self) -> AsyncIterator[None]:
        """Report the outage of Redis that ends the block, and pause; raise one that no retry mends."""
        try:
            yield
        except OUTAGE as error:
            if not self._transport.outages.report(error):
                raise
            await asyncio.sleep(_OUTAGE_PAUSE_S)

    async def submit_many(self, groups: Sequence[SubmittedGroup]) -> list[Submission]:
        """Submit groups in one round trip; return the answers in the same order.

        Raise ``SessionTakenError`` or ``SessionGoneError``.
        """
        calls = [
            transitions.submit(self.name, self._epoch, self._service, some, self.room) for some in _in_calls(groups)
        ]
        return [answer for answers in await self._transport.scripts.run_many(calls) for answer in answers]

    async def read(self, count: int = _READ_AT_ONCE, block_s: float = UPKEEP_EVERY_S) -> list[GroupResult]:
        """Return the next groups that have ended, at most ``count``; [] if none ended within ``block_s`` (0: no wait).

        It waits until the next upkeep by default. This object returns each group once, and again after ``read_again``,
        until it is acknowledged.
        """
        reply: Any = await self._reader.xread(
            {self._results_key: self._seen}, count=count, block=round(block_s * 1000) or None
        )
        if entries := read_entries(reply):
            self._seen = entries[-1][0].decode()
        return [_group_result(entry.decode(), fields) for entry, fields in entries]

    def read_again(self) -> None:
        """Make the next ``read`` begin with the oldest result that is not acknowledged."""
        self._seen = "0"

    async def acknowledge(self, results: Sequence[tuple[str, str]]) -> None:
        """Acknowledge results (group, entry), which deletes them. Without results, only keep the session alive.

        Raise ``SessionTakenError`` or ``SessionGoneError``.
        """
        await self._transport.scripts.run(transitions.acknowledge(self.name, self._epoch, results))

    async def find(self, groups: Sequence[str]) -> dict[str, GroupResult | None]:
        """Return the groups that the session holds, of these; None for one that is in work."""
        stored: Any = await self._transport.commands.hmget(self._groups_key, groups)
        known = {
            group: value.decode().split() for group, value in zip(groups, stored, strict=True) if value is not None
        }
        found: dict[str, GroupResult | None] = dict.fromkeys(known)
        ended = [entry for _, entry in known.values() if entry != "-"]
        for entry, fields in (await entries_by_id(self._transport, self._results_key, ended)).items():
            result = _group_result(entry, fields)
            if result.group in known:
                digest, _ = known[result.group]
                found[result.group] = replace(result, is_group=digest.startswith(_GROUP_MARK))
        return found

    async def groups(self) -> set[str]:
        """Return the groups that are submitted and not acknowledged."""
        known: Any = await self._transport.commands.hkeys(self._groups_key)
        return {group.decode() for group in known}

    async def oldest_results(self, older_than_s: float, count: int) -> list[tuple[str, str]]:
        """Return the oldest results (group, entry) that are older than so many seconds, at most ``count``."""
        before_ms = int((await self._transport.now() - older_than_s) * 1000)
        rows: Any = await self._transport.commands.xrange(self._results_key, "-", before_ms, count=count)
        return [(fields[b"group"].decode(), entry.decode()) for entry, fields in rows]

    async def end(self) -> None:
        """End the session: its groups in work are no longer scored, its waiting results are deleted.

        Raise ``SessionTakenError`` if another client has opened the session.
        """
        await self._end(self.name, self._epoch)

    async def clean_up(self) -> None:
        """Release overdue groups and end expired sessions, including those of other clients."""
        found = await self.deadlines.overdue()
        for group in found.groups:
            await self._release(group)
        for name in found.sessions:
            await self._end(name, None)

    async def _release(self, name: str) -> None:
        phase: Any = await self._transport.commands.hget(self._transport.names.group(name), "phase")
        if phase == b"open":  # such a group may hold no bodies: only group-scope scorers and auditors read them
            await self._transport.scripts.run(transitions.release(name, incarnation=0))
            return
        try:
            group = await read_group(self._transport, name)
        except RecordError as error:
            logger.error("cannot read an overdue group", group=name, error=str(error))
            return
        if group is not None:
            await self._transport.scripts.run(release_call(group, incarnation=0))

    async def _reopen(self, error: Exception, epoch: int) -> None:
        """Open the session that Redis has lost; its submissions may be lost too. Raise ``error`` if it was taken.

        A shared session is never taken: another process has opened it again before this one. Nor is one that another
        task of this process has opened again since the call, which was made in ``epoch``.
        """
        async with self._reopening:
            if self._epoch != epoch:
                return
            if isinstance(error, SessionTakenError) and not self._shared:
                raise error
            await self.open()
            self.reopened_at = time.monotonic()
            self._check_losses_at = 0.0

    async def _end(self, name: str, epoch: int | None) -> None:
        while await self._transport.scripts.run(transitions.end_session(name, epoch)):
            pass


def own_id(group: str) -> str:
    """Return the id that its session has for a group; the inverse of ``StreamSession.group_id``."""
    return group.split(":", 2)[2]


def _in_calls(groups: Sequence[SubmittedGroup]) -> Iterator[list[SubmittedGroup]]:
    """Yield the groups of each call: few enough that nobody else waits long for Redis."""
    some: list[SubmittedGroup] = []
    num_bytes = 0
    for group in groups:
        of_group = sum(len(record) for _, record in group.samples)
        if some and (len(some) >= _SUBMITTED_AT_ONCE or num_bytes + of_group > _SUBMITTED_BYTES):
            yield some
            some, num_bytes = [], 0
        some.append(group)
        num_bytes += of_group
    if some:
        yield some


def encoded_group(group: str, samples: Sequence[Sample], *, is_group: bool = False) -> SubmittedGroup:
    """Return a group as it is submitted, under its id in the run; raise what msgspec raises for what cannot travel.

    The digest of a sample does not depend on the order of its keys: a caller may write them in another one when it
    repeats a request. ``is_group`` tells a group of one from a sample by itself.
    """
    records = [encode(sample) for sample in samples]
    digests = [_digest(sample, record) for sample, record in zip(samples, records, strict=True)]
    return SubmittedGroup(
        id=group,
        source=samples[0].data_source,
        digest=(_GROUP_MARK if is_group else "") + digest_of("".join(digests).encode()),
        prompt=encode(_prompt(group, samples)),
        samples=list(zip(digests, records, strict=True)),
    )


def _digest(sample: Sample, record: bytes) -> str:
    if sample.extra_info or sample.messages or isinstance(sample.ground_truth, dict | list):
        return digest_of(_canonical(sample))
    return digest_of(record[1:])  # the same without mappings: the record is the schema's version and this


def _prompt(group: str, samples: Sequence[Sample]) -> Prompt:
    """Return the prompt of a submitted group, for group-scope scorers."""
    first = samples[0]
    return Prompt(
        group=group,
        position=0,
        split=first.split,
        step=NO_STEP,
        n=len(samples),
        min_version=PolicyVersion(0, 0),
        seed=0,
        sampling=Sampling(max_tokens=first.max_tokens),
        data_source=first.data_source,
        prompt=first.prompt,
        prompt_ids=b"",
    )


def _group_result(entry: str, fields: Mapping[bytes, bytes]) -> GroupResult:
    samples = [_sample_result(fields.get(b"%d" % i, b"")) for i in range(len(fields) - 1)]
    return GroupResult(fields.get(b"group", b"").decode(), entry, samples)


def _sample_result(written: bytes) -> SampleResult:
    """Return a sample's result; one that this process cannot read ends as ``infra_error``, and the others go on."""
    head, _, record = written.partition(b"\n")
    try:
        submitted, committed, deliveries = head.split()
        scoring = decoder(ScoringRecord).decode(record)
        return SampleResult(scoring, float(committed) - float(submitted), max(int(deliveries), 1))
    except ValueError as error:  # msgspec's errors are ValueErrors
        reason = f"its result cannot be read: {error}. Run the same version of Plaudit in every process"
        return SampleResult(ScoringRecord("infra_error", reason=reason), 0.0, 1)
