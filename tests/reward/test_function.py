"""Files that cannot be used are refused with the line, the reason and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from builders import make_sample
from plaudit_reward.functions.function import UserFunction, declares_post_process
from plaudit_reward.functions.result import Target
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.plain import PlainDataError, plain

BROKEN = [
    ("def f(sample)\n    return 1", "line 1: expected ':'"),
    ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all' (line 1)"),
    ("x = 1\ny = 1 / 0", "ZeroDivisionError: division by zero (line 2)"),
    ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ("def g(sample): pass\ndef h(sample): pass", "f does not exist in {path}. The file defines g, h"),
    ("f = 3", "f is no function in {path}. The file defines no function"),
]


@pytest.mark.parametrize(("source", "words"), BROKEN)
def test_a_broken_file_is_refused_with_its_line(reward_file: Callable[[str], str], source: str, words: str) -> None:
    path = reward_file(source)
    with pytest.raises(ConfigurationError) as refusal:
        UserFunction(Target(path, "f"))
    assert words.format(path=path) in str(refusal.value)
    assert path in str(refusal.value)


def test_a_missing_file_is_refused_with_where_paths_come_from() -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.py does not exist\. Paths in a job are relative"):
        UserFunction(Target("nowhere.py", "f"))


def test_a_file_may_import_its_neighbours(reward_file: Callable[..., str]) -> None:
    reward_file("VALUE = 7.0", name="my_neighbour.py")
    path = reward_file("from my_neighbour import VALUE\ndef f(sample): return VALUE")
    function = UserFunction(Target(path, "f"))
    function.prepare()
    assert function.call([None], None) == 7.0  # type: ignore[list-item]


POST_PROCESSES = [
    ("class A:\n    def post_process_scores(self, r): return r", "A", True),
    ("class B:\n    def post_process_scores(self, r): return r\nclass A(B): pass", "A", True),
    ("class A:\n    def compute_score(self, s): return 1", "A", False),
    ("def post_process_scores(rewards): return rewards", "post_process_scores", False),
    ("class A(A): pass", "A", False),
    ("class A(", "A", False),
]


@pytest.mark.parametrize(("source", "function", "declared"), POST_PROCESSES)
def test_group_processing_is_seen_without_running_the_file(
    reward_file: Callable[[str], str], source: str, function: str, declared: bool
) -> None:
    assert declares_post_process(reward_file(source), function) is declared


def test_a_file_that_is_not_there_declares_nothing() -> None:
    assert declares_post_process("nowhere.py", "A") is False


LOGGING = """
{prefix}def f(prompts, completions, log_extra, log_metric=None, **columns):
    log_extra("length", [len(completion) for completion in completions][:1])
    log_extra("length", [len(completion) for completion in completions][1:])
    log_extra("verdict", ["A", None])
    log_metric("accuracy", 0.5)
    return [1.0, None]
"""


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_values_that_a_trl_function_logs_are_extras_of_its_scores(
    reward_file: Callable[[str], str], prefix: str
) -> None:
    function = UserFunction(Target(reward_file(LOGGING.format(prefix=prefix)), "f", scope="group"))
    function.prepare()
    returned = function.call([make_sample("12"), make_sample("123", 1)], None)
    first, second = function.scores(await returned if inspect.isawaitable(returned) else returned, 2)
    assert (first.value, first.extra) == (1.0, {"length": 2.0, "verdict": "A", "accuracy": 0.5})
    assert (second.outcome, second.extra) == ("skipped", {"length": 3.0, "accuracy": 0.5})


def test_a_logged_column_of_another_length_is_a_data_error(reward_file: Callable[[str], str]) -> None:
    source = "def f(completions, log_extra):\n    log_extra('x', [1])\n    return [1.0, 1.0]"
    function = UserFunction(Target(reward_file(source), "f", scope="group"))
    function.prepare()
    returned = function.call([make_sample(), make_sample(index=1)], None)
    with pytest.raises(DataError, match=r"log_extra\('x', …\) got 1 values for 2 samples"):
        function.scores(returned, 2)


RETURNS_A_COROUTINE = """
import asyncio

async def ask(text):
    await asyncio.sleep(0)
    return float(len(text))

def one(solution_str):
    return ask(solution_str)

async def all_of(texts):
    return [await ask(text) for text in texts]

def compute_score(completions, **columns):
    return all_of(completions)
"""


@pytest.mark.parametrize("isolation", [None, "thread", "inline"])
async def test_a_coroutine_that_a_plain_function_returns_is_awaited(
    open_scorer: Callable[..., Any], isolation: str | None
) -> None:
    one = await open_scorer(RETURNS_A_COROUTINE, "one", isolation=isolation)
    for text in ("ab", "abc"):
        assert (await one.score(make_sample(text), Attempt(10.0))).value == len(text)
    group = await open_scorer(RETURNS_A_COROUTINE, scope="group", isolation=isolation)
    scores = await group.score_group([make_sample("a"), make_sample("ab", index=1)], [0.0, 0.0], Attempt(10.0))
    assert [score.value for score in scores] == [1.0, 2.0]


async def test_the_widest_integers_reach_a_function_as_numbers_and_wider_ones_as_text(
    open_scorer: Callable[..., Any],
) -> None:
    source = "def compute_score(solution_str, ground_truth): return float(int(solution_str) == int(ground_truth) + 1)"
    scorer = await open_scorer(source)
    for truth in (2**64 - 1, -(2**63), 2**53, str(10**30)):
        sample = make_sample(str(int(truth) + 1), ground_truth=plain(truth))
        assert (await scorer.score(sample, Attempt(10.0))).value == 1.0
    with pytest.raises(PlainDataError, match="write it as text"):
        plain(10**30, "ground_truth")
