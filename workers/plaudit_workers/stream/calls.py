"""Describe the transitions of all processes: one typed function for each Lua script, which returns a ``Call``.

``stream.transport`` sends the calls. They follow each other by side: every process, the trainer, rollouts and reward
workers, leases, the clients of a scoring service. Every script of the trainer checks the incarnation, and answers
``stale`` once a later trainer has taken over (``stream.trainer.Fence``).
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from plaudit_wire.messages import Announcement, EncodedBody, GroupDelivery, Prompt, Service, Tensors, encode
from plaudit_wire.names import Stream
from plaudit_wire.records import (
    ADMISSION_MEMORY_SHARE,
    GROUP_ENDED,
    GenerationRecord,
    GroupEnd,
    Sample,
    ScoringRecord,
    StepRecord,
    WorkerRecord,
    is_drawn,
)

Answer = TypeVar("Answer", covariant=True)
T = TypeVar("T")
Argument = str | bytes | int | float
_numbers = itertools.count()
_boot = os.urandom(6).hex()
_encode = msgspec.msgpack.encode
_DEADLINE_PASSED = _encode(ScoringRecord(outcome="given_up", reason="the group's deadline passed"))
_GROUP_ENDED = _encode(ScoringRecord(outcome="given_up", reason=GROUP_ENDED))
_NO_TENSORS = encode(Tensors(b"", b"", b"", []))
_NOT_GENERATED_HERE = _encode(
    GenerationRecord(worker="", generate_s=0.0, prompt_tokens=0, response_tokens=0, version_min=0, version_max=0)
)
_NEVER = 1 << 31
_SILENT_MS = 3_600_000
"""A consumer without pending entries is removed after this long without a call."""
_GROUPS_ENDED_A_CALL = 1000


def new_call() -> str:
    """Return a token that no other call has: by it Redis recognises a repeat of the same call."""
    return f"{_boot}{os.getpid():x}.{next(_numbers):x}"


class Call(msgspec.Struct, Generic[Answer], frozen=True):
    """Describe one transition, ready to be sent, once or repeatedly."""

    script: str
    """File name in ``lua/`` without its ending."""
    arguments: Sequence[Argument]
    """ARGV[2] and following."""
    read: Callable[[Any], Answer]
    group: str = ""
    """ARGV[1]; empty for transitions that concern no single group."""


def nothing(_: Any) -> None:
    """Ignore the answer: there is only one."""


def open_streams(*, lost: bool) -> Call[None]:
    """Create the streams' consumer groups that are missing; ``lost``: they existed before."""
    return Call("open_streams", (int(lost),), nothing)


def beat(record: WorkerRecord) -> Call[None]:
    """Record that a process is alive."""
    return Call("beat", (record.worker, msgspec.msgpack.encode(record)), nothing)


@dataclass(frozen=True)
class StreamLimits:
    """Hold the bounds that a trainer sets."""

    max_open_groups: int
    max_open_validation_groups: int = 256
    """Validation groups that may be open at a time, in addition."""
    group_deadline_s: float = 900.0
    """Seconds from a group's first published sample to its release."""
    group_scoring_deadline_s: float = 900.0
    """Seconds from a group's last sample to its release without group-scope scorers."""
    min_samples_per_group: int = 1
    """A training group with fewer scored samples is dropped."""
    has_group_scorers: bool = False
    memory_share: float = ADMISSION_MEMORY_SHARE
    """Admissions stop above this share of Redis's memory."""


class Admission(enum.Enum):
    """Hold the answer to the admission of a prompt."""

    admitted = b"admitted"
    full = b"full"
    """The bound of open groups is reached."""
    memory = b"memory"
    """Redis's memory is too full for more."""
    duplicate = b"duplicate"
    """A group of this id exists or existed."""


class Closing(enum.Enum):
    """Hold the answer to the end of a group."""

    closed = b"closed"
    unknown = b"unknown"
    """There is no such group."""
    not_ready = b"not_ready"
    """The group is not ready: it can only be dropped."""


def take_over(floor: int) -> Call[int]:
    """Take over the run; the answer is the incarnation, which is above ``floor``."""
    return Call("take_over", (new_call(), floor), int)


