"""The transitions for results of rollouts and reward workers: one typed function for each script."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from plaudit_wire.messages import EncodedBody, GroupDelivery, Prompt
from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.stream.delivery import Delivery
from plaudit_workers.stream.transitions.call import Argument, Call, new_call

_encode = msgspec.msgpack.Encoder().encode


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
    arguments: list[Argument] = [new_call(), delivery.entry_id, delivery.consumer, joined, drop, *_flat(scorings)]
    return Call("commit_group", arguments, Commitment, delivery.group)


def dead_letter(delivery: Delivery[Any], reason: str, scorings: Sequence[ScoringRecord]) -> Call[bool]:
    """Move an entry to the dead letters; the answer is False when another consumer now holds it.

    Args:
        scorings: for an entry of ``groups``: one for each sample, without its group-scope scorers.
    """
    poison = _encode(ScoringRecord(outcome="poison", reason=reason, worker=delivery.consumer))
    about = (new_call(), delivery.stream, delivery.entry_id, delivery.consumer, reason, poison)
    return Call("bury", (*about, *_flat(scorings)), lambda answer: bool(answer == b"buried"), delivery.group)


def retry_dead(group: str, letter: str) -> Call[str]:
    """Put a dead letter back into its stream; the answer is ``retried``, ``unknown`` or ``ended``."""
    return Call("retry_dead", (new_call(), letter), bytes.decode, group)


def _flat(scorings: Sequence[ScoringRecord]) -> list[Argument]:
    return [part for scoring in scorings for part in (scoring.outcome, _encode(scoring))]
