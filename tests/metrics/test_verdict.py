"""The verdict on synthetic timelines whose bottleneck is known, in synchronous and asynchronous schedules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_metrics.statistics.steps import step_statistics
from plaudit_metrics.statistics.verdict import VERDICTS, explain, verdict, verdict_over
from plaudit_wire.records import (
    PAUSE,
    REDIS,
    UNKNOWN,
    GroupRecord,
    SampleRecord,
    SandboxRecord,
    ScorerRecord,
    WaitRecord,
)
from stage_records import build_group, build_sample

START = 5_000.0


def spread(number: int) -> float:
    """A little variety between samples: 0 to 0.7 seconds, never twice the same in a row."""
    return (number * 7 % 8) / 10


def step_of(
    *,
    update_s: float,
    admitted_before_s: float = 0.0,
    group_scorer: float = 0.0,
    last: dict[str, float] | None = None,
    scorers: dict[str, ScorerRecord] | None = None,
    **stages: float,
) -> dict[str, float]:
    """One step of 8 groups of 4: admitted before the step opens, waited for in one stretch, then updated on.

    ``admitted_before_s`` > 0 is an asynchronous schedule: the groups were on their way while the step before trained.
    """
    samples: list[SampleRecord] = []
    groups: list[GroupRecord] = []
    for number in range(8):
        of_group = []
        for index in range(4):
            own = dict(stages)
            if last is not None and (number, index) == (7, 3):
                own |= last
            varied = max(own, key=lambda stage: own[stage])
            own[varied] += spread(number * 4 + index)
            of_group.append(
                build_sample(f"t-{number}-1.0", index, admitted=START - admitted_before_s, scorers=scorers, **own)
            )
        samples += of_group
        groups.append(build_group(of_group, group_scorer=group_scorer))
    ready = max(each.ready or 0.0 for each in groups)
    waits = [WaitRecord(START, ready, [each.group for each in groups])] if ready > START else []
    closed = max(ready, START) + update_s
    statistics = step_statistics(
        samples, groups=groups, waits=waits, opened=START, closed=closed, update_s=update_s, trainer_version=3
    )
    parts = sum(seconds for key, seconds in statistics.items() if key.startswith("wait/"))
    assert parts == pytest.approx(statistics["trainer_wait_s"], abs=1e-6)
    return statistics


SYNCHRONOUS = {
    "generation": {"generation": 20.0, "score": 3.0, "update_s": 10.0},
    "sandboxes": {"generation": 4.0, "sandboxes": 20.0, "tools": 3.0, "score": 3.0, "update_s": 10.0},
    "tools": {"generation": 4.0, "sandboxes": 3.0, "tools": 20.0, "score": 3.0, "update_s": 10.0},
    "reward": {"generation": 4.0, "score": 20.0, "update_s": 10.0},
    "limiter": {"generation": 4.0, "score": 2.0, "limiter": 20.0, "update_s": 10.0},
    "reward-queue": {"generation": 4.0, "sample_queue": 20.0, "score": 2.0, "update_s": 10.0},
    "group-scorer": {"generation": 4.0, "score": 2.0, "group_scorer": 20.0, "update_s": 10.0},
    "trainer": {"generation": 2.0, "score": 1.0, "update_s": 60.0},
    "balanced": {"generation": 10.0, "score": 10.0, "update_s": 10.0},
    "straggler": {"generation": 4.0, "score": 3.0, "update_s": 10.0, "last": {"score": 40.0}},
}
ASYNCHRONOUS = {
    "generation": {"generation": 40.0, "score": 3.0, "update_s": 10.0, "admitted_before_s": 15.0},
    "sandboxes": {"generation": 4.0, "sandboxes": 36.0, "score": 3.0, "update_s": 10.0, "admitted_before_s": 15.0},
    "tools": {"generation": 4.0, "tools": 36.0, "score": 3.0, "update_s": 10.0, "admitted_before_s": 15.0},
    "reward": {"generation": 14.0, "score": 20.0, "update_s": 10.0, "admitted_before_s": 15.0},
    "limiter": {"generation": 14.0, "score": 2.0, "limiter": 20.0, "update_s": 10.0, "admitted_before_s": 15.0},
    "reward-queue": {
        "generation": 14.0,
        "sample_queue": 20.0,
        "score": 2.0,
        "update_s": 9.0,
        "admitted_before_s": 15.0,
    },
    "group-scorer": {
        "generation": 14.0,
        "score": 2.0,
        "group_scorer": 20.0,
        "update_s": 9.0,
        "admitted_before_s": 15.0,
    },
    "trainer": {"generation": 40.0, "score": 30.0, "update_s": 60.0, "admitted_before_s": 65.0},
    "balanced": {"generation": 25.0, "score": 10.0, "update_s": 10.0, "admitted_before_s": 15.0},
    "straggler": {
        "generation": 9.0,
        "score": 8.0,
        "update_s": 10.0,
        "admitted_before_s": 15.0,
        "last": {"score": 45.0},
    },
}


def test_the_timelines_cover_every_verdict_that_follows_from_stamps() -> None:
    assert set(SYNCHRONOUS) == set(ASYNCHRONOUS) == set(VERDICTS) - {"unscored", "endpoint", "redis"}


@pytest.mark.parametrize("truth", SYNCHRONOUS)
def test_the_verdict_on_a_synchronous_step_is_the_truth(truth: str) -> None:
    assert verdict(step_of(**SYNCHRONOUS[truth])) == truth


@pytest.mark.parametrize("truth", ASYNCHRONOUS)
def test_the_verdict_on_an_asynchronous_step_is_the_truth(truth: str) -> None:
    assert verdict(step_of(**ASYNCHRONOUS[truth])) == truth


def test_work_that_overlaps_with_the_update_is_not_blamed() -> None:
    """Half a minute of scoring, all of it hidden behind the update: generation's two seconds are what was exposed."""
    hidden = step_of(generation=2.0, score=30.0, update_s=40.0, admitted_before_s=40.0)
    assert hidden["exposed_reward_s"] == 0.0
    assert verdict(hidden) == "trainer"


