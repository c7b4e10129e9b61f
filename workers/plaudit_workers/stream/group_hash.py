"""Read a group's hash (its fields are listed in ``lua/shared/group.lua``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import msgspec

from plaudit_wire.codec import RecordError, decode, decoder
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt, decode_body
from plaudit_wire.records import Outcome, ScoringRecord
from plaudit_wire.sample_fields import read_fields
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.group import Group, GroupSample, Phase
from plaudit_workers.stream.volume import LostRecordError, SpillFolder, VolumeError

logger = get_logger(__name__)

_GROUP_FIELDS = ("phase", "admitted", "prompt", "incarnation", "terminal", "ready", "reason")
_SAMPLE_FIELDS = ("tensors", "sample", "published", "ended")

Values = Sequence[bytes | None]


async def read_group(transport: Transport, group_id: str) -> Group | None:
    """Return the group's current state; None when the group is closed or lost, or its prompt is lost.

    Raises:
        VolumeError: a part of the group cannot be read now.
    """
    n: Any = await transport.commands.hget(transport.names.group(group_id), "n")
    return (await read_groups(transport, [(group_id, int(n))]))[0] if n is not None else None


async def read_groups(
    transport: Transport, groups: Sequence[tuple[str, int]], *, taken: bool = False
) -> list[Group | None]:
    """Read several groups (id, number of samples) in one round trip; ``taken`` stamps them as taken by the trainer now.

    Raises:
        VolumeError: a part of a group cannot be read now.
    """
    pipeline = transport.commands.pipeline(transaction=False)
    pipeline.time()
    for group_id, n in groups:
        pipeline.hmget(transport.names.group(group_id), _fields(n))
    (seconds, microseconds), *hashes = await pipeline.execute()
    at = float(seconds) + float(microseconds) / 1e6 if taken else None
    return [
        await _parsed(group_id, values, transport.volume, at) if values[0] is not None else None
        for (group_id, _), values in zip(groups, hashes, strict=True)
    ]


@cache
def _fields(n: int) -> list[str]:
    return [*_GROUP_FIELDS, *(f"{name}:{i}" for i in range(n) for name in _SAMPLE_FIELDS)]


async def _parsed(group_id: str, values: Values, volume: SpillFolder, taken: float | None) -> Group | None:
    try:
        return await _parse(group_id, values, volume, taken)
    except LostRecordError as error:  # an older state of Redis contains a group whose files were already deleted
        logger.error("the prompt of a group is lost", group=group_id, error=str(error))
        return None


async def _parse(group_id: str, values: Values, volume: SpillFolder, taken: float | None) -> Group:
    phase, admitted, prompt, incarnation, terminal, ready, reason = values[: len(_GROUP_FIELDS)]
    if phase is None or admitted is None or prompt is None or incarnation is None:
        raise RecordError(f"the hash of group {group_id} lacks fields that every group has")
    width, samples = len(_SAMPLE_FIELDS), values[len(_GROUP_FIELDS) :]
    return Group(
        id=group_id,
        phase=cast(Phase, phase.decode()),
        prompt=decode(await volume.load(prompt), Prompt),
        samples=[
            await _sample(i, samples[i * width : (i + 1) * width], volume, float(admitted))
            for i in range(len(samples) // width)
        ],
        incarnation=int(incarnation),
        admitted=float(admitted),
        terminal=_seconds(terminal),
        ready=_seconds(ready),
        reason=(reason or b"").decode(),
        taken=taken,
    )


async def _sample(i: int, values: Values, volume: SpillFolder, admitted: float) -> GroupSample:
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
            scoring = _lost_body(scoring, str(error))
    return GroupSample(
        index=i,
        stamps=fields.stamps,
        body=body,
        digest=fields.digest,
        scoring=scoring,
        deliveries=max(fields.deliveries, 1),
    )


def _lost_body(scoring: ScoringRecord | None, reason: str) -> ScoringRecord | None:
    """Discard a score whose body cannot be read: there is nothing to train on."""
    if scoring is None or not scoring.is_scored:
        return scoring
    return ScoringRecord(outcome="infra_error", reason=reason, scorers=scoring.scorers, worker=scoring.worker)


def without_group_scorers(group: Group, outcome: Outcome, reason: str) -> list[ScoringRecord]:
    """Return the samples' scorings when their group-scope scorers have failed.

    A sample keeps the value that these scorers' ``onFailure`` leaves it, if any (``alone``); never a partial sum.
    """
    scorings = [sample.scoring for sample in group.samples if sample.scoring is not None]
    return [_without(scoring, outcome, reason) if scoring.is_scored else scoring for scoring in scorings]


def _without(scoring: ScoringRecord, outcome: Outcome, reason: str) -> ScoringRecord:
    if scoring.alone is not None:
        return msgspec.structs.replace(scoring, value=scoring.alone, alone=None)
    return ScoringRecord(outcome=outcome, reason=reason, scorers=scoring.scorers, worker=scoring.worker)


def _seconds(text: bytes | None) -> float | None:
    return None if text is None else float(text)
