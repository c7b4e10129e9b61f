"""Read a group from its hash (``lua/shared/group.lua`` lists its fields), for the trainer and group-scope scorers.

``Deadlines`` finds overdue groups and ``release_call`` releases one, for the trainer and for clients of a scoring
service.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt, RecordError, SampleBody, decode, decode_body, decoder
from plaudit_wire.records import Outcome, ScoringRecord, Stamps, read_fields
from plaudit_workers.stream.calls import Call, Overdue, overdue, release
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import LostRecordError, SpillFolder, VolumeError

logger = get_logger(__name__)
Phase = Literal["open", "group_scoring", "ready", "dropped"]
"""The phase of a group; a closed group has no hash."""
Values = Sequence[bytes | None]
_OVERDUE_AT_ONCE = 1000
_CLOCK_EARLY_S = 2.0
_CLOCK_LATE_S = 10.0
"""A call waits at most about 5 s before its caller gives up, so a later time is a step. Smaller steps shorten a lease
(``LEASE_S``) to no less than two renewals."""
_GROUP_FIELDS = ("phase", "admitted", "prompt", "incarnation", "terminal", "ready", "reason")
_SAMPLE_FIELDS = ("tensors", "sample", "published", "ended")


class GroupSample(msgspec.Struct, frozen=True):
    """Hold one sample of a group, as read from the group's hash."""

    index: int
    stamps: Stamps
    body: SampleBody | None = None
    digest: str = ""
    scoring: ScoringRecord | None = None
    """None while the sample is not terminal."""
    deliveries: int = 1


class Group(msgspec.Struct, frozen=True):
    """Hold a group, as read from its hash. Points in time as in ``plaudit_wire.records``."""

    id: str
    phase: Phase
    prompt: Prompt
    samples: list[GroupSample]
    incarnation: int
    """Incarnation of the trainer that admitted it."""
    admitted: float
    terminal: float | None = None
    ready: float | None = None
    reason: str = ""
    """The reason to drop it; empty unless ``phase`` is ``dropped``."""
    taken: float | None = None
    """The trainer took it; None if it was only read."""


async def read_group(transport: Transport, group_id: str) -> Group | None:
    """Return the group's current state; None when the group is closed or lost, or its prompt is lost.

    Raise ``VolumeError`` while a part of it cannot be read.
    """
    n: Any = await transport.commands.hget(transport.names.group(group_id), "n")
    return (await read_groups(transport, [(group_id, int(n))]))[0] if n is not None else None


async def read_kept_group(transport: Transport, group_id: str) -> Group | None:
    """Return a group that was kept for a service's auditors; None when it was stored. Raises ``RecordError``."""
    commands, key = transport.commands, transport.names.kept_group(group_id)
    n: Any = await commands.hget(key, "n")
    if n is None:
        return None
    values: Any = await commands.hmget(key, _fields(int(n)))
    return await _read_hash(group_id, values, transport.volume, None)


async def read_groups(
    transport: Transport, groups: Sequence[tuple[str, int]], *, taken: bool = False
) -> list[Group | None]:
    """Read several groups (id, number of samples) in one round trip; ``taken`` stamps them as taken by the trainer now.

    Raise ``VolumeError`` while a part of one cannot be read.
    """
    pipeline = transport.commands.pipeline(transaction=False)
    pipeline.time()
    for group_id, n in groups:
        pipeline.hmget(transport.names.group(group_id), _fields(n))
    (seconds, microseconds), *hashes = await pipeline.execute()
    at = float(seconds) + float(microseconds) / 1e6 if taken else None
    return [
        await _read_hash(group_id, values, transport.volume, at) if values[0] is not None else None
        for (group_id, _), values in zip(groups, hashes, strict=True)
    ]


@cache
def _fields(n: int) -> list[str]:
    return [*_GROUP_FIELDS, *(f"{name}:{i}" for i in range(n) for name in _SAMPLE_FIELDS)]