def admit(incarnation: int, prompt: Prompt, record: bytes, limits: StreamLimits) -> Call[Admission]:
    """Create the prompt's group and add it to ``prompts``."""
    validation = prompt.split == "validation"
    arguments = (
        new_call(),
        incarnation,
        prompt.split,
        limits.max_open_validation_groups if validation else limits.max_open_groups,
        limits.memory_share,
        prompt.n,
        0 if validation else min(limits.min_samples_per_group, prompt.n),
        limits.group_deadline_s,
        limits.group_scoring_deadline_s,
        int(limits.has_group_scorers and not validation),
        prompt.step,
        prompt.data_source,
        record,
    )
    return Call("admit", arguments, Admission, prompt.group)


def release(group: str, incarnation: int, scorings: Sequence[ScoringRecord] = ()) -> Call[bool]:
    """Release a group that is past its deadline; the answer is False when it is not due.

    A session's group has incarnation 0. ``scorings`` are for phase ``group_scoring``: one for each sample, without its
    group-scope scorers.
    """
    arguments = (new_call(), incarnation, _DEADLINE_PASSED, *_encoded_scorings(scorings))
    return Call("release", arguments, lambda answer: bool(answer == b"released"), group)


@dataclass(frozen=True)
class Overdue:
    """Hold the answer to a look for what is overdue."""

    steady_time: float
    """The server's clock without its steps."""
    groups: list[str]
    sessions: list[str]


def overdue(expected: tuple[float, float, float] | None, count: int) -> Call[Overdue]:
    """Look for at most ``count`` overdue groups and expired sessions.

    ``expected``: the steady time that the caller expects, the earliest and the latest; None before its first look.
    """
    return Call("overdue", (*_times(expected), count), _overdue)


def _times(expected: tuple[float, float, float] | None) -> tuple[str, ...]:
    return ("", "", "") if expected is None else tuple(f"{time:.6f}" for time in expected)


def _overdue(answer: list[Any]) -> Overdue:
    steady_time, groups, sessions = answer
    return Overdue(float(steady_time), [each.decode() for each in groups], [each.decode() for each in sessions])


def take_ready(incarnation: int, count: int, after: str) -> Call[list[tuple[str, str, int]]]:
    """Take at most ``count`` groups of entries after ``after``; the answer has entry, group and size of each."""
    return Call("take_ready", (incarnation, count, after), _taken_rows)


def _taken_rows(answer: list[tuple[bytes, bytes, int]]) -> list[tuple[str, str, int]]:
    return [(entry.decode(), group.decode(), n) for entry, group, n in answer]


def close(
    group: str, call: int, incarnation: int, end: GroupEnd, reason: str, record: bytes, *, taken: bool
) -> Call[Closing]:
    """End a group that this trainer took in phase ``ready`` or has ended before (``taken``), or drop another one.

    ``call`` is above the numbers of all earlier calls; ``reason`` is that of a drop, else empty; ``record`` is the
    encoded one for the metrics and may be empty.
    """
    arguments = (call, incarnation, end, reason, _GROUP_ENDED, record, int(taken))
    return Call("close", arguments, Closing, group)


def announce(incarnation: int, announcement: Announcement) -> Call[None]:
    """Announce the policy version that rollouts must load."""
    return Call("announce", (incarnation, encode(announcement)), nothing)


def restore(incarnation: int, step: int, counters: Mapping[str, int]) -> Call[None]:
    """Replace Redis's ledger counters and step by those of a checkpoint."""
    return Call("restore", (incarnation, step, *(part for item in counters.items() for part in item)), nothing)


def record_step(incarnation: int, record: StepRecord) -> Call[None]:
    """Record a closed step."""
    return Call("record_step", (new_call(), incarnation, record.step, _encode(record)), nothing)


