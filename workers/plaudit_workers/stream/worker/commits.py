"""The reward worker's side: commit scores of samples and of groups."""

from __future__ import annotations

from collections.abc import Sequence

from plaudit_wire.messages import GroupDelivery
from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group import Group
from plaudit_workers.stream.group_hash import read_group
from plaudit_workers.stream.transitions import worker as transitions
from plaudit_workers.stream.transitions.worker import Commitment
from plaudit_workers.stream.worker.lease import Delivery, discard

__all__ = ["Commitment", "commit", "commit_group", "discard", "read_group"]


async def commit(transport: Transport, delivery: Delivery[Sample], scoring: ScoringRecord) -> Commitment:
    """Commit the score of one sample; concurrent calls travel together. Wait through outages of Redis."""
    return await transport.scripts.run(transitions.commit(delivery, scoring))


async def commit_group(
    transport: Transport, delivery: Delivery[GroupDelivery], group: Group, scorings: Sequence[ScoringRecord]
) -> Commitment:
    """Commit the results of the group-scope scorers for a group.

    Args:
        group: the group as it was scored (``read_group``): its digests are checked.
        scorings: one for each sample, in the order of their indices; they replace those of the samples.

    Raises:
        ValueError: the numbers of scorings and samples differ.
    """
    if len(scorings) != len(group.samples):
        raise ValueError(f"{len(scorings)} scorings for the {len(group.samples)} samples of group {group.id}")
    digests = [sample.digest for sample in group.samples]
    return await transport.scripts.run(transitions.commit_group(delivery, digests, scorings))
