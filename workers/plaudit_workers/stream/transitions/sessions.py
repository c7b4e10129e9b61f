"""The transitions of a scoring service's clients: one typed function for each script. Called by ``stream.sessions``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from plaudit_wire.messages import Service
from plaudit_workers.stream.transitions.call import Argument, Call, new_call

_GROUPS_ENDED_A_CALL = 1000


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
    """Hold the encoded parts of a submitted group.

    Attributes:
        prompt: encoded; for group-scope scorers.
        samples: digest and encoded sample of each index.
    """

    id: str
    source: str
    digest: str
    prompt: bytes
    generation: bytes
    tensors: bytes
    samples: Sequence[tuple[str, bytes]]


_SHARED_CALL = "shared"


def open_session(session: str, floor: int, keep_s: float, *, shared: bool = False) -> Call[int]:
    """Open a session; the answer is its epoch.

    Args:
        floor: the epoch that the caller had before; a new epoch is above it.
        shared: every process that opens it this way gets the same epoch, so none shuts the others out.
    """
    return Call("open_session", (_SHARED_CALL if shared else new_call(), session, floor, keep_s), int)


def submit(session: str, epoch: int, service: Service, group: SubmittedGroup) -> Call[Submission]:
    """Submit a group; reading the answer raises ``SessionTakenError`` or ``SessionGoneError``."""
    arguments: list[Argument] = [
        session,
        epoch,
        service.room,
        service.memory_share,
        service.group_deadline_s,
        service.group_deadline_s,
        int(service.group_scorers),
        group.source,
        group.digest,
        group.prompt,
        group.generation,
        group.tensors,
        *(part for sample in group.samples for part in sample),
    ]
    return Call("submit", arguments, lambda answer: Submission(_accepted(answer, session)), group.id)


def acknowledge(session: str, epoch: int, results: Sequence[tuple[str, str]]) -> Call[bytes]:
    """Acknowledge results (group, entry); with none it only keeps the session alive. Reading raises as ``submit``."""
    flat = (part for result in results for part in result)
    return Call("acknowledge", (session, epoch, *flat), lambda answer: _accepted(answer, session))


def end_session(session: str, epoch: int | None) -> Call[bool]:
    """End a part of a session; the answer is True while a part remains. Reading raises as ``submit``.

    Args:
        epoch: of its client; None ends it only if it has expired.
    """
    arguments = (session, "" if epoch is None else epoch, _GROUPS_ENDED_A_CALL)
    return Call("end_session", arguments, lambda answer: _accepted(answer, session) == b"more")


def _accepted(answer: bytes, session: str) -> bytes:
    if answer == b"stale":
        raise SessionTakenError(f"another client has opened the session {session}")
    if answer == b"unknown":
        raise SessionGoneError(f"Redis does not know the session {session}")
    return answer