@dataclass(eq=False)
class Delivery(Generic[T]):
    """Hold one entry of a stream, delivered to this process."""

    stream: Stream
    entry_id: str
    payload: T
    group: str
    index: int | None
    """Index of the sample in its group; None for an entry that concerns the whole group."""
    deliveries: int
    """The number of deliveries: the first one, and one for each lapsed lease, including this one."""
    consumer: str
    digest: str = ""
    blamed: bool = False
    """It has lost several workers, the last of which worked on nothing else."""
    new: bool = False
    """No worker was given it before, and it is no dead letter that is retried: nothing of a prompt is published."""
    taken: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the lease went to another worker, or the entry has ended without this one: stop the work."""

    @property
    def place(self) -> int | str:
        """Return its index as the scripts read it: ``-`` for the whole group."""
        return "-" if self.index is None else self.index

    def elapsed_s(self) -> float:
        """Return the seconds since it was taken."""
        return time.monotonic() - self.taken


class Publication(enum.Enum):
    """Hold the answer to a published sample."""

    published = b"published"
    duplicate = b"duplicate"
    """Another worker published this index before."""
    refused = b"refused"
    """The group is gone or past its phase, or the sample was given up: stop working on it."""


class Commitment(enum.Enum):
    """Hold the answer to a committed score."""

    committed = b"committed"
    duplicate = b"duplicate"
    """The sample was terminal already."""
    refused = b"refused"
    """The group is gone or past its phase, the score belongs to another body, or a failure comes from a worker that
    no longer holds the sample."""


def publish(delivery: Delivery[Prompt], index: int, body: EncodedBody) -> Call[Publication]:
    """Publish one finished sample of a prompt."""
    arguments = (
        new_call(),
        delivery.entry_id,
        index,
        body.digest,
        f"{delivery.elapsed_s():.6f}",
        body.tensors,
        body.sample,
        body.generation,
    )
    return Call("publish", arguments, Publication, delivery.group)


def commit(delivery: Delivery[Sample], scoring: ScoringRecord) -> Call[Commitment]:
    """Commit the score of one sample."""
    arguments = (
        new_call(),
        delivery.entry_id,
        delivery.consumer,
        delivery.payload.index,
        delivery.digest,
        scoring.outcome,
        int(scoring.drop_group),
        f"{delivery.elapsed_s():.6f}",
        _encode(scoring),
    )
    return Call("commit", arguments, Commitment, delivery.group)


def commit_group(
    delivery: Delivery[GroupDelivery], digests: Sequence[str], scorings: Sequence[ScoringRecord]
) -> Call[Commitment]:
    """Commit the scores of a group's group-scope scorers; ``digests`` and ``scorings`` in the order of the samples."""
    drop = int(any(scoring.drop_group for scoring in scorings))
    joined = " ".join(digest or "-" for digest in digests)
    about = (new_call(), delivery.entry_id, delivery.consumer, joined, drop)
    return Call("commit_group", (*about, *_encoded_scorings(scorings)), Commitment, delivery.group)


def dead_letter(delivery: Delivery[Any], reason: str, scorings: Sequence[ScoringRecord]) -> Call[bool]:
    """Move an entry to the dead letters; the answer is False when another consumer now holds it.

    An entry of ``groups`` needs ``scorings``: one for each sample, without its group-scope scorers.
    """
    poison = _encode(ScoringRecord(outcome="poison", reason=reason, worker=delivery.consumer))
    about = (new_call(), delivery.stream, delivery.entry_id, delivery.consumer, reason, poison)
    return Call(
        "bury", (*about, *_encoded_scorings(scorings)), lambda answer: bool(answer == b"buried"), delivery.group
    )


def retry_dead(group: str, letter: str) -> Call[str]:
    """Put a dead letter back into its stream; the answer is ``retried``, ``unknown`` or ``ended``."""
    return Call("retry_dead", (new_call(), letter), bytes.decode, group)


def _encoded_scorings(scorings: Sequence[ScoringRecord]) -> list[Argument]:
    return [part for scoring in scorings for part in (scoring.outcome, _encode(scoring))]


@dataclass(frozen=True)
class ClaimRules:
    """Limit the entries that a claim may take."""

    lease_s: float
    """Claim entries of others that were not renewed for this long; negative: claim none of others."""
    look_every_s: float = 0.0
    """One scan of all pending entries in this time serves all consumers; 0: always scan."""
    suspect_from: int = _NEVER
    """The delivery from which an entry is suspected of ending its workers, and worked on apart."""
    most_suspects: int = 1
    """Suspects that one consumer works on at once; a quarter as many after each further loss."""
    poison_limit: int = _NEVER
    """After so many deliveries, an entry that is lost in isolation is to blame."""


