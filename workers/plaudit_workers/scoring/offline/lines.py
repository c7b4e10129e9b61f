"""Samples and scores as lines of JSON: what ``plaudit score`` and ``plaudit submit`` read and write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from plaudit_wire.records import Outcome, ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.process import RefusedError


class SampleInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One response that is to be scored, with the columns of its data row (verl's names)."""

    response: str
    prompt: str | list[dict[str, Any]] = ""
    """Text, or chat messages."""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    response_tokens: int = 0
    max_tokens: int = 0
    """The most tokens the response could have had; for length penalties."""
    finish_reason: str = "stop"
    """``stop`` or ``length``."""
    id: str = ""
    """Of the sample, for a scoring service; empty: made up."""

    def sample(self, group: str, index: int) -> Sample:
        """The sample as scorers see it, as number ``index`` of a group."""
        chat = not isinstance(self.prompt, str)
        messages: Any = self.prompt if chat else []
        return Sample(
            group=group,
            index=index,
            data_source=self.data_source,
            prompt="\n".join(str(message.get("content", "")) for message in messages) if chat else str(self.prompt),
            response=self.response,
            ground_truth=self.ground_truth,
            extra_info=self.extra_info,
            messages=messages,
            response_tokens=self.response_tokens,
            max_tokens=self.max_tokens,
            finish_reason=self.finish_reason,
        )


class ScorerOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one scorer said."""

    outcome: Outcome
    value: float | None = None
    reason: str | None = None
    seconds: float = 0.0
    """Limits, retries and the call together."""
    extra: dict[str, float | str] = {}


class SampleOutput(msgspec.Struct, frozen=True):
    """What one sample's scoring came to; ``score`` is present exactly when ``outcome`` is ``scored``."""

    score: float | None
    outcome: Outcome
    reason: str | None
    scorers: dict[str, ScorerOutput]

    @classmethod
    def from_record(cls, record: ScoringRecord) -> Self:
        """Of the record that a pipeline gave."""
        scorers = {
            name: ScorerOutput(
                of.outcome, of.value, of.reason, round(of.limiter_s + of.retry_s + of.call_s, 6), dict(of.extra)
            )
            for name, of in record.scorers.items()
        }
        return cls(record.value, record.outcome, record.reason, scorers)


def read_samples(path: Path) -> Iterator[SampleInput]:
    """The samples of a file, one JSON object a line; empty lines are left out.

    Raises:
        RefusedError: the file cannot be read, or a line is no such object; the message names line and field.
    """
    decoder = msgspec.json.Decoder(SampleInput)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield decoder.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        raise RefusedError(f"{path}:{number}: {error}. {_EXPECTED}") from error
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}") from error


_EXPECTED = (
    "A line is a JSON object with response, and perhaps prompt, data_source, ground_truth, extra_info, "
    "response_tokens, max_tokens, finish_reason, id"
)
