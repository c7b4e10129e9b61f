"""Score samples with all scorers of a job, in the order of their ``when``, then groups with those of group scope.

Scorers of group scope receive a group's samples that have a value, and change these values. There are three kinds, in
this order: those that change the values of one scorer (``post_process_scores`` of its class), those that add a value,
those that take the combined values and return their replacements.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from plaudit_reward.attempts import (
    Allowance,
    AttemptsResult,
    Combined,
    Combiner,
    GroupStage,
    Rules,
    ScorerPart,
    Stage,
    WeightedSum,
    attempt_until_answered,
    counted_value,
    record_of,
    weighted_sum,
)
from plaudit_reward.scorer import ALWAYS_ROOM, Attempt, GroupScorer, Score, Scorer
from plaudit_wire.records import Sample, ScorerRecord, ScorerWork, ScoringRecord

T = TypeVar("T")


class CallsInFlight:
    """Count each scorer's unfinished calls, with the age of the oldest: a hanging scorer never finishes one.

    The age is that of the present attempt, without waits for limits: a call that a throttled endpoint makes wait does
    not hang.
    """

    def __init__(self, scorers: Iterable[str]) -> None:
        self._calls: dict[str, set[CallInFlight]] = {scorer: set() for scorer in scorers}

    async def until_answered(
        self, scorer: str, ask: Callable[[Attempt], Awaitable[T]], allowance: Allowance
    ) -> AttemptsResult[T]:
        """Call a scorer as ``attempt_until_answered`` does, and count the call with its waits and retries."""
        call = CallInFlight()
        self._calls[scorer].add(call)
        try:
            return await attempt_until_answered(lambda attempt: call.run(ask(attempt), attempt), allowance)
        finally:
            self._calls[scorer].remove(call)

    def work(self) -> dict[str, ScorerWork]:
        """Return the work of each scorer."""
        return {
            scorer: ScorerWork(
                len(calls), max((call.age_s for call in calls), default=0.0), sum(call.waits for call in calls)
            )
            for scorer, calls in self._calls.items()
        }


class CallInFlight:
    """Hold the present attempt of a call; between two attempts there is none."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None

    async def run(self, work: Awaitable[T], attempt: Attempt) -> T:
        """Await the work of an attempt."""
        self._attempt = attempt
        try:
            return await work
        finally:
            self._attempt = None

    @property
    def waits(self) -> bool:
        """Return True while the present attempt waits for a limit."""
        return self._attempt is not None and self._attempt.waits

    @property
    def age_s(self) -> float:
        """Return the age of the present attempt, without waits for limits."""
        return 0.0 if self._attempt is None else self._attempt.age_s


_STD_EPSILON = 1e-6


def normalised(group: Sequence[Sequence[ScorerPart]]) -> list[list[ScorerPart]]:
    """Return the parts of a group's samples with each scorer's values normalised over the group: GDPO.

    For each scorer k and each sample i: ``(r_ik - mean_k) ÷ (std_k + 1e-6)`` over the group's samples that have a value
    of k, the standard deviation with n - 1 (torch's default, as for GRPO's advantage); the weighted sum follows. A sum
    of raw rewards, normalised afterwards as GRPO does, gives different combinations of rewards the same advantage.

    Source: Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization (arXiv 2601.05242). Its
    second step, a normalisation over the batch, is the trainer's ``advantage: reinforcePlusPlus``. Degenerate: a scorer
    with a single value, or the same value for all samples, does not distinguish them and contributes 0. A part without
    a value (a failure that does not count as zero, a skipped scorer) is unchanged and excluded from mean and deviation.
    """
    values: dict[str, list[float]] = {}
    for parts in group:
        for part in parts:
            if (value := counted_value(part)) is not None:
                values.setdefault(part.name, []).append(value)
    scales = {name: _scale(of_scorer) for name, of_scorer in values.items()}
    return [[_normalised(part, scales.get(part.name, _Scale())) for part in parts] for parts in group]


_LARGEST_SQUARED = 1e150
"""Values beyond it are divided by the largest of them first: their squares are no floats."""


class _Scale(NamedTuple):
    """Hold how a scorer's values are normalised: ``(value ÷ unit - mean) × factor``."""

    unit: float = 1.0
    mean: float = 0.0
    factor: float = 0.0


def _scale(values: Sequence[float]) -> _Scale:
    if min(values) == max(values):
        return _Scale()
    largest = max(map(abs, values))
    unit = largest if largest > _LARGEST_SQUARED else 1.0
    in_units = [value / unit for value in values]
    mean = math.fsum(in_units) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in in_units) / (len(values) - 1)
    return _Scale(unit, mean, 1 / (math.sqrt(variance) + _STD_EPSILON / unit))


