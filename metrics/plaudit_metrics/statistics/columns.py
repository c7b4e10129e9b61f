"""A step's samples as arrays: one column a field, so that every figure is one numpy call.

Built from ``SampleRecord`` by whoever holds them (the trainer from group hashes, the metrics service from events);
read by ``steps``, ``stages`` and ``waits``. NaN stands for "did not happen".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plaudit_wire.records import OUTCOMES, GenerationRecord, SampleRecord, ScorerRecord

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_NEVER_GENERATED = GenerationRecord(
    worker="",
    generate_s=np.nan,
    prompt_tokens=0,
    response_tokens=0,
    version_min=0,
    version_max=0,
    tool_s=np.nan,
    engine_queue_s=np.nan,
)


@dataclass(frozen=True)
class ScorerColumns:
    """One scorer's part in a step; every array has shape [number of samples that it was asked about]."""

    value: Floats
    """NaN where it gave none."""
    limiter_s: Floats
    retry_s: Floats
    call_s: Floats
    outcome: Integers
    """Index into ``OUTCOMES``."""

    @classmethod
    def from_records(cls, records: Sequence[ScorerRecord]) -> ScorerColumns:
        """Turns what one scorer said of a step's samples into arrays."""
        return cls(
            value=_optional_floats(record.value for record in records),
            limiter_s=_floats(record.limiter_s for record in records),
            retry_s=_floats(record.retry_s for record in records),
            call_s=_floats(record.call_s for record in records),
            outcome=_integers(_OUTCOME_CODES[record.outcome] for record in records),
        )


@dataclass(frozen=True)
class SampleColumns:
    """A step's samples as arrays of shape [number of samples]; durations in seconds, points in time since the epoch."""

    group: Integers
    """Index into ``groups``."""
    groups: tuple[str, ...]
    """Ids of the groups that the samples belong to."""
    admitted: Floats
    taken: Floats
    published: Floats
    score_first_taken: Floats
    score_taken: Floats
    committed: Floats
    generated: NDArray[np.bool_]
    """Whether there is a generation record; where not, the generation's columns are NaN or 0."""
    generate_s: Floats
    tool_s: Floats
    engine_queue_s: Floats
    num_preempted: Integers
    """-1 where the engine did not say."""
    prompt_tokens: Integers
    response_tokens: Integers
    version_min: Integers
    limiter_s: Floats
    retry_s: Floats
    call_s: Floats
    value: Floats
    """NaN where the sample has no score."""
    outcome: Integers
    """Index into ``OUTCOMES``."""
    deliveries: Integers
    scorers: dict[str, ScorerColumns]

    def __len__(self) -> int:
        return len(self.group)

    @classmethod
    def from_records(cls, samples: Sequence[SampleRecord]) -> SampleColumns:
        """Turns records into arrays, in their order."""
        codes = {group: code for code, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
        stamps = [sample.stamps for sample in samples]
        generations = [sample.generation or _NEVER_GENERATED for sample in samples]
        scorings = [sample.scoring for sample in samples]
        return cls(
            group=_integers(codes[sample.group] for sample in samples),
            groups=tuple(codes),
            admitted=_floats(stamp.admitted for stamp in stamps),
            taken=_optional_floats(stamp.taken for stamp in stamps),
            published=_optional_floats(stamp.published for stamp in stamps),
            score_first_taken=_optional_floats(stamp.score_first_taken for stamp in stamps),
            score_taken=_optional_floats(stamp.score_taken for stamp in stamps),
            committed=_optional_floats(stamp.committed for stamp in stamps),
            generated=np.fromiter((sample.generation is not None for sample in samples), np.bool_, len(samples)),
            generate_s=_floats(generation.generate_s for generation in generations),
            tool_s=_floats(generation.tool_s for generation in generations),
            engine_queue_s=_floats(generation.engine_queue_s for generation in generations),
            num_preempted=_integers(generation.num_preempted for generation in generations),
            prompt_tokens=_integers(generation.prompt_tokens for generation in generations),
            response_tokens=_integers(generation.response_tokens for generation in generations),
            version_min=_integers(generation.version_min for generation in generations),
            limiter_s=_floats(scoring.limiter_s for scoring in scorings),
            retry_s=_floats(scoring.retry_s for scoring in scorings),
            call_s=_floats(scoring.call_s for scoring in scorings),
            value=_optional_floats(scoring.value for scoring in scorings),
            outcome=_integers(_OUTCOME_CODES[scoring.outcome] for scoring in scorings),
            deliveries=_integers(sample.deliveries for sample in samples),
            scorers=_scorers(samples),
        )


def _scorers(samples: Sequence[SampleRecord]) -> dict[str, ScorerColumns]:
    records: dict[str, list[ScorerRecord]] = {}
    for sample in samples:
        for name, record in sample.scoring.scorers.items():
            records.setdefault(name, []).append(record)
    return {name: ScorerColumns.from_records(of_scorer) for name, of_scorer in records.items()}


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def _optional_floats(values: Iterable[float | None]) -> Floats:
    return np.array(list(values), dtype=np.float64)  # numpy reads None as NaN


def _integers(values: Iterable[int]) -> Integers:
    return np.array(list(values), dtype=np.int64)