def test_mini_batch_waits_are_judged_together() -> None:
    """Four mini-batches: the trainer works while the next one is scored, and waits for what ended each wait."""
    samples: list[SampleRecord] = []
    groups: list[GroupRecord] = []
    waits: list[WaitRecord] = []
    now = START
    for part in range(4):
        of_group = [
            build_sample(f"t-{part}-1.0", index, admitted=START, generation=2.0, score=6.0 * (part + 1) + spread(index))
            for index in range(4)
        ]
        record = build_group(of_group)
        samples += of_group
        groups.append(record)
        waits.append(WaitRecord(now, record.ready or 0.0, [record.group]))
        now = (record.ready or 0.0) + 2.0
    statistics = step_statistics(samples, groups=groups, waits=waits, opened=START, closed=now)
    assert statistics["wait/generation_s"] == pytest.approx(2.0)
    assert verdict(statistics) == "reward"


def test_steps_that_come_in_bursts_are_judged_by_their_seconds_together() -> None:
    """One step waits for two: on each alone the verdict alternates, on all it does not."""
    waited = {"step_s": 10.0, "trainer_wait_s": 9.0, "wait/score_s": 8.0, "wait/generation_s": 1.0}
    ready_at_once = {"step_s": 1.0, "trainer_wait_s": 0.0}
    remainder = {"step_s": 2.0, "trainer_wait_s": 1.0, "wait/score_s": 1.0, "straggler_s": 1.0}
    assert [verdict(step) for step in (waited, ready_at_once, remainder)] == ["reward", "trainer", "straggler"]
    assert verdict_over([waited, ready_at_once, remainder] * 3) == "reward"
    assert verdict_over([]) == "trainer"


@pytest.mark.parametrize("waited_s", [0.0, 8.0])
def test_a_step_without_any_score_is_never_called_the_trainers(waited_s: float) -> None:
    """A reward function that raises on every sample: the trainer has nothing to train on, whatever it waited for."""
    failing = [build_sample(index=index, outcome="data_error", generation=5.0) for index in range(8)]
    waits = [WaitRecord(START, START + waited_s, ["t-0-1.0"])]
    statistics = step_statistics(failing, waits=waits, opened=START, closed=START + 10.0)
    assert verdict(statistics) == verdict_over([statistics] * 3) == "unscored"


