"""isolation: process. Whatever a function does, only its own sample pays for it."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plaudit_reward.functions.result import Target
from plaudit_reward.isolation import pool
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import DataError, InfrastructureError, ScoreTimeoutError, WorkerKilledError
from plaudit_wire.records import Sample
from reward_samples import make_sample
from waiting import runs

Open = Callable[..., Any]

SCORES_NUMBERS = """
import os, signal, socket, sys, threading, time
from plaudit_reward.isolation.messages import Blocked, Dropped, Finished
from plaudit_reward.scorer import Score
from plaudit_wire.frames import frame

class HostileError(Exception):
    def __str__(self): raise SystemExit("no")

def deep(levels):
    return [deep(levels - 1)] if levels else []

def write_to_wire(data):
    for descriptor in range(3, 64):
        try: socket.socket(fileno=os.dup(descriptor)).sendall(data)
        except OSError: pass
    time.sleep(1000)

def compute_score(solution_str, ground_truth):
    if solution_str == "spin":
        while True: pass
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "swallow":
        while True:
            try: time.sleep(1000)
            except BaseException: pass
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "sys.exit":
        sys.exit(7)
    if solution_str == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "real-time signal":
        os.kill(os.getpid(), 40)
    if solution_str == "abort":
        os.abort()
    if solution_str == "close":
        os.closerange(3, 100)
    if solution_str == "memory":
        raise MemoryError
    if solution_str == "recurse":
        return compute_score(solution_str, ground_truth)
    if solution_str == "raise":
        raise ValueError("bad answer")
    if solution_str == "flood":
        for _ in range(200): print("x" * 100_000)
        return 5.0
    if solution_str == "surrogate":
        return {"score": 1.0, "text": "\\ud800", "\\udfff": 10**400, "deep": deep(300), "n": {(1,): 1 << 67}}
    if solution_str == "hostile error":
        raise HostileError
    if solution_str == "unknown outcome":
        return Score("nothing", None)
    if solution_str == "nonsense":
        return write_to_wire(b"\\5\\0\\0\\0hello")
    if solution_str == "too few scores":
        return write_to_wire(frame([Finished(i, 0.1, []) for i in range(100)]))
    if solution_str == "outcome of the stream":
        return write_to_wire(frame([Finished(i, 0.1, [Score("poison", reason="mine")]) for i in range(100)]))
    if solution_str == "endless seconds":
        return write_to_wire(frame([Finished(1 << 30, float("nan"), [])]))
    if solution_str == "blocked":
        return write_to_wire(frame([Blocked(-1, float("inf"), "")]))
    if solution_str == "many messages":
        return write_to_wire(frame([Dropped([])] * 2000))
    if solution_str == "stop later":
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return 0.0
    return float(solution_str)
"""


async def outcome(scorer: FunctionScorer, sample: Sample, limit_s: float = 0.6) -> Score | type[Exception]:
    try:
        return await scorer.score(sample, Attempt(limit_s))
    except (ScoreTimeoutError, InfrastructureError, DataError) as error:
        return type(error)


UNREADABLE = """
import time

def compute_score(solution_str, ground_truth):
    time.sleep(0.01)
    return float(solution_str)

async def compute_async(solution_str, ground_truth):
    return float(solution_str)
