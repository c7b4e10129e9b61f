"""``kind: python``: score with a user's function in child processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from plaudit_reward.functions.function import POST_PROCESS, declares_post_process
from plaudit_reward.functions.result import Description, Target
from plaudit_reward.isolation.pool import Pool
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_wire.records import Sample


class Router(Protocol):
    """Route to the servers of a model that the job serves for a function."""

    async def open(self) -> str:
        """Start it; return its address, ``host:port``. Raises ``ConfigurationError``."""

    @property
    def ready(self) -> bool:
        """Return True while some server is healthy."""

    async def close(self) -> None:
        """Stop it."""


class FunctionScorer:
    """Score with a user's function, of sample or group scope as its target has it; open it before use.

    Args:
        processes: number of child processes; an async function that runs inline has one.
        max_concurrent: limit on concurrent calls where a child can run several (threads, async).
        traceparent: returns a sample's trace context (a group's is its first sample's), which the function can read
            (``current_traceparent``). None where nothing is traced.
        router: to the servers of ``target.served``, whose address the function gets; opened and closed here.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        *,
        processes: int = 2,
        max_concurrent: int = 256,
        traceparent: Callable[[Sample], str] | None = None,
        router: Router | None = None,
    ) -> None:
        self.name = name
        self._traceparent = traceparent
        self.target = target
        self._processes, self._max_concurrent = processes, max_concurrent
        self._pool = Pool(name, target, processes=processes, max_concurrent=max_concurrent)
        self._router = router
        self._description: Description | None = None

    async def open(self) -> None:
        """Start the child processes and load the function; raise ``ConfigurationError`` if it does not fit."""
        if self._router is not None and self.target.served is not None:
            served = msgspec.structs.replace(self.target.served, address=await self._router.open())
            target = msgspec.structs.replace(self.target, served=served)
            self._pool = Pool(self.name, target, processes=self._processes, max_concurrent=self._max_concurrent)
        self._description = await self._pool.open()
        if self._description.post_processes and not declares_post_process(self.target.path, self.target.function):
            await self.close()
            raise ConfigurationError(
                f"{self.target.function} in {self.target.path} inherits {POST_PROCESS} from another file: define it "
                "in that file's class itself, so that the trainer can see that groups are scored"
            )

    @property
    def post_processes(self) -> bool:
        """Return True when its class changes the values of a whole group afterwards."""
        return self._description is not None and self._description.post_processes

    @property
    def replaces_values(self) -> bool:
        """Return True when it takes a group's values and returns the ones to use instead (``scope: group``)."""
        return self._description is not None and self._description.form == "values"

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        (score,) = await self._call([sample], attempt)
        return score

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Score all samples of a group in one call."""
        return await self._call(samples, attempt, list(values))

    async def post_process(self, values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Pass a group's values to the class's ``post_process_scores``."""
        return await self._call([], attempt, list(values), post_process=True)

    async def combine(self, values: Mapping[str, float | None], sample: Sample, attempt: Attempt) -> Score:
        """Pass the values of one sample's scorers to a combining function."""
        (score,) = await self._call([sample], attempt, dict(values))
        return score

    async def parse(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """Pass a judge's answer to a function that parses it, with the samples that it judges."""
        return await self._call(samples, attempt, answer)

    def room(self) -> int:
        """Return how many more samples could begin soon; none while its model has no healthy server."""
        return self._pool.room() if self._router is None or self._router.ready else 0

    async def close(self) -> None:
        """End the child processes."""
        await self._pool.close()
        if self._router is not None:
            await self._router.close()

    async def _call(
        self, samples: Sequence[Sample], attempt: Attempt, values: Any = None, *, post_process: bool = False
    ) -> list[Score]:
        """Call the function; raise what another attempt may fix."""
        traceparent = self._traceparent(samples[0]) if self._traceparent and samples else ""
        scores = await self._pool.call(
            samples, attempt, values=values, post_process=post_process, traceparent=traceparent
        )
        if scores and all(score.outcome == "infra_error" for score in scores):
            raise InfrastructureError(scores[0].reason or "the function reported an infrastructure error")
        return scores


class PostProcess:
    """Score groups with the ``post_process_scores`` of a scorer's class; the scorer's owner closes it."""

    def __init__(self, scorer: FunctionScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer

    async def open(self) -> None:
        """Do nothing: the owner of its scorer opens it."""

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Pass the group's values of that scorer to the method."""
        return await self._scorer.post_process(values, attempt)

    def room(self) -> int:
        """Return how many more groups could begin soon."""
        return self._scorer.room()

    async def close(self) -> None:
        """Do nothing: the owner of its scorer closes it."""