def _normalised(part: ScorerPart, scale: _Scale) -> ScorerPart:
    value = counted_value(part)
    if value is None:
        return part
    value = (value / scale.unit - scale.mean) * scale.factor
    return msgspec.structs.replace(part, record=msgspec.structs.replace(part.record, outcome="scored", value=value))


_FAILED = ScorerRecord("timeout", reason="its group was not scored")


class GroupScoring:
    """Run the group-scope half of a pipeline.

    ``timeout_s`` is for one scorer and one group, retries included, waits excluded.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group_stages: Sequence[GroupStage],
        combiner: Combiner,
        timeout_s: float,
        *,
        normalize: bool,
        in_flight: CallsInFlight,
    ) -> None:
        self._in_flight = in_flight
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
        parts = [
            [self._rules[name].part(name, record) for name, record in of_sample.items() if name in self._rules]
            for of_sample in records
        ]
        result = list(scorings)
        for i, of_sample, counted in zip(chosen, records, normalised(parts) if normalize else parts, strict=True):
            combined = await self._combiner.combine(samples[i], counted, provisional=False)
            result[i] = _with(scorings[i], combined, of_sample)
        return result

    def alone(self, parts: Sequence[ScorerPart]) -> float | None:
        """Return the value that a sample keeps if its group is never scored, as if all group-scope scorers had failed.

        It is None if a failure decides (``mask``, ``dropGroup``), or the values of sample scope are not on the scale of
        the group's.
        """
        if self._normalize or not isinstance(self._combiner, WeightedSum):
            return None
        changed = {stage.of for stage in self._post_process}
        failed = [msgspec.structs.replace(part, record=_FAILED) if part.name in changed else part for part in parts]
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
            changed = msgspec.structs.replace(
                old, outcome=new.outcome, value=new.value, reason=new.reason, post_process_s=new.seconds, extra=extra
            )
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
            # Its weight is always 1: it returns the final values, not a share of them.
            part = msgspec.structs.replace(stage.rules.part(stage.scorer.name, record), weight=1.0)
            if counted_value(part) is None and not part.decides:
                result[i] = msgspec.structs.replace(scorings[i], scorers=scorers)
            else:
                result[i] = _with(scorings[i], weighted_sum([part]), scorers)
        return result

    async def _ask(self, stage: GroupStage, samples: Sequence[Sample], values: Sequence[float]) -> list[ScorerRecord]:
        ended: AttemptsResult[list[Score]] = await self._in_flight.until_answered(
            stage.scorer.name,
            lambda attempt: stage.scorer.score_group(samples, values, attempt),
            stage.rules.allowance(self._timeout_s),
        )
        scores = ended.result if ended.result is not None else [ended.failure()] * len(samples)
        return [msgspec.structs.replace(record_of(score, ended), of_group=True) for score in scores]


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


class _Done(msgspec.Struct, frozen=True):
    """Hold a scorer's result for one sample, and the seconds along its chain of ``when``."""

    part: ScorerPart
    limiter_s: float
    retry_s: float
    spent_s: float
    """Seconds that count against the sample's budget."""
    ended_s: float
    """Monotonic."""