"""


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("compute_score", {"isolation": "process"}),
        ("compute_score", {"isolation": "thread"}),
        ("compute_async", {}),
    ],
)
async def test_a_sample_that_no_child_can_read_costs_no_other(
    open_scorer: Open, function: str, options: dict[str, str]
) -> None:
    scorer = await open_scorer(UNREADABLE, function, **options)
    unreadable = msgspec.structs.replace(make_sample("7"), extra_info=[1])  # another type than every child expects
    samples = [make_sample(str(number)) for number in range(30)]
    samples.insert(10, unreadable)
    found = await asyncio.gather(*(outcome(scorer, sample, 60.0) for sample in samples))
    refused = found.pop(10)
    assert (refused.outcome, refused.value) == ("data_error", None)
    assert "cannot read: Expected `object`, got `array`" in refused.reason
    assert [score.value for score in found] == list(range(30))


BLAMED: list[tuple[str, Any]] = [
    ("spin", ScoreTimeoutError),
    ("sleep", ScoreTimeoutError),
    ("swallow", ScoreTimeoutError),
    ("exit", WorkerKilledError),
    ("kill", WorkerKilledError),
    ("real-time signal", WorkerKilledError),
    ("abort", WorkerKilledError),
    ("close", WorkerKilledError),
    ("memory", InfrastructureError),
    ("sys.exit", "data_error"),
    ("recurse", "data_error"),
    ("raise", "data_error"),
    ("surrogate", "scored"),
    ("hostile error", "data_error"),
    ("unknown outcome", "data_error"),
    ("nonsense", WorkerKilledError),
    ("too few scores", WorkerKilledError),
    ("outcome of the stream", WorkerKilledError),
    ("endless seconds", WorkerKilledError),
    ("blocked", WorkerKilledError),
    ("many messages", WorkerKilledError),
    ("flood", "scored"),
]


@pytest.mark.alike
@pytest.mark.parametrize(("response", "expected"), BLAMED)
async def test_only_the_sample_to_blame_fails(open_scorer: Open, response: str, expected: Any) -> None:
    scorer = await open_scorer(SCORES_NUMBERS)
    responses = [str(i) for i in range(40)]
    responses.insert(20, response)
    limit_s = 20.0 if response == "flood" else 0.6  # 20 MB take long on a busy machine
    samples = [make_sample(text, i) for i, text in enumerate(responses)]
    results = await asyncio.gather(*(outcome(scorer, sample, limit_s) for sample in samples))
    blamed = results.pop(20)
    assert [score.value for score in results] == [float(i) for i in range(40)]
    assert blamed is expected or blamed.outcome == expected


async def test_a_child_that_stops_between_two_works_is_replaced(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_BEGIN_WITHIN_S", 0.5)
    scorer = await open_scorer(SCORES_NUMBERS, processes=1)
    assert (await outcome(scorer, make_sample("stop later"))).value == 0.0
    await asyncio.sleep(0.3)
    results = await asyncio.gather(*(outcome(scorer, make_sample(str(i)), 20.0) for i in range(10)))
    assert [score.value for score in results] == list(range(10))


UNFIT = {
    "extra_info.n: is an integer beyond 64 bits": {"extra_info": {"n": 1 << 67}},
    "ground_truth[0]: is of type object": {"ground_truth": [object()]},
    "messages[0].content[0][0]": {"messages": [{"content": functools.reduce(lambda v, _: [v], range(2000), 0)}]},
}


async def test_a_sample_that_cannot_be_sent_fails_alone(open_scorer: Open) -> None:
    scorer = await open_scorer(SCORES_NUMBERS)
    samples = [make_sample(str(i), i) for i in range(9)]
    for place, changes in zip((1, 4, 8), UNFIT.values(), strict=True):
        samples[place] = msgspec.structs.replace(samples[place], **changes)
    results = await asyncio.gather(*(scorer.score(s, Attempt(5.0)) for s in samples), return_exceptions=True)
    for place, text in zip((8, 4, 1), reversed(UNFIT), strict=True):
        error = results.pop(place)
        assert isinstance(error, DataError)
        assert text in str(error)
    assert [score.value for score in results] == [0.0, 2.0, 3.0, 5.0, 6.0, 7.0]


@pytest.mark.long
async def test_many_hung_functions_end_without_harm_to_others(open_scorer: Open) -> None:
    scorer = await open_scorer(SCORES_NUMBERS)
    responses = ["sleep" if i % 25 == 0 else str(i) for i in range(200)]
    results = await asyncio.gather(*(outcome(scorer, make_sample(text, i)) for i, text in enumerate(responses)))
    for i, result in enumerate(results):
        if i % 25 == 0:
            assert result is ScoreTimeoutError
        else:
            assert isinstance(result, Score)
            assert result.value == float(i)


async def test_work_queued_behind_a_slow_call_goes_to_another_child(open_scorer: Open) -> None:
    scorer = await open_scorer(SCORES_NUMBERS, processes=2)
    slow = asyncio.create_task(scorer.score(make_sample("sleep"), Attempt(30.0)))
    await asyncio.sleep(0.05)
    await asyncio.gather(*(scorer.score(make_sample(str(i), i), Attempt(30.0)) for i in range(100)))
    assert not slow.done()
    slow.cancel()


async def test_a_child_that_is_killed_from_outside_is_replaced(open_scorer: Open) -> None:
    scorer = await open_scorer("import os\ndef compute_score(sample): return os.getpid()", processes=1)
    first = await scorer.score(make_sample(), Attempt(5.0))
    os.kill(int(first.value or 0), signal.SIGKILL)
    second = await scorer.score(make_sample(), Attempt(5.0))
    assert second.value not in (None, first.value)


async def test_children_that_start_after_the_file_was_edited_score_as_the_first(open_scorer: Open) -> None:
    source = "import os\ndef compute_score(sample): return os.getpid()"
    scorer = await open_scorer(source, processes=1)
    first = await scorer.score(make_sample(), Attempt(5.0))
    Path(scorer.target.path).write_text(source.replace("os.getpid()", "-1"))
    os.kill(int(first.value or 0), signal.SIGKILL)
    second = await scorer.score(make_sample(), Attempt(5.0))
    assert second.value not in (None, first.value, -1)


@pytest.mark.parametrize("place", ["helpers.py", "inner/helpers.py", "inner/__init__.py"])
async def test_children_that_start_after_a_module_was_edited_import_what_the_first_did(
    open_scorer: Open, tmp_path: Path, place: str
) -> None:
    module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    (tmp_path / "inner").mkdir()
    (tmp_path / place).write_text("factor = 1\n")
    (tmp_path / "unused.py").write_text("def broken(:\n")
    source = f"""
    import os
    def compute_score(sample):
        from {module} import factor
        return factor * os.getpid()
    def never():
        import unused
    """
    scorer = await open_scorer(source, processes=1)
    first = await scorer.score(make_sample(), Attempt(5.0))
    (tmp_path / place).write_text("factor = -1\n")
    os.kill(int(first.value or 0), signal.SIGKILL)
    second = await scorer.score(make_sample(), Attempt(5.0))
    assert second.outcome == "scored"
    assert second.value != first.value
    assert (second.value or -1) > 0


async def test_processes_started_by_a_function_end_with_it(open_scorer: Open, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = f"""
    import subprocess, time
    def compute_score(sample):
        child = subprocess.Popen(["sleep", "1000"])
        open({str(note)!r}, "w").write(str(child.pid))
        time.sleep(1000)
    """
    scorer = await open_scorer(source)
    assert await outcome(scorer, make_sample()) is ScoreTimeoutError
    pid = int(note.read_text())
    deadline = time.monotonic() + 5
    while runs(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not runs(pid)


async def test_children_end_when_their_pool_is_closed(open_scorer: Open) -> None:
    scorer = await open_scorer("import os\ndef compute_score(sample): return os.getpid()", processes=1)
    score = await scorer.score(make_sample(), Attempt(5.0))
    await scorer.close()
    assert not runs(int(score.value or 0))


async def test_waiting_for_a_child_is_queueing_no_limiter_and_not_against_the_limit(open_scorer: Open) -> None:
    scorer = await open_scorer("import time\ndef compute_score(sample): time.sleep(0.3); return 1", processes=1)
    attempts = [Attempt(1.3) for _ in range(6)]
    scores = await asyncio.gather(*(scorer.score(make_sample(), attempt) for attempt in attempts))
    assert [score.value for score in scores] == [1.0] * 6
    assert max(attempt.queued_s for attempt in attempts) > 1.3
    assert {attempt.waited_s for attempt in attempts} == {0.0}


async def test_alarms_of_user_code_work(open_scorer: Open) -> None:
    source = """
    import signal, time
    def compute_score(sample):
        def ring(*_): raise RuntimeError("rang")
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(10)
    """
    scorer = await open_scorer(source)
    score = await scorer.score(make_sample(), Attempt(5.0))
    assert "RuntimeError: rang" in (score.reason or "")


async def test_a_class_is_made_once_in_each_process(open_scorer: Open) -> None:
    source = """
    class Agent:
        made = 0
        def __init__(self): Agent.made += 1
        def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
            return (float(Agent.made), solution_str, "made")
    """
    scorer = await open_scorer(source, "Agent")
    scores = await asyncio.gather(*(scorer.score(make_sample(), Attempt(5.0)) for _ in range(50)))
    assert {score.value for score in scores} == {1.0}


async def test_a_cancelled_call_is_forgotten_and_the_child_goes_on(open_scorer: Open) -> None:
    scorer = await open_scorer(SCORES_NUMBERS, processes=1)
    hung = asyncio.create_task(scorer.score(make_sample("sleep"), Attempt(0.5)))
    await asyncio.sleep(0.1)
    behind = asyncio.create_task(scorer.score(make_sample("1"), Attempt(0.5)))
    await asyncio.sleep(0)
    hung.cancel()
    behind.cancel()
    score = await scorer.score(make_sample("2"), Attempt(10.0))
    assert score.value == 2.0


async def test_more_functions_hang_than_there_are_processes_and_the_rest_goes_on(open_scorer: Open) -> None:
    scorer = await open_scorer(SCORES_NUMBERS, processes=2)
    await scorer.score(make_sample("1"), Attempt(60.0))
    hung = [asyncio.create_task(scorer.score(make_sample("sleep"), Attempt(60.0))) for _ in range(4)]
    await asyncio.gather(*(scorer.score(make_sample(str(i), i), Attempt(60.0)) for i in range(100)))
    assert not any(task.done() for task in hung)
    for task in hung:
        task.cancel()


async def test_the_output_of_a_function_is_logged_up_to_a_bound(
    open_scorer: Open, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    def compute_score(sample):
        for i in range(1000): print("line", i)
        return 1
    """
    with caplog.at_level(logging.INFO, logger="plaudit_reward"):
        scorer = await open_scorer(source, processes=1)
        await scorer.score(make_sample(), Attempt(5.0))
        await scorer.score(make_sample(), Attempt(5.0))
        async with asyncio.timeout(10):
            while len(printed(caplog)) < 50:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    assert printed(caplog) == [f"line {i}" for i in range(50)]