class ClaimedEntry(NamedTuple):
    """Hold a claimed entry: its id, its deliveries, and True if it is to blame for the loss of its workers."""

    id: str
    deliveries: int
    blamed: bool


def claim(
    stream: Stream,
    consumer: str,
    count: int,
    rules: ClaimRules,
    expected: tuple[float, float, float] | None,
    in_work: Iterable[str],
) -> Call[tuple[float, list[ClaimedEntry]]]:
    """Take entries that were delivered before; the answer has the server time and the entries, without payloads.

    ``expected``: the server time of this call, the earliest and the latest (``ServerTime``).
    """
    _, earliest, latest = _times(expected)
    lease_ms = round(rules.lease_s * 1000) if rules.lease_s >= 0 else -1
    times = (lease_ms, rules.look_every_s, earliest, latest)
    limits = (rules.suspect_from, rules.most_suspects, rules.poison_limit)
    return Call("claim", (stream, consumer, count, *times, *limits, *in_work), _claimed)


def _claimed(answer: list[Any]) -> tuple[float, list[ClaimedEntry]]:
    return float(answer[0]), [ClaimedEntry(entry.decode(), n, bool(blamed)) for entry, n, blamed in answer[1:]]


def isolate(delivery: Delivery[Any]) -> Call[None]:
    """Record that this delivery is now worked on, and nothing else: if its worker is lost, the entry is to blame."""
    return Call("isolate", (delivery.stream, delivery.entry_id, delivery.consumer), nothing, delivery.group)


def renew(
    stream: Stream, consumer: str, held: Sequence[Delivery[Any]], new: Sequence[Delivery[Any]]
) -> Call[list[bytes]]:
    """Renew leases; the answer lists the entries that this consumer has lost. ``new``: samples renewed first."""
    notes = (part for d in new for part in (d.group, d.place, f"{d.elapsed_s():.6f}"))
    return Call("renew", (stream, consumer, len(held), *(d.entry_id for d in held), *notes), list)


def hand_back(stream: Stream, consumer: str, deliveries: Sequence[Delivery[Any]], *, failed: bool = False) -> Call[int]:
    """Give entries back unfinished; the answer is how many. ``failed``: the worker did, so the delivery counts."""
    about = (part for d in deliveries for part in (d.entry_id, d.group, d.place, f"{d.elapsed_s():.6f}"))
    return Call("hand_back", (stream, consumer, int(failed), *about), int)


def discard(stream: Stream, deliveries: Sequence[Delivery[Any]]) -> Call[list[bytes]]:
    """End entries that are no longer needed; the answer lists them."""
    about = (part for d in deliveries for part in (d.entry_id, d.group, d.place))
    return Call("discard", (stream, *about), list)


def forget(stream: Stream, leaving: str = "") -> Call[int]:
    """Remove the names of consumers that are gone, and of ``leaving``; the answer is how many."""
    return Call("forget", (stream, leaving, _SILENT_MS), int)


class SessionTakenError(Exception):
    """Another client has opened the session since; this client is refused."""


class SessionGoneError(Exception):
    """Redis does not know the session: it has expired, or Redis has lost its state. Open it again."""


class Submission(enum.Enum):
    """Hold the answer to a submitted group."""

    submitted = b"submitted"
    """The group is in work; also when it was submitted before."""
    scored = b"scored"
    """It was submitted before, and its scores wait."""
    returned = b"returned"
    """Its scores were acknowledged before."""
    conflict = b"conflict"
    """Other samples were submitted under this id."""
    full = b"full"
    """The session has as many samples in work as it may have."""
    memory = b"memory"
    """Redis's memory is too full for more."""


@dataclass(frozen=True)
class SubmittedGroup:
    """Hold the encoded parts of a submitted group."""

    id: str
    source: str
    digest: str
    prompt: bytes
    """Encoded prompt, for group-scope scorers."""
    samples: Sequence[tuple[str, bytes]]
    """Digest and encoded sample of each index."""


def open_session(session: str, floor: int, keep_s: float, *, shared: bool = False) -> Call[int]:
    """Open a session; the answer is its epoch, above ``floor``, the one that the caller had before.

    Every process that opens it ``shared`` gets the same epoch, so none shuts the others out.
    """
    return Call("open_session", ("shared" if shared else new_call(), session, floor, keep_s), int)