def test_a_pause_for_samples_without_a_score_has_a_verdict_of_its_own() -> None:
    samples = [build_sample(index=index, admitted=START + 370.0, generation=5.0) for index in range(4)]
    waits = [WaitRecord(START, START + 370.0, [], PAUSE), WaitRecord(START + 370.0, START + 375.0, ["t-0-1.0"])]
    statistics = step_statistics(
        samples, groups=[build_group(samples)], waits=waits, opened=START, closed=START + 380.0
    )
    assert statistics["wait/pause_s"] == 370.0
    assert statistics["wait/generation_s"] == pytest.approx(5.0)
    assert verdict(statistics) == "unscored"


def test_a_short_pause_does_not_hide_the_cause_of_the_wait() -> None:
    figures = {"step_s": 100.0, "trainer_wait_s": 90.0, "wait/pause_s": 10.0, "wait/generation_s": 80.0}
    assert verdict(figures) == "generation"


def test_a_step_that_never_waited_is_the_trainers() -> None:
    assert verdict({"step_s": 10.0, "trainer_wait_s": 0.0}) == "trainer"
    assert verdict({}) == "trainer"


@pytest.mark.parametrize("name", VERDICTS)
def test_every_verdict_is_explained(name: str) -> None:
    assert explain(name).endswith(".")


def test_waits_for_an_endpoint_that_asked_for_pauses_are_not_called_a_limit_of_the_job() -> None:
    """No limit is set; the judge answers 429 with Retry-After, and requests wait as long as it asked for."""
    held, limited = ({"judge": ScorerRecord("scored", 1.0, limiter_s=20.0, held_s=seconds)} for seconds in (19.0, 2.0))
    shape = SYNCHRONOUS["limiter"]
    assert verdict(step_of(**shape, scorers=held)) == "endpoint"
    assert verdict(step_of(**shape, scorers=limited)) == "limiter"
    steps = [step_of(**shape, scorers=held) for _ in range(3)]
    assert verdict_over(steps) == "endpoint"


def test_tests_that_wait_for_a_place_are_a_wait_for_machines() -> None:
    tests = {"tests": ScorerRecord("scored", 1.0, limiter_s=20.0, extra={"verify_s": 2.0})}
    shape = {**SYNCHRONOUS["limiter"], "sandboxes": 0.1}
    figures = step_of(**shape, scorers=tests)
    assert verdict(figures) == "sandboxes"
    assert "raise sandboxes.maxConcurrent, or add reward workers" in explain("sandboxes", figures)


@pytest.mark.parametrize(
    ("machine", "remedy"),
    [
        ({"claim_s": 9.0, "start_s": 2.0}, "Samples waited 9.00 s at the median, 9.00 s at the 95th percentile, for"),
        ({"claim_s": 1.0, "start_s": 8.0}, "use smaller images"),
        ({"start_s": 1.0, "wait_s": 8.0}, "Commands waited"),
    ],
)
def test_the_longest_wait_for_machines_has_its_own_remedy(machine: dict[str, float], remedy: str) -> None:
    record = build_sample(generation=2.0, tools=12.0)
    generation = msgspec.structs.replace(record.generation, sandbox=SandboxRecord(**machine))
    figures = step_statistics([msgspec.structs.replace(record, generation=generation)], opened=0.0, closed=20.0)
    assert remedy in explain("sandboxes", figures)


def test_redis_that_does_not_answer_is_a_cause_of_its_own() -> None:
    shape = SYNCHRONOUS["reward-queue"]
    waits = [WaitRecord(100.0, 150.0, [], REDIS)]
    figures = step_statistics([build_sample("g-1")], waits=waits, opened=100.0, closed=200.0)
    assert verdict(figures) == verdict_over([figures]) == "redis"
    assert figures["exposed_reward_s"] == 0.0
    assert "wait/redis_s" not in step_of(**shape)


def of_scorer(name: str, wait_s: float, call_s: float, calls: int = 64) -> dict[str, float]:
    """The figures of a scorer whose calls are all alike."""
    key = f"reward_pipeline/scorer/{name}"
    times = {f"{key}/{part}_s/{place}": s for part, s in (("wait", wait_s), ("call", call_s)) for place in PLACES}
    return times | {f"{key}/outcome/scored": float(calls)}


PLACES = ("p50", "p95", "mean")


