"""The reward worker's side: commits scores of samples and of groups."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from plaudit_wire.messages import GroupDelivery
from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group import Group
from plaudit_workers.stream.group_hash import read_group
from plaudit_workers.stream.transitions.scripts import Argument, Call, new_call
from plaudit_workers.stream.worker.lease import Delivery, discard

__all__ = ["Commitment", "commit", "commit_group", "commit_many", "discard", "read_group"]

_encoder = msgspec.msgpack.Encoder()


class Commitment(enum.Enum):
    """What became of a score that was committed."""

    committed = b"committed"
    duplicate = b"duplicate"
    """The sample was terminal already."""
    refused = b"refused"
    """The group is gone or past its phase, the score belongs to another body, or a failure does not come from the one
    who holds the sample now."""


async def commit(transport: Transport, delivery: Delivery[Sample], scoring: ScoringRecord) -> Commitment:
    """Commits the score of one sample; waits out an outage of Redis."""
    return (await commit_many(transport, [(delivery, scoring)]))[0]


async def commit_many(
    transport: Transport, items: Sequence[tuple[Delivery[Sample], ScoringRecord]]
) -> list[Commitment]:
    """Commits scores in one round trip; the answers in the same order."""
    answers = await transport.scripts.call_many([_call(*item) for item in items])
    return [Commitment(answer) for answer in answers]


def _call(delivery: Delivery[Sample], scoring: ScoringRecord) -> Call:
    return Call(
        "commit",
        (
            delivery.group,
            new_call(),
            delivery.entry_id,
            delivery.consumer,
            delivery.payload.index,
            delivery.digest,
            scoring.outcome,
            int(scoring.drop_group),
            f"{delivery.elapsed_s():.6f}",
            _encoder.encode(scoring),
        ),
    )


async def commit_group(
    transport: Transport, delivery: Delivery[GroupDelivery], group: Group, scorings: Sequence[ScoringRecord]
) -> Commitment:
    """Commits what the group-scope scorers made of a group.

    Args:
        transport: the process's.
        delivery: the entry of ``groups``.
        group: the group as it was scored (``read_group``): its digests are checked.
        scorings: one a sample, all samples, in the order of their indices; they replace those of the samples.

    Raises:
        ValueError: not one scoring a sample.
    """
    if len(scorings) != len(group.samples):
        raise ValueError(f"{len(scorings)} scorings for the {len(group.samples)} samples of group {group.id}")
    digests = " ".join(sample.digest or "-" for sample in group.samples)
    drop = int(any(scoring.drop_group for scoring in scorings))
    arguments: list[Argument] = [group.id, new_call(), delivery.entry_id, delivery.consumer, digests, drop]
    for scoring in scorings:
        arguments += [scoring.outcome, _encoder.encode(scoring)]
    return Commitment(await transport.scripts.call("commit_group", *arguments))
