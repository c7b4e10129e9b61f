"""The trainer's transitions: one typed function for each script. Called by ``stream.trainer``.

Every script here checks the incarnation, and answers ``stale`` once a later trainer has taken over (``Fence``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from plaudit_wire.codec import encode
from plaudit_wire.messages import Announcement, Prompt
from plaudit_wire.records import GroupEnd, ScoringRecord, StepRecord
from plaudit_workers.stream.limits import StreamLimits
from plaudit_workers.stream.transitions.call import Argument, Call, new_call, nothing

_encode = msgspec.msgpack.encode
_DEADLINE_PASSED = _encode(ScoringRecord(outcome="given_up", reason="the group's deadline passed"))
_GROUP_ENDED = _encode(ScoringRecord(outcome="given_up", reason="its group was ended before it was scored"))


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

    Args:
        incarnation: of the trainer; 0 for a session's group, which has none.
        scorings: for phase ``group_scoring``: one for each sample, without its group-scope scorers.
    """
    arguments: list[Argument] = [new_call(), incarnation, _DEADLINE_PASSED]
    for scoring in scorings:
        arguments += [scoring.outcome, _encode(scoring)]
    return Call("release", arguments, lambda answer: bool(answer == b"released"), group)


def take_ready(incarnation: int, count: int, held: Sequence[str]) -> Call[list[tuple[str, str, int]]]:
    """Take at most ``count`` groups that this trainer does not hold; the answer has entry, group and size of each."""
    return Call("take_ready", (incarnation, count, *held), _rows)


def _rows(answer: list[tuple[bytes, bytes, int]]) -> list[tuple[str, str, int]]:
    return [(entry.decode(), group.decode(), n) for entry, group, n in answer]


def close(group: str, call: int, incarnation: int, end: tuple[GroupEnd, str, bytes], *, taken: bool) -> Call[Closing]:
    """End a group.

    Args:
        call: a number above those of all earlier calls.
        end: the end, the reason of a drop (else empty), and the encoded record for the metrics (may be empty).
        taken: this trainer took the group in phase ``ready``, or has ended it before.
    """
    ending, reason, record = end
    arguments = (call, incarnation, ending, reason, _GROUP_ENDED, record, int(taken))
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