async def _read_hash(group_id: str, values: Values, volume: SpillFolder, taken: float | None) -> Group | None:
    phase, admitted, prompt, incarnation, terminal, ready, reason = values[: len(_GROUP_FIELDS)]
    if phase is None or admitted is None or prompt is None or incarnation is None:
        raise RecordError(f"the hash of group {group_id} lacks fields that every group has")
    try:
        record = await volume.load(prompt)
    except LostRecordError as error:  # an older state of Redis contains a group whose files were already deleted
        logger.error("the prompt of a group is lost", group=group_id, error=str(error))
        return None
    width, samples = len(_SAMPLE_FIELDS), values[len(_GROUP_FIELDS) :]
    return Group(
        id=group_id,
        phase=cast(Phase, phase.decode()),
        prompt=decode(record, Prompt),
        samples=[
            await _read_sample(i, samples[i * width : (i + 1) * width], volume, float(admitted))
            for i in range(len(samples) // width)
        ],
        incarnation=int(incarnation),
        admitted=float(admitted),
        terminal=_seconds(terminal),
        ready=_seconds(ready),
        reason=(reason or b"").decode(),
        taken=taken,
    )


async def _read_sample(i: int, values: Values, volume: SpillFolder, admitted: float) -> GroupSample:
    tensors, sample, published, ended = values
    fields = read_fields(admitted, published, ended)
    scoring = decoder(ScoringRecord).decode(fields.scoring) if fields.scoring is not None else None
    body = None
    if tensors is not None and sample is not None:
        try:
            body = decode_body(await volume.load(tensors), await volume.load(sample), fields.generation)
        except VolumeError:
            raise
        except RecordError as error:
            if scoring is not None and scoring.is_scored:  # discard the score: there is nothing to train on
                scoring = _failed(scoring, "infra_error", str(error))
    return GroupSample(
        index=i,
        stamps=fields.stamps,
        body=body,
        digest=fields.digest,
        scoring=scoring,
        deliveries=max(fields.deliveries, 1),
    )


def without_group_scorers(group: Group, outcome: Outcome, reason: str) -> list[ScoringRecord]:
    """Return the samples' scorings when their group-scope scorers have failed.

    A sample keeps the value that these scorers' ``onFailure`` leaves it, if any (``alone``); never a partial sum.
    """
    scorings = [sample.scoring for sample in group.samples if sample.scoring is not None]
    return [_without_group_scorer(scoring, outcome, reason) if scoring.is_scored else scoring for scoring in scorings]


def _without_group_scorer(scoring: ScoringRecord, outcome: Outcome, reason: str) -> ScoringRecord:
    if scoring.alone is not None:
        return msgspec.structs.replace(scoring, value=scoring.alone, alone=None)
    return _failed(scoring, outcome, reason)


def _failed(scoring: ScoringRecord, outcome: Outcome, reason: str) -> ScoringRecord:
    return ScoringRecord(outcome=outcome, reason=reason, scorers=scoring.scorers, worker=scoring.worker)


def _seconds(text: bytes | None) -> float | None:
    return None if text is None else float(text)


@dataclass
class ServerTime:
    """Predict the server's time of the next call: a time outside the prediction means that the clock was stepped.

    Redis measures leases and deadlines with its wall clock. A step forward by more than a lease would make the leases
    of living workers look lapsed, a step back would keep those of dead ones alive. The scripts of ``claim`` and
    ``overdue`` act on it. Monotonic and server times in seconds, of one caller's last call.
    """

    answered: float | None = None
    sent: float = 0.0
    received: float = 0.0

    def expected(self, now: float) -> tuple[float, float, float] | None:
        """Return the server time of a call sent ``now``, the earliest and the latest; None before any answer."""
        if self.answered is None:
            return None
        steady = self.answered + (now - self.received)
        return steady, steady - _CLOCK_EARLY_S, self.answered + (now - self.sent) + _CLOCK_LATE_S

    def observe(self, answered: float, sent: float, received: float) -> None:
        """Record an answer."""
        self.answered, self.sent, self.received = answered, sent, received


class Deadlines:
    """Find what is overdue, for one caller. A step of Redis's clock moves the deadlines with it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.time = ServerTime()
        """Of the server's clock without its steps."""

    async def overdue(self, count: int = _OVERDUE_AT_ONCE) -> Overdue:
        """Return at most ``count`` overdue groups and as many expired sessions; raise an outage."""
        sent = time.monotonic()
        found = await self._transport.reads.run(overdue(self.time.expected(sent), count))
        self.time.observe(found.steady_time, sent, time.monotonic())
        return found


def release_call(group: Group, incarnation: int) -> Call[bool]:
    """Return the transition that releases an overdue group; a session's group has no trainer and incarnation 0."""
    if group.phase != "group_scoring":
        return release(group.id, incarnation)
    scorings = without_group_scorers(group, "timeout", "the group-scope scorers' deadline passed")
    return release(group.id, incarnation, scorings)


async def entries_by_id(transport: Transport, stream: str, ids: Sequence[str]) -> dict[str, dict[bytes, bytes]]:
    """Return the fields of a stream's entries by their ids, without those that are gone; ``stream`` is its key."""
    pipeline = transport.commands.pipeline(transaction=False)
    for entry in ids:
        pipeline.xrange(stream, entry, entry)
    found = await pipeline.execute()
    return {entry: rows[0][1] for entry, rows in zip(ids, found, strict=True) if rows}


def read_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return id and fields of each entry.

    The reply is empty when none arrived in time. It names the stream without entries, or nothing at all, when the entry
    that ended the wait was deleted by the same transaction, as when Redis's keys are replaced by an older state.
    """
    entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1] if reply and reply[0] else []
    return entries
