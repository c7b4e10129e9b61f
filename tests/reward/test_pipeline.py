"""Several scorers over one sample: order, chains of ``when``, budget, and the seconds of the record."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_reward.attempts import FunctionCombiner, Rules, Stage, When
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import DataError, InfrastructureError, ScoreTimeoutError, ScoringError
from plaudit_wire.records import AgentReward, Sample, ScorerWork, ScoringRecord
from reward_samples import make_sample
from scripted_scorer import ScriptedAnswer, ScriptedScorer


def scripted(name: str, answer: ScriptedAnswer, takes_s: float = 0.0, waits_s: float = 0.0) -> ScriptedScorer:
    return ScriptedScorer(name, lambda sample: answer, lambda sample: takes_s, waits_s)


async def test_the_reward_is_the_weighted_sum_and_each_scorers_part_is_kept() -> None:
    pipeline = Pipeline(
        [
            Stage(scripted("a", Score.scored(1.0, length=3.0)), Rules(weight=0.8)),
            Stage(scripted("b", 0.5), Rules(weight=0.2)),
        ],
        worker="reward-7",
    )
    scoring = await pipeline.score(make_sample())
    assert (scoring.outcome, scoring.worker) == ("scored", "reward-7")
    assert scoring.value == pytest.approx(0.9)
    assert scoring.scorers["a"].extra == {"length": 3.0}
    assert scoring.scorers["b"].value == 0.5


async def test_a_sample_whose_conversation_broke_off_is_not_scored() -> None:
    asked: list[Sample] = []

    def answer(sample: Sample) -> float:
        asked.append(sample)
        return 1.0

    pipeline = Pipeline([Stage(ScriptedScorer("a", answer))])
    broken = make_sample(failure=AgentReward("timeout", reason="hangs gave no result within 3 s"))
    scoring = await pipeline.score(broken)
    assert (scoring.outcome, scoring.value, scoring.reason) == ("timeout", None, "hangs gave no result within 3 s")
    assert asked == []


async def test_scorers_run_at_the_same_time() -> None:
    both_began = asyncio.Barrier(2)

    class Meeting(ScriptedScorer):
        async def score(self, sample: Sample, attempt: object) -> Score:
            async with asyncio.timeout(5):
                await both_began.wait()
            return Score.scored(1.0)

    pipeline = Pipeline([Stage(Meeting("a", lambda s: 1.0)), Stage(Meeting("b", lambda s: 1.0))])
    assert (await pipeline.score(make_sample())).value == 2.0


async def test_when_lets_only_some_samples_through() -> None:
    correct = ScriptedScorer("correct", lambda sample: float(sample.response == "right"))
    judge = scripted("judge", 0.5)
    pipeline = Pipeline([Stage(correct), Stage(judge, Rules(when=When("correct", 1.0)))])
    right, wrong = await pipeline.score(make_sample("right")), await pipeline.score(make_sample("wrong"))
    assert (right.value, wrong.value, judge.num_calls) == (1.5, 0.0, 1)
    assert wrong.scorers["judge"].outcome == "skipped"
    assert wrong.scorers["judge"].reason == "when: correct is not 1"


async def test_chains_of_when_end_at_the_first_unmet_condition() -> None:
    last = scripted("c", 4.0)
    pipeline = Pipeline(
        [
            Stage(scripted("a", 1.0)),
            Stage(scripted("b", 2.0), Rules(when=When("a", 0.0))),
            Stage(last, Rules(when=When("b", 2.0))),
        ]
    )
    scoring = await pipeline.score(make_sample())
    assert (scoring.value, last.num_calls) == (1.0, 0)


def chain(last: ScriptedScorer, second: ScriptedAnswer = 2.0) -> Pipeline:
    """Three scorers, each of which waits for the one before."""
    return Pipeline(
        [
            Stage(scripted("a", 1.0), Rules(weight=0.5)),
            Stage(scripted("b", second), Rules(weight=0.25, when=When("a", 1.0), retries=0)),
            Stage(last, Rules(weight=3.0, when=When("b", 2.0))),
        ],
        timeout_s=5.0,
    )


async def test_a_chain_of_three_runs_to_its_end() -> None:
    last = scripted("c", 4.0)
    scoring = await chain(last).score(make_sample())
    assert (scoring.value, last.num_calls) == (0.5 + 0.5 + 12.0, 1)


async def test_a_scorer_skipped_by_a_chain_is_no_failure_whatever_its_weight() -> None:
    last = scripted("c", 4.0)
    scoring = await chain(last, second=7.0).score(make_sample())
    assert (scoring.outcome, scoring.value, last.num_calls) == ("scored", 0.5 + 0.25 * 7.0, 0)
    assert (scoring.scorers["c"].outcome, scoring.scorers["c"].attempts) == ("skipped", 0)


async def test_a_failure_in_the_middle_of_a_chain_is_the_samples() -> None:
    last = scripted("c", 4.0)
    scoring = await chain(last, second=InfrastructureError("away")).score(make_sample())
    assert (scoring.outcome, scoring.reason, last.num_calls) == ("infra_error", "b: away", 0)


@pytest.mark.usefixtures("clock")
async def test_a_chain_shares_the_samples_time() -> None:
    slow = Pipeline(
        [
            Stage(scripted("a", 1.0, takes_s=0.2)),
            Stage(scripted("b", 1.0, takes_s=0.2), Rules(when=When("a", 1.0))),
            Stage(scripted("c", 1.0), Rules(when=When("b", 1.0))),
        ],
        timeout_s=0.3,
    )
    scoring = await slow.score(make_sample())
    assert scoring.scorers["c"].outcome == "timeout"
    assert scoring.reason == "c: the sample's time was used up before it"


async def test_a_failed_condition_holds_back_and_the_failure_is_the_samples() -> None:
    judge = scripted("judge", 0.5)
    pipeline = Pipeline([Stage(scripted("a", DataError("bad"))), Stage(judge, Rules(when=When("a", 1.0)))])
    scoring = await pipeline.score(make_sample())
    assert (scoring.outcome, scoring.reason, judge.num_calls) == ("data_error", "a: bad", 0)


async def test_seconds_are_those_along_the_scorer_that_ended_last_and_add_up() -> None:
    pipeline = Pipeline(
        [
            Stage(scripted("quick", 1.0, takes_s=0.01)),
            Stage(scripted("first", 1.0, takes_s=0.05, waits_s=0.1)),
            Stage(scripted("second", 1.0, takes_s=0.05, waits_s=0.05), Rules(when=When("first", 1.0))),
        ]
    )
    unaccounted_s = []
    for _ in range(5):  # the machine may pause between the two clocks; it will not do so five times
        began_s = time.monotonic()
        scoring = await pipeline.score(make_sample())
        wall_s = time.monotonic() - began_s
        assert scoring.limiter_s == pytest.approx(0.15)
        assert scoring.call_s >= 0.1
        assert scoring.retry_s == 0.0
        unaccounted_s.append(abs(wall_s - scoring.limiter_s - scoring.retry_s - scoring.call_s))
    assert min(unaccounted_s) < 0.005


@pytest.mark.usefixtures("clock")
async def test_the_budget_runs_along_the_chain_and_waits_do_not_count() -> None:
    limits: list[float] = []

    class Looking(ScriptedScorer):
        async def score(self, sample: Sample, attempt: object) -> Score:
            limits.append(attempt.limit_s)  # type: ignore[attr-defined]
            return Score.scored(1.0)

    stages = [
        Stage(scripted("a", 1.0, takes_s=0.2, waits_s=0.3)),
        Stage(Looking("b", lambda s: 1.0), Rules(when=When("a", 1.0))),
    ]
    await Pipeline(stages, timeout_s=1.0).score(make_sample())
    assert limits == [pytest.approx(0.8)]


async def test_a_combining_function_makes_the_reward(open_scorer: Callable[..., object]) -> None:
    source = """
    def largest(values, sample):
        if sample.response == "raise":
            raise ValueError("no idea")
        return max(value for value in values.values() if value is not None)
    """
    function = await open_scorer(source, "largest", scope="combine")  # type: ignore[misc]
    stages = [Stage(scripted("a", 1.0)), Stage(scripted("b", 3.0))]
    pipeline = Pipeline(stages, combiner=FunctionCombiner(function, timeout_s=5.0))
    assert (await pipeline.score(make_sample())).value == 3.0
    scoring = await pipeline.score(make_sample("raise"))
    assert (scoring.outcome, scoring.value) == ("data_error", None)
    failing = Pipeline(
        [*stages, Stage(scripted("c", DataError("bad")))], combiner=FunctionCombiner(function, timeout_s=5.0)
    )
    assert (await failing.score(make_sample())).reason == "c: bad"


answers = st.one_of(
    st.floats(1.0, 2.0),
    st.one_of(st.floats(-1e9, -1.0), st.sampled_from([math.nan, math.inf, -math.inf])).map(Score.scored),
    st.sampled_from(
        [
            DataError("d"),
            ScoreTimeoutError("t"),
            Score.failed("skipped", "returned None"),
            InfrastructureError("i"),
            Score.failed("data_error", "nan"),
        ]
    ),
)


@given(st.lists(st.tuples(answers, st.sampled_from([0.5, 1.0])), min_size=1, max_size=4))
async def test_no_zero_is_ever_invented(script: list[tuple[ScriptedAnswer, float]]) -> None:
    """Every value given is 1 or more in size: a sample has a value only when all scorers gave one."""
    stages = [
        Stage(scripted(f"s{i}", answer), Rules(weight=weight, retries=0)) for i, (answer, weight) in enumerate(script)
    ]
    scoring: ScoringRecord = await Pipeline(stages).score(Sample("g", 0, "d", "p", "r"))
    given_values = [_value(answer) for answer, _ in script]
    if all(value is not None for value in given_values):
        assert scoring.outcome == "scored"
        expected = sum(weight * (value or 0) for value, (_, weight) in zip(given_values, script, strict=True))
        assert scoring.value == pytest.approx(expected)
    else:
        assert scoring.outcome != "scored"
        assert scoring.value is None
        assert scoring.reason


def _value(answer: ScriptedAnswer) -> float | None:
    if isinstance(answer, ScoringError):
        return None
    return answer.value if isinstance(answer, Score) else answer


async def test_the_age_of_a_scorers_oldest_unfinished_call_grows_until_it_ends() -> None:
    pipeline = Pipeline([Stage(scripted("hangs", 1.0, takes_s=3600.0)), Stage(scripted("quick", 1.0))])
    scoring = [asyncio.create_task(pipeline.score(make_sample())) for _ in range(2)]
    while pipeline.work["hangs"].in_flight < 2 or pipeline.work["quick"].in_flight > 0:
        await asyncio.sleep(0)
    earlier = pipeline.work["hangs"].oldest_s
    assert pipeline.work["hangs"].oldest_s > earlier
    for task in scoring:
        task.cancel()
    await asyncio.wait(scoring)
    assert pipeline.work["hangs"] == ScorerWork(0, 0.0)


class _Throttled(ScriptedScorer):
    """Waits for its limit, then works; neither ends by itself."""

    def __init__(self) -> None:
        super().__init__("judge", lambda sample: 1.0)
        self.let_in = asyncio.Event()
        self.entered = asyncio.Event()

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        with attempt.waiting():
            await self.let_in.wait()
        self.entered.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_the_age_of_a_call_is_that_of_its_attempt_and_not_of_its_wait_for_a_limit() -> None:
    scorer = _Throttled()
    pipeline = Pipeline([Stage(scorer)])
    scoring = asyncio.create_task(pipeline.score(make_sample()))
    while pipeline.work["judge"].in_flight < 1:
        await asyncio.sleep(0)
    waiting = pipeline.work["judge"].oldest_s
    await asyncio.sleep(0.02)
    assert pipeline.work["judge"] == ScorerWork(1, waiting, waiting=1)
    scorer.let_in.set()
    await scorer.entered.wait()
    await asyncio.sleep(0.02)
    assert pipeline.work["judge"].oldest_s > waiting
    scoring.cancel()
    await asyncio.wait([scoring])


async def test_between_two_attempts_a_call_has_no_age() -> None:
    scorer = scripted("judge", InfrastructureError("busy", retry_after_s=3600.0))
    pipeline = Pipeline([Stage(scorer)], timeout_s=7200.0)
    scoring = asyncio.create_task(pipeline.score(make_sample()))
    while scorer.num_calls < 1:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert pipeline.work["judge"] == ScorerWork(1, 0.0)
    scoring.cancel()
    await asyncio.wait([scoring])
