"""Score one sample with all scorers of a job, in the order of their ``when``. Groups: ``group_scoring``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from plaudit_reward.pipeline.attempts import AttemptsResult, attempt_until_answered
from plaudit_reward.pipeline.combine import Combined, ScorerPart
from plaudit_reward.pipeline.combiner import Combiner, WeightedSum
from plaudit_reward.pipeline.group_scoring import GroupScoring
from plaudit_reward.pipeline.in_flight import CallsInFlight
from plaudit_reward.pipeline.stage import GroupStage, Stage, record_of
from plaudit_reward.score import Score
from plaudit_reward.scorer import GroupScorer, Scorer
from plaudit_wire.records import ScorerRecord, ScorerWork, ScoringRecord
from plaudit_wire.sample import Sample

_UNBOUNDED = 1_000_000


@dataclass(frozen=True)
class _Done:
    """A scorer's result for one sample, and the seconds along its chain of ``when``."""

    part: ScorerPart
    limiter_s: float
    retry_s: float
    spent_s: float
    """Seconds that count against the sample's budget."""
    ended_s: float
    """Monotonic."""


class Pipeline:
    """Score samples and groups; never raise, whatever the scorers do.

    Args:
        stages: of sample scope, in the job's order (``when`` names an earlier one).
        timeout_s: for one sample, all scorers and retries, waits excluded; likewise for one group.
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
        return min((stage.scorer.room() for stage in self._stages), default=_UNBOUNDED)

    def group_room(self) -> int:
        """Return how many more groups could start soon."""
        return min((scorer.room() for scorer in self._group.scorers), default=_UNBOUNDED)

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
        with self._in_flight.call(stage.scorer.name):
            ended: AttemptsResult[Score] = await attempt_until_answered(
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