class Pipeline:
    """Score samples and groups; never raise, whatever the scorers do.

    ``stages`` are in the job's order (``when`` names an earlier one). ``timeout_s`` is for one sample, all scorers and
    retries, waits excluded; likewise for one group.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group_stages: Sequence[GroupStage] = (),
        *,
        combiner: Combiner | None = None,
        timeout_s: float = 120.0,
        worker: str = "",
        normalize: bool = False,
    ) -> None:
        self._stages = list(stages)
        self._combiner = combiner or WeightedSum()
        self._timeout_s = timeout_s
        self._worker = worker
        self._in_flight = CallsInFlight([*(s.scorer.name for s in stages), *(s.scorer.name for s in group_stages)])
        self._group = GroupScoring(
            stages, group_stages, self._combiner, timeout_s, normalize=normalize, in_flight=self._in_flight
        )
        self._only_groups_count = self._group.adds and not any(stage.rules.weight for stage in stages)

    @property
    def scores_groups(self) -> bool:
        """Return True if group-scope scorers follow the sample-scope ones."""
        return self._group.present

    @property
    def circuits_open(self) -> list[str]:
        """Return the names of the scorers with an open circuit breaker."""
        scorers: list[Scorer | GroupScorer] = [*(stage.scorer for stage in self._stages), *self._group.scorers]
        return [scorer.name for scorer in scorers if getattr(scorer, "circuit_open", False)]

    @property
    def work(self) -> dict[str, ScorerWork]:
        """Return the unfinished work of each scorer."""
        return self._in_flight.work()

    def room(self) -> int:
        """Return how many more samples could start soon."""
        return min((stage.scorer.room() for stage in self._stages), default=ALWAYS_ROOM)

    def group_room(self) -> int:
        """Return how many more groups could start soon."""
        return min((scorer.room() for scorer in self._group.scorers), default=ALWAYS_ROOM)

    async def score(self, sample: Sample) -> ScoringRecord:
        """Score one sample with all scorers of sample scope.

        A sample whose conversation broke off gets that outcome and no value; no scorer runs.

        Validation samples never form a group: if only group-scope scorers have a weight, such a sample is scored as a
        group of one.
        """
        if sample.failure is not None:
            return ScoringRecord(sample.failure.outcome, reason=sample.failure.reason, worker=self._worker)
        began_s = time.monotonic()
        done = await self._run_stages(sample)
        parts = [one.part for one in done]
        combined = await self._combiner.combine(sample, parts, provisional=self._group.counts)
        scoring = self._record(combined, done, began_s)
        if self._group.present and combined.score.value is not None:
            scoring = msgspec.structs.replace(scoring, alone=self._group.alone(parts))
        if self._only_groups_count and sample.split == "validation":
            scoring = await self._group.score_one(sample, scoring)
        return scoring

    async def score_group(self, samples: Sequence[Sample], scorings: Sequence[ScoringRecord]) -> list[ScoringRecord]:
        """Return the records that replace ``scorings``, in the same order, after the scorers of group scope.

        Only samples with a value take part; the others' records do not change.
        """
        return await self._group.score(samples, scorings)

    async def score_whole_group(self, samples: Sequence[Sample], places: asyncio.Semaphore) -> list[ScoringRecord]:
        """Score samples with the scorers of sample scope, each in one of ``places``, then with those of group scope."""

        async def scored(sample: Sample) -> ScoringRecord:
            async with places:
                return await self.score(sample)

        return await self.score_group(samples, await asyncio.gather(*map(scored, samples)))

    async def close(self) -> None:
        """Close all scorers."""
        closing = [stage.scorer.close() for stage in self._stages]
        await asyncio.gather(*closing, self._group.close(), self._combiner.close())

    async def _run_stages(self, sample: Sample) -> list[_Done]:
        if len(self._stages) == 1:
            return [await self._run(self._stages[0], sample, None)]
        tasks: dict[str, asyncio.Task[_Done]] = {}
        async with asyncio.TaskGroup() as group:
            for stage in self._stages:
                when = stage.rules.when
                earlier = tasks[when.scorer] if when is not None else None
                tasks[stage.scorer.name] = group.create_task(self._run(stage, sample, earlier))
        return [task.result() for task in tasks.values()]

    async def _run(self, stage: Stage, sample: Sample, earlier: asyncio.Task[_Done] | None) -> _Done:
        limiter_s = retry_s = spent_s = 0.0
        if earlier is not None and stage.rules.when is not None:
            before = await earlier
            if before.part.record.value != stage.rules.when.equals:
                return _held_back(stage, before)
            limiter_s, retry_s, spent_s = before.limiter_s, before.retry_s, before.spent_s
        ended: AttemptsResult[Score] = await self._in_flight.until_answered(
            stage.scorer.name,
            lambda attempt: stage.scorer.score(sample, attempt),
            stage.rules.allowance(self._timeout_s - spent_s),
        )
        score = ended.result if ended.result is not None else ended.failure()
        return _Done(
            stage.rules.part(stage.scorer.name, record_of(score, ended)),
            limiter_s + ended.limiter_s,
            retry_s + ended.retry_s,
            spent_s + ended.spent_s,
            time.monotonic(),
        )

    def _record(self, combined: Combined, done: Sequence[_Done], began_s: float) -> ScoringRecord:
        """Return the sample's record; its seconds are those of the scorer that ended last and add up to the total."""
        last = max(done, key=lambda one: one.ended_s, default=None)
        limiter_s, retry_s = (last.limiter_s, last.retry_s) if last is not None else (0.0, 0.0)
        return ScoringRecord(
            outcome=combined.score.outcome,
            value=combined.score.value,
            reason=combined.score.reason,
            drop_group=combined.drop_group,
            scorers={one.part.name: one.part.record for one in done},
            limiter_s=limiter_s,
            retry_s=retry_s,
            call_s=max(0.0, time.monotonic() - began_s - limiter_s - retry_s),
            worker=self._worker,
        )


def _held_back(stage: Stage, before: _Done) -> _Done:
    assert stage.rules.when is not None
    reason = f"when: {stage.rules.when.scorer} is not {stage.rules.when.equals:g}"
    part = stage.rules.part(stage.scorer.name, ScorerRecord("skipped", reason=reason, attempts=0))
    return _Done(part, before.limiter_s, before.retry_s, before.spent_s, before.ended_s)
