"""What a call leaves behind in its process (forks, timers, a locale) costs no sample its score, not even its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import WorkerKilledError
from reward_samples import make_sample

Open = Callable[..., Any]
WAYS = [("plain", None), ("plain", "thread"), ("coroutine", None), ("coroutine", "process")]
LIMIT_S = 30.0

FORKS = """
import os, signal, sys, time

def plain(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "its fork returns":
        pid = os.fork()
        if pid == 0:
            return -1.0
        return 1.0 + os.waitpid(pid, 0)[1]
    if solution_str == "its fork exits":
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if solution_str == "its fork raises":
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the fork")
        return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if solution_str == "it dies before its fork":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if solution_str == "it leaves its fork":
        if os.fork() == 0:
            time.sleep(0.2)
            return -1.0
    return 1.0

async def coroutine(data_source, solution_str, ground_truth, extra_info=None):
    return plain(data_source, solution_str, ground_truth)
"""


async def value(scorer: FunctionScorer, response: str) -> float | None:
    return (await scorer.score(make_sample(response), Attempt(LIMIT_S))).value


@pytest.mark.parametrize(("function", "isolation"), WAYS)
async def test_what_a_function_forks_gives_no_score_of_its_own(
    open_scorer: Open, function: str, isolation: str | None
) -> None:
    scorer = await open_scorer(FORKS, function, processes=1, isolation=isolation)
    for response, expected in [
        ("its fork returns", 1.0),
        ("its fork exits", 3.0),
        ("its fork raises", 1.0),
        ("it leaves its fork", 1.0),
    ]:
        assert (await value(scorer, response), await value(scorer, "the next")) == (expected, 1.0), response


@pytest.mark.parametrize(("function", "isolation"), WAYS)
async def test_a_fork_that_is_left_does_not_hide_that_its_process_ended(
    open_scorer: Open, function: str, isolation: str | None
) -> None:
    scorer = await open_scorer(FORKS, function, processes=1, isolation=isolation)
    with pytest.raises(WorkerKilledError, match="exit code 7"):
        await value(scorer, "it dies before its fork")
    assert await value(scorer, "the next") == 1.0


TIMERS = """
import faulthandler, signal, time

def interrupt(*_):
    raise TimeoutError("of another sample")

signal.signal(signal.SIGVTALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)

def plain(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    if solution_str == "its own handler":
        try:
            signal.signal(signal.SIGALRM, interrupt)
        except ValueError:  # in a thread
            pass
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    if solution_str == "profiler":
        signal.setitimer(signal.ITIMER_PROF, 0.001)
    if solution_str == "traceback":
        faulthandler.dump_traceback_later(0.02, exit=True)
    if solution_str == "works on":
        time.sleep(0.1)
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[1] > 0, "a profiler of the file is stopped"
    return 1.0

async def coroutine(data_source, solution_str, ground_truth, extra_info=None):
    return plain(data_source, solution_str, ground_truth)
"""


@pytest.mark.parametrize(("function", "isolation"), WAYS)
async def test_timers_that_a_call_leaves_interrupt_no_other_sample(
    open_scorer: Open, function: str, isolation: str | None
) -> None:
    scorer = await open_scorer(TIMERS, function, processes=1, isolation=isolation)
    responses = ["alarm", "its own handler", "profiler", "traceback"]
    values = [(await value(scorer, response), await value(scorer, "works on")) for response in responses]
    assert values == [(1.0, 1.0)] * len(responses)


PRINTS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print(solution_str)
    return 1.0
"""


async def test_a_print_raises_in_no_locale(open_scorer: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    scorer = await open_scorer(PRINTS, processes=1)
    assert await value(scorer, "数 ≤ √2") == 1.0
