"""Write results as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from plaudit_workers.gateway.bodies import SubmittedSamples
from plaudit_workers.gateway.callers.caller_session import Missing
from plaudit_workers.scoring.offline.lines import SampleOutput
from plaudit_workers.stream.sessions import GroupResult


class SampleAnswer(SampleOutput, frozen=True, omit_defaults=True, kw_only=True):
    """Hold the result of one sample, as callers get it."""

    seconds: float
    index: int = 0
    """Index in its group."""
    drop_group: bool = False


class GroupAnswer(msgspec.Struct, frozen=True):
    """Hold the results of one group, in the order of its samples."""

    id: str
    results: list[SampleAnswer]


class MissingAnswer(msgspec.Struct, frozen=True):
    """Name a sample or group that the service cannot score under this id."""

    id: str
    error: dict[str, Any]


GatewayAnswer = SampleAnswer | GroupAnswer | MissingAnswer

encode = msgspec.json.Encoder().encode


def answer_of(submitted: SubmittedSamples, result: GroupResult | Missing) -> GatewayAnswer:
    """Return the answer to one submitted sample or group."""
    if isinstance(result, Missing):
        message = f"id {submitted.id!r}: another sample was submitted under it. Give each sample an id of its own"
        return MissingAnswer(submitted.id, {"type": result.value, "message": message})
    return stored_answer(submitted.id, result, is_group=submitted.is_group)


def stored_answer(own_id: str, result: GroupResult, *, is_group: bool) -> SampleAnswer | GroupAnswer:
    """Return the answer for a result that Redis holds."""
    samples = sample_answers(own_id, result)
    return GroupAnswer(own_id, samples) if is_group else samples[0]


def sample_answers(own_id: str, result: GroupResult) -> list[SampleAnswer]:
    """Return the results of a group's samples."""
    answers = []
    for index, sample in enumerate(result.samples):
        output = SampleOutput.from_record(sample.scoring)
        answers.append(
            SampleAnswer(
                id=own_id,
                score=output.score,
                outcome=output.outcome,
                reason=output.reason,
                scorers=output.scorers,
                version=output.version,
                seconds=round(sample.seconds, 6),
                index=index,
                drop_group=sample.scoring.drop_group,
            )
        )
    return answers


def lines(answers: Sequence[GatewayAnswer]) -> bytes:
    """Return answers as lines of JSON."""
    return b"".join(encode(answer) + b"\n" for answer in answers)