def test_a_scorer_whose_calls_wait_longer_than_they_take_is_named_with_its_remedy() -> None:
    figures = of_scorer("mine", 0.55, 0.05) | of_scorer("rule", 0.01, 0.02)
    assert explain("reward", figures).endswith(
        "Calls of mine waited 0.55 s for a free process and took 0.05 s: raise workers.processes."
    )
    assert explain("generation", figures) == explain("generation")


def test_the_scorer_that_held_the_step_is_named_with_its_times_and_its_share() -> None:
    figures = of_scorer("quick", 0.09, 0.01) | of_scorer("slow", 0.0, 1.9)
    sentence = explain("reward", figures)
    assert "The slowest is slow: 1.90 s at the median, 1.90 s at the 95th percentile, 95% of the seconds" in sentence
    assert "quick" not in sentence
    assert "processes" not in sentence


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        ({"steady": [5.0] * 64, "tail": [1.0] * 61 + [60.0] * 3}, "tail: 1.00 s at the median, 1.00 s at the 95th"),
        ({"steady": [5.0] * 64, "once": [1.0] * 63 + [6.0]}, "steady: 5.00 s at the median"),
        ({"steady": [5.0] * 64, "rare": [30.0] * 2}, "rare: 30.00 s at the median"),
        (
            {"steady": [2.0] * 64, "apart": [(9.0, 0.1)] * 4 + [(0.0, 1.0)] * 56 + [(0.0, 9.0)] * 4},
            "apart: 1.00 s at the median, 9.",
        ),
        ({f"rule-{n}": [0.01] * 64 for n in range(19)} | {"judge": [3.0] * 64}, "judge: 3.00 s"),
    ],
    ids=["rare calls by far", "a call that is a little slower", "few samples", "retries of others", "twenty"],
)
def test_of_a_mix_of_scorers_the_one_for_which_the_step_waited_is_named(mix: dict[str, list[Any]], named: str) -> None:
    def record(taken: Any) -> ScorerRecord:
        retry_s, call_s = taken if isinstance(taken, tuple) else (0.0, taken)
        return ScorerRecord("scored", 1.0, retry_s=retry_s, call_s=call_s)

    samples = [
        build_sample(
            index=index, scorers={name: record(each[index]) for name, each in mix.items() if index < len(each)}
        )
        for index in range(64)
    ]
    figures = step_statistics(samples, opened=START, closed=START + 20.0)
    assert f"The slowest is {named}" in explain("reward", figures)


def test_the_scorer_whose_limit_or_call_held_the_step_is_named() -> None:
    limited = {"quick": ScorerRecord("scored", 1.0, call_s=2.0), "judge": ScorerRecord("scored", 1.0, limiter_s=7.0)}
    figures = step_statistics([build_sample(scorers=limited)], opened=START, closed=START + 20.0)
    for name in ("limiter", "endpoint"):
        assert "It is judge that waited: 7.00 s at the median, 7.00 s at" in explain(name, figures)
    samples = [
        build_sample(index=n, scorers={"far": ScorerRecord("scored", 1.0, call_s=2 + 40 * (n > 3))}) for n in range(5)
    ]
    figures = step_statistics(samples, opened=START, closed=START + 60.0)
    assert "Its scorer far took 42.00 s, 2.00 s at the median" in explain("straggler", figures | {"straggler_s": 40.0})
    assert "far" not in explain("straggler", figures | {"straggler_s": 90.0})  # something else was late


@pytest.mark.parametrize(
    ("scorers", "said"),
    [
        ({"ranks": {"of_group": True, "call_s": 7.0}}, "The slowest is ranks: 7.00 s at the median, 7.00 s at"),
        ({"ranks": {"of_group": True, "limiter_s": 7.0}}, "It waited 7.00 s for its limits"),
        ({"ranks": {"of_group": True, "retry_s": 7.0}}, "Attempts of ranks that failed"),
        ({"class": {"post_process_s": 7.0}}, "It is its post_process_scores"),
        ({"ranks": {"of_group": True, "call_s": 0.1}}, "the wait for a free reward worker"),
    ],
)
def test_the_scorer_for_which_groups_waited_is_named_and_no_sample_waited_for_it(
    scorers: dict[str, dict[str, Any]], said: str
) -> None:
    records = {name: ScorerRecord("scored", 1.0, **figures) for name, figures in scorers.items()}
    records["exact"] = ScorerRecord("scored", 1.0, call_s=0.5)
    figures = step_of(update_s=1.0, score=1.0, group_scorer=7.0, scorers=records)
    assert verdict(figures) == "group-scorer"
    assert said in explain("group-scorer", figures)
    assert "The slowest is exact" in explain("reward", figures)
    assert "ranks" not in explain("limiter", figures)


