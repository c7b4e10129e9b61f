"""``kind: python``: a user's function, run in child processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plaudit_reward.errors import ConfigurationError, InfrastructureError
from plaudit_reward.functions.function import POST_PROCESS, declares_post_process
from plaudit_reward.functions.target import Description, Target
from plaudit_reward.isolation.pool import Pool
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.sample import Sample


class FunctionScorer:
    """Scores by a user's function; of sample or group scope as its target says. Open it before use.

    Args:
        name: of the scorer in the job.
        target: the function.
        processes: how many child processes run it.
        max_concurrent: how many calls may run at a time where a child can run several (threads, async).
    """

    def __init__(self, name: str, target: Target, *, processes: int = 2, max_concurrent: int = 256) -> None:
        self.name = name
        self.target = target
        self._pool = Pool(name, target, processes=processes, max_concurrent=max_concurrent)
        self._description: Description | None = None

    async def open(self) -> None:
        """Starts the child processes and has them load the function.

        Raises:
            ConfigurationError: it cannot be loaded, or its signature does not fit.
        """
        self._description = await self._pool.open()
        if self._description.post_processes and not declares_post_process(self.target.path, self.target.function):
            await self.close()
            raise ConfigurationError(
                f"{self.target.function} in {self.target.path} inherits {POST_PROCESS} from another file: define it "
                "in that file's class itself, so that the trainer sees that groups are to be scored"
            )

    @property
    def post_processes(self) -> bool:
        """Whether its class changes the values of a whole group afterwards."""
        return self._description is not None and self._description.post_processes

    @property
    def replaces_values(self) -> bool:
        """Whether it takes a group's values and gives the ones to use instead (``scope: group``)."""
        return self._description is not None and self._description.form == "values"

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Scores one sample."""
        (score,) = await self._pool.call([sample], attempt)
        return _raised(score)

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Scores all samples of a group in one call."""
        return _raised_together(await self._pool.call(samples, attempt, values=list(values)))

    async def post_process(self, values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Gives a group's values to the class's ``post_process_scores``."""
        return _raised_together(await self._pool.call([], attempt, values=list(values), post_process=True))

    async def combine(self, values: Mapping[str, float | None], sample: Sample, attempt: Attempt) -> Score:
        """Gives the values of one sample's scorers to a combining function."""
        (score,) = await self._pool.call([sample], attempt, values=dict(values))
        return _raised(score)

    async def parse(self, answer: str, samples: Sequence[Sample], attempt: Attempt) -> list[Score]:
        """Gives a judge's answer to a function that reads it; the samples are those that it is about."""
        return _raised_together(await self._pool.call(samples, attempt, values=answer))

    def room(self) -> int:
        """How many more samples it could begin soon."""
        return self._pool.room()

    async def close(self) -> None:
        """Ends the child processes."""
        await self._pool.close()


class PostProcess:
    """The ``post_process_scores`` of a scorer's class, as a scorer of groups.

    Args:
        scorer: whose class has it; its owner closes it.
    """

    def __init__(self, scorer: FunctionScorer) -> None:
        self.name = scorer.name
        self._scorer = scorer

    async def open(self) -> None:
        """Its scorer is opened by its owner."""

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Gives the group's values of that scorer to the method."""
        return await self._scorer.post_process(values, attempt)

    def room(self) -> int:
        """How many more groups it could begin soon."""
        return self._scorer.room()

    async def close(self) -> None:
        """Nothing of its own to end."""


def _raised(score: Score) -> Score:
    """Raises what another attempt may mend; gives everything else as it is."""
    if score.outcome == "infra_error":
        raise InfrastructureError(score.reason or "the function reported an infrastructure error")
    return score


def _raised_together(scores: list[Score]) -> list[Score]:
    if scores and all(score.outcome == "infra_error" for score in scores):
        raise InfrastructureError(scores[0].reason or "the function reported an infrastructure error")
    return scores
