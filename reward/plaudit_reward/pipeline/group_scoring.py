"""Run the scorers of group scope: they receive a group's samples that have a value, and change these values.

There are three kinds, in this order: those that change the values of one scorer (``post_process_scores`` of its class),
those that add a value, those that take the combined values and return their replacements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from plaudit_reward.pipeline.attempts import AttemptsResult, attempt_until_answered
from plaudit_reward.pipeline.combine import Combined, ScorerPart, weighted_sum
from plaudit_reward.pipeline.combiner import Combiner, WeightedSum
from plaudit_reward.pipeline.in_flight import CallsInFlight
from plaudit_reward.pipeline.normalize import normalised
from plaudit_reward.pipeline.stage import GroupStage, Rules, Stage, record_of
from plaudit_reward.score import Score
from plaudit_reward.scorer import GroupScorer
from plaudit_wire.records import ScorerRecord, ScoringRecord
from plaudit_wire.sample import Sample

_FAILED = ScorerRecord("timeout", reason="its group was not scored")


class GroupScoring:
    """Run the group-scope half of a pipeline.

    Args:
        timeout_s: for one scorer and one group, retries included, waits excluded.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group_stages: Sequence[GroupStage],
        combiner: Combiner,
        timeout_s: float,
        *,
        normalize: bool = False,
        in_flight: CallsInFlight | None = None,
    ) -> None:
        self._in_flight = in_flight or CallsInFlight()
        self._post_process = [stage for stage in group_stages if stage.of is not None]
        self._adding = [stage for stage in group_stages if stage.of is None and not stage.replaces]
        self._replacing = [stage for stage in group_stages if stage.replaces]
        self._rules: dict[str, Rules] = {stage.scorer.name: stage.rules for stage in stages}
        self._rules |= {stage.scorer.name: stage.rules for stage in self._adding}
        self._combiner = combiner
        self._timeout_s = timeout_s
        self._normalize = normalize

    @property
    def present(self) -> bool:
        """Return True if a group needs scoring after its samples."""
        return bool(self._post_process or self._adding or self._replacing or self._normalize)

    @property
    def scorers(self) -> list[GroupScorer]:
        """Return all scorers of group scope."""
        return [stage.scorer for stage in (*self._post_process, *self._adding, *self._replacing)]

    @property
    def counts(self) -> bool:
        """Return True if one of them adds to the reward or replaces it: a sample has no final value without them."""
        return bool(self._replacing) or self.adds

    @property
    def adds(self) -> bool:
        """Return True if one of them adds a value to the reward."""
        return any(stage.rules.weight for stage in self._adding)

    async def score(self, samples: Sequence[Sample], scorings: Sequence[ScoringRecord]) -> list[ScoringRecord]:
        """Score a group; see ``Pipeline.score_group``."""
        current = list(scorings)
        for stage in self._post_process:
            current = await self._changed(stage, samples, current)
        current = await self._added(samples, current, normalize=self._normalize)
        for stage in self._replacing:
            current = await self._replaced(stage, samples, current)
        return [msgspec.structs.replace(scoring, alone=None) for scoring in current]

    async def score_one(self, sample: Sample, scoring: ScoringRecord) -> ScoringRecord:
        """Score a sample without a group: scorers that add a value receive a group of one, which has no spread."""
        (scoring,) = await self._added([sample], [scoring], normalize=False)
        return scoring

    async def _added(
        self, samples: Sequence[Sample], scorings: Sequence[ScoringRecord], *, normalize: bool
    ) -> list[ScoringRecord]:
        """Run the scorers that add a value, concurrently, and combine again."""
        chosen = [i for i, scoring in enumerate(scorings) if scoring.is_scored]
        if not chosen or not (self._adding or self._post_process or normalize):
            return list(scorings)
        seen = [samples[i] for i in chosen]
        values = [_value(scorings[i]) for i in chosen]
        columns = await asyncio.gather(*(self._ask(stage, seen, values) for stage in self._adding))
        records = [
            scorings[i].scorers | {s.scorer.name: c[place] for s, c in zip(self._adding, columns, strict=True)}
            for place, i in enumerate(chosen)
        ]
        parts = [self._parts(of_sample) for of_sample in records]
        result = list(scorings)
        for i, of_sample, counted in zip(chosen, records, normalised(parts) if normalize else parts, strict=True):
            combined = await self._combiner.combine(samples[i], counted, provisional=False)
            result[i] = _with(scorings[i], combined, of_sample)
        return result

    def alone(self, parts: Sequence[ScorerPart]) -> float | None:
        """Return the value that a sample keeps if its group is never scored, as if all group-scope scorers had failed.

        Returns:
            None if it has no value then: a failure decides (``mask``, ``dropGroup``), or the values of sample scope are
            not on the scale of the group's.
        """
        if self._normalize or not isinstance(self._combiner, WeightedSum):
            return None
        changed = {stage.of for stage in self._post_process}
        failed = [replace(part, record=_FAILED) if part.name in changed else part for part in parts]
        failed += [stage.rules.part(stage.scorer.name, _FAILED) for stage in self._adding]
        value = weighted_sum(failed).score.value
        for stage in self._replacing:
            if value is not None and stage.rules.on_failure != "ignore":
                value = weighted_sum([ScorerPart(stage.scorer.name, 1.0, stage.rules.on_failure, _FAILED)]).score.value
        return value

    async def close(self) -> None:
        """Close the scorers; those that post-process belong to a scorer of sample scope."""
        await asyncio.gather(*(stage.scorer.close() for stage in (*self._adding, *self._replacing)))

    async def _changed(
        self, stage: GroupStage, samples: Sequence[Sample], scorings: Sequence[ScoringRecord]
    ) -> list[ScoringRecord]:
        """Return the records with the values of scorer ``stage.of`` changed; ``_added`` combines them again."""
        name = stage.of or ""
        chosen = [
            i
            for i, scoring in enumerate(scorings)
            if scoring.is_scored and name in scoring.scorers and scoring.scorers[name].is_scored
        ]
        values = [value for i in chosen if (value := scorings[i].scorers[name].value) is not None]
        result = list(scorings)
        records = await self._ask(stage, [samples[i] for i in chosen], values) if chosen else []
        for i, value, new in zip(chosen, values, records, strict=True):
            old = scorings[i].scorers[name]
            extra = {**old.extra, **new.extra, "before_post_process": value}
            changed = msgspec.structs.replace(old, outcome=new.outcome, value=new.value, reason=new.reason, extra=extra)
            result[i] = msgspec.structs.replace(scorings[i], scorers={**scorings[i].scorers, name: changed})
        return result

    async def _replaced(
        self, stage: GroupStage, samples: Sequence[Sample], scorings: Sequence[ScoringRecord]
    ) -> list[ScoringRecord]:
        chosen = [i for i, scoring in enumerate(scorings) if scoring.is_scored]
        result = list(scorings)
        if not chosen:
            return result
        values = [_value(scorings[i]) for i in chosen]
        records = await self._ask(stage, [samples[i] for i in chosen], values)
        for i, record in zip(chosen, records, strict=True):
            scorers = {**scorings[i].scorers, stage.scorer.name: record}
            if not record.is_scored and stage.rules.on_failure == "ignore":
                result[i] = msgspec.structs.replace(scorings[i], scorers=scorers)
            else:
                # Its weight is always 1: it returns the final values, not a share of them.
                part = ScorerPart(stage.scorer.name, 1.0, stage.rules.on_failure, record)
                result[i] = _with(scorings[i], weighted_sum([part]), scorers)
        return result

    async def _ask(self, stage: GroupStage, samples: Sequence[Sample], values: Sequence[float]) -> list[ScorerRecord]:
        with self._in_flight.call(stage.scorer.name):
            ended: AttemptsResult[list[Score]] = await attempt_until_answered(
                lambda attempt: stage.scorer.score_group(samples, values, attempt),
                stage.rules.allowance(self._timeout_s),
            )
        scores = ended.result if ended.result is not None else [ended.failure()] * len(samples)
        return [record_of(score, ended) for score in scores]

    def _parts(self, records: dict[str, ScorerRecord]) -> list[ScorerPart]:
        return [self._rules[name].part(name, record) for name, record in records.items() if name in self._rules]


def _value(scoring: ScoringRecord) -> float:
    assert scoring.value is not None
    return scoring.value


def _with(scoring: ScoringRecord, combined: Combined, scorers: dict[str, ScorerRecord]) -> ScoringRecord:
    return msgspec.structs.replace(
        scoring,
        outcome=combined.score.outcome,
        value=combined.score.value,
        reason=combined.score.reason,
        drop_group=combined.drop_group,
        scorers=scorers,
    )
