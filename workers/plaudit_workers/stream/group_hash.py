"""Reads a group's hash (its fields are listed in ``lua/shared/group.lua``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from plaudit_metrics.records import Outcome, ScoringRecord, Stamps
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.records import (
    Body,
    Group,
    GroupSample,
    Phase,
    Prompt,
    RecordError,
    decode,
    decode_body,
    decoder,
)
from plaudit_workers.stream.volume import SpillFolder

Fields = dict[bytes, bytes]


async def read_group(transport: Transport, group_id: str) -> Group | None:
    """The group as it is now; None when it is closed or was lost."""
    return (await read_groups(transport, [group_id]))[0]


async def read_groups(transport: Transport, group_ids: Iterable[str], *, taken: bool = False) -> list[Group | None]:
    """Several groups in one round trip; ``taken`` stamps them as taken by the trainer now."""
    pipeline = transport.commands.pipeline(transaction=False)
    pipeline.time()
    ids = list(group_ids)
    for group_id in ids:
        pipeline.hgetall(transport.names.group(group_id))
    (seconds, microseconds), *hashes = await pipeline.execute()
    at = float(seconds) + float(microseconds) / 1e6 if taken else None
    return [
        await _parse(group_id, fields, transport.volume, at) if b"phase" in fields else None
        for group_id, fields in zip(ids, hashes, strict=True)
    ]


async def _parse(group_id: str, fields: Fields, volume: SpillFolder, taken: float | None) -> Group:
    admitted = float(fields[b"admitted"])
    return Group(
        id=group_id,
        phase=cast(Phase, fields[b"phase"].decode()),
        prompt=decode(await volume.load(fields[b"prompt"]), Prompt),
        samples=[await _sample(i, fields, volume, admitted) for i in range(int(fields[b"n"]))],
        incarnation=int(fields[b"incarnation"]),
        admitted=admitted,
        terminal=_seconds(fields.get(b"terminal")),
        ready=_seconds(fields.get(b"ready")),
        reason=fields.get(b"reason", b"").decode(),
        taken=taken,
    )


async def _sample(i: int, fields: Fields, volume: SpillFolder, admitted: float) -> GroupSample:
    published = fields.get(b"published:%d" % i)
    ended = fields.get(b"ended:%d" % i)
    _, digest, taken, published_at, _ = published.split() if published else (None, b"", None, None, None)
    _, _, score_taken, committed, deliveries, first = ended.split() if ended else (None, None, None, None, b"1", None)
    scoring = decoder(ScoringRecord).decode(fields[b"score:%d" % i]) if ended else None
    body = None
    if published:
        try:
            body = await _body(i, fields, volume)
        except RecordError as error:
            scoring = lost_body(scoring, str(error))
    return GroupSample(
        index=i,
        stamps=Stamps(
            admitted=admitted,
            taken=_seconds(taken),
            published=_seconds(published_at),
            score_first_taken=_seconds(first),
            score_taken=_seconds(score_taken),
            committed=_seconds(committed),
        ),
        body=body,
        digest=digest.decode(),
        scoring=scoring,
        deliveries=max(int(deliveries), 1),
    )


async def _body(i: int, fields: Fields, volume: SpillFolder) -> Body:
    return decode_body(
        await volume.load(fields[b"tensors:%d" % i]),
        await volume.load(fields[b"sample:%d" % i]),
        fields[b"generation:%d" % i],
    )


def lost_body(scoring: ScoringRecord | None, reason: str) -> ScoringRecord | None:
    """A score whose body cannot be read is no score: there is nothing to train on."""
    if scoring is None or scoring.outcome != "scored":
        return scoring
    return ScoringRecord(outcome="infra_error", reason=reason, scorers=scoring.scorers, worker=scoring.worker)


def without_group_scorers(group: Group, outcome: Outcome, reason: str) -> list[ScoringRecord]:
    """The samples' scorings when their group-scope scorers came to nothing: no value, never the half of one."""
    return [
        ScoringRecord(outcome=outcome, reason=reason, scorers=sample.scoring.scorers, worker=sample.scoring.worker)
        if sample.scoring.outcome == "scored"
        else sample.scoring
        for sample in group.samples
        if sample.scoring is not None
    ]


def _seconds(text: bytes | None) -> float | None:
    return None if text is None or text == b"-" else float(text)