def test_a_scorer_whose_attempts_fail_is_named_though_its_last_one_is_fast() -> None:
    times = {f"reward_pipeline/scorer/flaky/retry_s/{place}": 8.0 for place in (*PLACES, "max")}
    figures = of_scorer("flaky", 0.0, 0.01) | of_scorer("far", 0.0, 0.5) | times
    failed = "Attempts of flaky that failed, with the pauses after them, took 8.00 s of a sample"
    assert "The slowest is flaky: 8.01 s at the median" in explain("reward", figures)
    assert failed in explain("reward", figures)
    assert failed in explain("straggler", figures | {"straggler_s": 12.0})
    assert failed not in explain("straggler", figures | {"straggler_s": 30.0})


def test_an_endpoint_that_refuses_requests_is_named_with_the_time_that_this_took() -> None:
    def judge(retries: list[float], throttled: float) -> dict[str, float]:
        judges = (ScorerRecord("scored", 1.0, retry_s=s, throttled_s=throttled * s, call_s=0.2) for s in retries)
        samples = [build_sample(index=index, scorers={"judge": judge}) for index, judge in enumerate(judges)]
        return step_statistics(samples, waits=[], opened=START, closed=START + 20.0, update_s=2.0, trainer_version=1)

    refused, throttled = "Requests of judge that its endpoint refused (429, too", judge([0.5, 0.0, 12.0], 1.0)
    assert f"{refused} many requests), with the pauses after them, took 12.00 s" in explain(
        "straggler", throttled | {"straggler_s": 9.0}
    )
    assert refused not in explain("straggler", throttled | {"straggler_s": 30.0})
    assert "took 6.00 s of a sample: raise its quota" in explain("reward", judge([5.0, 7.0], 1.0))
    assert "Attempts of judge that failed" in explain("reward", judge([5.0, 7.0], 0.3))


@pytest.mark.parametrize(("tools_s", "named"), [(16.0, False), (2.9, True)])
def test_a_tool_is_named_only_where_its_calls_are_most_of_the_time_in_tools(tools_s: float, named: bool) -> None:
    calls = {"reward_pipeline/tool/press/call_s/p95": 0.5, "tool_call_counts/max": 3.0}
    sentence = explain("tools", calls | {"reward_pipeline/tools_s/p95": tools_s})
    assert ("The slowest is press" in sentence, "no call of a tool" in sentence) == (named, not named)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 100)), min_size=1, max_size=20))
def test_processes_are_advised_only_for_the_slowest_and_only_where_waiting_is_most_of_it(
    scorers: list[tuple[float, float]],
) -> None:
    figures: dict[str, float] = {}
    for number, (wait_s, call_s) in enumerate(scorers):
        figures |= of_scorer(f"s{number}", wait_s, call_s)
    wait_s, call_s = max(scorers, key=sum)
    assert ("raise workers.processes" in explain("reward", figures)) == (wait_s > call_s)


@pytest.mark.parametrize("share", [0.22, 0.49])
def test_a_trainer_that_waited_did_not_hardly_wait(share: float) -> None:
    assert "hardly" not in explain("trainer", {"step_s": 100.0, "trainer_wait_s": 100.0 * share})
    assert "hardly" in explain("trainer", {"step_s": 100.0, "trainer_wait_s": 19.0})


def test_an_unknown_verdict_has_no_explanation() -> None:
    assert explain("something new") == ""


def test_waits_of_a_step_in_which_the_clock_of_redis_was_set_are_nobodys() -> None:
    waits = [WaitRecord(START, START + 8.0, [], UNKNOWN)]
    statistics = step_statistics([], waits=waits, opened=START, closed=START + 10.0, update_s=2.0, trainer_version=3)
    assert (statistics["wait/unknown_s"], statistics["trainer_wait_s"]) == (8.0, 8.0)
    assert (statistics["exposed_reward_s"], statistics["wait/generation_s"]) == (0.0, 0.0)
    assert verdict(statistics) == "balanced"
    assert "clock was set" in explain("balanced", statistics)