def printed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.fields["line"] for r in caplog.records if r.message == "reward function printed"]  # type: ignore[attr-defined]


async def test_a_dead_childs_last_output_is_reported(open_scorer: Open) -> None:
    source = """
    import os
    def compute_score(sample):
        print("I am about to leave")
        os._exit(9)
    """
    scorer = await open_scorer(source)
    with pytest.raises(WorkerKilledError, match=r"(?s)ended with exit code 9; it last printed: I am about to leave"):
        await scorer.score(make_sample(), Attempt(5.0))


async def test_a_child_that_dies_while_it_is_written_to_costs_only_the_work_that_it_ran(
    open_scorer: Open, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
import os, time
def compute_score(solution_str, ground_truth):
    if solution_str == "exit":
        os._exit(7)
    time.sleep(float(solution_str))
    return 1.0
"""
    scorer = await open_scorer(source, processes=1)
    works = [asyncio.create_task(outcome(scorer, make_sample(text), 5.0)) for text in ("0.3", "exit")]
    await asyncio.sleep(0.1)  # the first runs, the second waits in the same child
    works.append(asyncio.create_task(outcome(scorer, make_sample("0"), 5.0)))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - it is dead, and its last words unread, when the third is written to it
    score, killed, other = await asyncio.gather(*works)
    assert isinstance(score, Score)
    assert killed is WorkerKilledError
    assert isinstance(other, Score)
    assert caplog.text.count("scorer process ended") == 1


def test_children_are_reaped_where_the_event_loop_ends_before_them(reward_file: Callable[[str], str]) -> None:
    before = own_children()

    async def leave_early(turns: int) -> None:
        scorer = FunctionScorer("mine", Target(reward_file(SCORES_NUMBERS), "compute_score"))
        await scorer.open()  # of two children the other starts only now
        closing = asyncio.create_task(scorer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()

    for turns in (1, 2, 4):
        asyncio.run(leave_early(turns))
    gc.collect()  # with a warning, and so a failure, for each process that nobody has waited for
    until_s = time.monotonic() + 20
    while (left := own_children() - before) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not left


def own_children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
