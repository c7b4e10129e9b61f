"""Files that cannot be used are refused with the line, the reason and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from builders import make_sample
from plaudit_reward.functions.function import UserFunction, declares_post_process
from plaudit_reward.functions.result import Target
from plaudit_wire.errors import ConfigurationError, DataError

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
