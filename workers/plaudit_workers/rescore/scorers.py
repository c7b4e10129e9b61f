"""Score stored samples: by the scorers of a job, in this process, or by a reward service over HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

import plaudit_client
from plaudit_wire.records import Outcome, ScorerRecord, ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.client import ServiceError
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.scoring.build import build_pipeline
from plaudit_workers.scoring.offline.score import scored_in_order
from plaudit_workers.scoring.version import scoring_version

Unit = list[Sample]
"""Samples that are scored together: a whole group, or a single sample."""

_HTTP_TIMEOUT_S = 86_400.0
_IN_WORK = 1024
"""Units that a service has at a time; its own limits decide how many of them it works on."""


class StoredScorers(Protocol):
    """Score stored samples.

    Attributes:
        version: what decides a score; it changes with the scorers.
    """

    names: list[str]
    version: str
    scores_groups: bool

    def scored(self, units: AsyncIterator[tuple[str, Unit]]) -> AsyncIterator[list[ScoringRecord]]:
        """Yield the scorings of each unit, in order; each comes with an id that a resumed command repeats."""
        ...


class JobScorers:
    """Score by the scorers of a job, in this process."""

    def __init__(self, job: RLJob, pipeline: Any) -> None:
        self.names = [scorer.name for scorer in job.spec.reward.scorers]
        self.version = scoring_version(job)
        self.scores_groups = pipeline.scores_groups
        self._pipeline = pipeline
        self._max_concurrent = job.spec.reward.workers.max_concurrent_samples

    async def scored(self, units: AsyncIterator[tuple[str, Unit]]) -> AsyncIterator[list[ScoringRecord]]:
        """See ``StoredScorers``."""
        sizes: deque[int] = deque()

        async def samples() -> AsyncIterator[Unit]:
            async for _, unit in units:
                sizes.append(len(unit))
                yield unit

        scorings: list[ScoringRecord] = []
        async for scoring in scored_in_order(self._pipeline, samples(), self._max_concurrent):
            scorings.append(scoring)
            if len(scorings) == sizes[0]:
                sizes.popleft()
                yield scorings
                scorings = []


class ServiceScorers:
    """Score by a reward service, over HTTP and at its limits."""

    def __init__(self, client: plaudit_client.RewardClient, description: dict[str, Any]) -> None:
        scorers = description["scorers"]
        self.names = [scorer["name"] for scorer in scorers]
        self.version = f"{description['job']} at {client.url}: {', '.join(self.names)}"
        self.scores_groups = any(scorer["scope"] == "group" for scorer in scorers)
        self._client = client

    async def scored(self, units: AsyncIterator[tuple[str, Unit]]) -> AsyncIterator[list[ScoringRecord]]:
        """See ``StoredScorers``.

        Raises:
            ServiceError: the service refuses a sample or the token, or cannot be reached for a day.
        """
        in_work: deque[asyncio.Task[list[ScoringRecord]]] = deque()
        try:
            async for name, unit in units:
                in_work.append(asyncio.create_task(self._score(name, unit)))
                while in_work and (len(in_work) >= _IN_WORK or in_work[0].done()):
                    yield await in_work.popleft()
            while in_work:
                yield await in_work.popleft()
        except plaudit_client.RewardError as error:
            raise ServiceError(f"--url {self._client.url}: {error}") from error
        finally:
            for task in in_work:
                task.cancel()

    async def _score(self, name: str, unit: Unit) -> list[ScoringRecord]:
        if len(unit) == 1 and not self.scores_groups:
            return [_record(await self._client.score(_body(unit[0], name)))]
        return [_record(result) for result in await self._client.score_group([_body(each) for each in unit], name)]


@asynccontextmanager
async def scorers_of_job(job: RLJob) -> AsyncIterator[JobScorers]:
    """Open a job's scorers; close them afterwards."""
    pipeline = await build_pipeline(job.spec.reward, "rescore")
    try:
        yield JobScorers(job, pipeline)
    finally:
        await pipeline.close()


@asynccontextmanager
async def scorers_of_service(url: str, token: str) -> AsyncIterator[ServiceScorers]:
    """Connect to a reward service.

    Raises:
        ServiceError: it cannot be reached, or refuses the token.
    """
    try:
        client = plaudit_client.RewardClient(url, token, timeout_s=_HTTP_TIMEOUT_S)
        description = await client.service()
    except (plaudit_client.RewardError, ValueError) as error:
        raise ServiceError(f"--url {url}: {error}") from error
    async with client:
        yield ServiceScorers(client, description)


def _body(sample: Sample, name: str = "") -> dict[str, Any]:
    body = {
        "response": sample.response,
        "prompt": sample.messages or sample.prompt,
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
        "response_tokens": sample.response_tokens,
        "max_tokens": sample.max_tokens,
        "finish_reason": sample.finish_reason,
    }
    return body | ({"id": name} if name else {})


def _record(result: plaudit_client.Result) -> ScoringRecord:
    scorers = {
        name: ScorerRecord(
            cast(Outcome, scorer.outcome), scorer.value, scorer.reason, call_s=scorer.seconds, extra=dict(scorer.extra)
        )
        for name, scorer in result.scorers.items()
    }
    outcome = cast(Outcome, result.outcome)
    return ScoringRecord(
        outcome, result.score, result.reason, result.drop_group, scorers, call_s=result.seconds, version=result.version
    )