def submit(
    session: str, epoch: int, service: Service, groups: Sequence[SubmittedGroup], room: int
) -> Call[list[Submission]]:
    """Submit groups; reading the answer raises ``SessionTakenError`` or ``SessionGoneError``.

    ``room`` bounds the samples that the session's owner has in work.
    """
    deadline_s = service.group_deadline_s
    arguments: list[Argument] = [session, epoch, room, service.memory_share, deadline_s, deadline_s]
    arguments.append(int(service.group_scorers))
    for group in groups:
        is_wanted = is_drawn(group.id, service.kept_share)
        is_read = is_wanted or service.group_scorers
        arguments += (group.id, len(group.samples), group.source, group.digest, group.prompt if is_read else b"")
        arguments += (_NOT_GENERATED_HERE, _NO_TENSORS if is_read else b"", int(is_wanted))
        arguments += (part for sample in group.samples for part in sample)
    return Call("submit", arguments, lambda answer: list(map(Submission, _accepted_answer(answer, session))))


def acknowledge(session: str, epoch: int, results: Sequence[tuple[str, str]]) -> Call[bytes]:
    """Acknowledge results (group, entry); with none it only keeps the session alive. Reading raises as ``submit``."""
    flat = (part for result in results for part in result)
    return Call("acknowledge", (session, epoch, *flat), lambda answer: _accepted_answer(answer, session))


def take_kept(count: int, within_s: float, first_free: int) -> Call[tuple[int, list[str]] | None]:
    """Take groups of a service that were kept for auditors; the answer is the number of their file, and their ids.

    It is None while fewer than ``count`` groups have waited for less than ``within_s``. ``first_free`` is the first
    number that no file has.
    """
    return Call("take_kept", (count, within_s, first_free), _kept)


def _kept(answer: list[bytes]) -> tuple[int, list[str]] | None:
    return (int(answer[0]), [group.decode() for group in answer[1:]]) if answer else None


def let_go(file: int) -> Call[int]:
    """Remove the kept groups of a file that was written."""
    return Call("let_go", (file,), int)


def end_session(session: str, epoch: int | None) -> Call[bool]:
    """End a part of a session; the answer is True while a part remains. Reading raises as ``submit``.

    ``epoch`` is that of its client; None ends the session only if it has expired.
    """
    arguments = (session, "" if epoch is None else epoch, _GROUPS_ENDED_A_CALL)
    return Call("end_session", arguments, lambda answer: _accepted_answer(answer, session) == b"more")


def _accepted_answer(answer: T, session: str) -> T:
    if answer == b"stale":
        raise SessionTakenError(f"another client has opened the session {session}")
    if answer == b"unknown":
        raise SessionGoneError(f"Redis does not know the session {session}")
    return answer


class Lead(enum.Enum):
    """Hold the answer to a broker of machines that asks to be the run's only one."""

    new = b"new"
    """It was not before, as far as Redis knows."""
    kept = b"kept"
    taken = b"taken"
    """Another one's lease holds."""


class MachinePlace(enum.Enum):
    """Hold the answer to the request for a machine's place."""

    held = b"held"
    full = b"full"
    ended = b"ended"
    """The sample is finished, or its group is gone."""
    gone = b"gone"
    """The warm machine was given to another sample."""
    stale = b"stale"
    """Another broker has taken over."""


def lead(broker: str, lease_s: float) -> Call[Lead]:
    """Make a process the run's only broker of machines; a lease of 0 seconds makes way for another."""
    return Call("lead", (broker, lease_s), Lead)


def hold_place(
    broker: str, holder: str, machine: str, most: int, group: str = "", index: str = "", warm: str = ""
) -> Call[MachinePlace]:
    """Give a sample, or a pool where ``group`` is empty, a place for its machine; it takes over that of ``warm``."""
    return Call("hold_place", (broker, holder, machine, most, index, warm), MachinePlace, group)


def free_place(broker: str, holder: str, machine: str) -> Call[bool]:
    """Free the place of a machine that is gone; the answer is False if another broker has taken over."""
    return Call("free_place", (broker, holder, machine), lambda answer: bool(answer == b"freed"))
