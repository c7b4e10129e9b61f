"""What is told of a reward file that cannot be used: file, function, argument, remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plaudit_reward.functions.check import check
from plaudit_reward.functions.result import Target

VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, k=1): return 1"
NEEDS = "def compute_score(data_source, solution_str, ground_truth, api_key): return 1"
CLASS = """
class Judge:
    def __init__(self, url): raise RuntimeError("made")
    def compute_score(self, data_source, solution_str, ground_truth): return 1
"""

GOOD: list[tuple[str, dict[str, Any]]] = [
    (VERL, {"arguments": {"k": 2}}),
    (NEEDS, {"arguments": {"api_key": "x"}}),
    (CLASS, {"function": "Judge", "arguments": {"url": "x"}}),
    ("class F:\n    @staticmethod\n    def score(sample): return 1", {"function": "F"}),
    ("def compute_score(prompts, completions, **columns): return [1.0]", {"scope": "group"}),
    ("print('noise')\nimport threading, time\nthreading.Thread(target=time.sleep, args=(30,)).start()\n" + VERL, {}),
]


@pytest.mark.parametrize(("source", "about"), GOOD)
def test_a_file_that_fits_has_no_problem(tmp_path: Path, source: str, about: dict[str, Any]) -> None:
    assert check(target(tmp_path, source, **about)).problem is None


BAD: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "wrong name",
        VERL,
        {"function": "score"},
        ["score does not exist in {path}", "defines compute_score", "python.function"],
    ),
    ("no function", "compute_score = 3", {}, ["compute_score is no function in {path}", "name one of them"]),
    (
        "argument unknown",
        "def compute_score(sample): return 1",
        {"arguments": {"j": 2}},
        ["compute_score in {path} has no parameter 'j'", "remove it from python.arguments", "it has sample"],
    ),
    ("argument missing", NEEDS, {}, ["compute_score in {path}", "'api_key'", "set python.arguments.api_key"]),
    (
        "argument of the sample",
        VERL,
        {"arguments": {"ground_truth": 1}},
        ["compute_score in {path}", "'ground_truth' is filled with the sample", "remove it"],
    ),
    (
        "module missing",
        "import nowhere\n" + VERL,
        {},
        ["{path} cannot be imported", "No module named 'nowhere'", "line 1"],
    ),
    ("import raises", "x = 1\n1 / 0\n" + VERL, {}, ["{path} cannot be imported: ZeroDivisionError", "line 2"]),
    ("import exits", "import sys\nsys.exit(3)", {}, ["{path} cannot be imported: SystemExit"]),
    ("import ends the process", "import os\nos._exit(3)", {}, ["importing {path} ended its process (exit status 3"]),
    ("syntax", "def compute_score(:", {}, ["{path}, line 1"]),
    (
        "class without method",
        "class Judge: pass",
        {"function": "Judge"},
        ["class Judge in {path} has no method compute_score or score", "add one"],
    ),
    (
        "constructor",
        CLASS,
        {"function": "Judge"},
        ["Judge in {path}", "constructor's parameter 'url'", "python.arguments.url"],
    ),
    ("verl in a group", VERL, {"scope": "group"}, ["verl's signature", "remove 'scope: group'"]),
    ("values of a group", "def f(rewards): return rewards", {"function": "f"}, ["f in {path}", "set 'scope: group'"]),
    ("no sample", "def f(): return 1", {"function": "f"}, ["f in {path} takes no sample", "solution_str"]),
    ("no Python", "", {"file": "rewards.txt", "function": "f"}, ["rewards.txt is not a Python file"]),
]


@pytest.mark.parametrize(("source", "about", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_mismatch_is_reported_with_its_remedy(
    tmp_path: Path, source: str, about: dict[str, Any], words: list[str]
) -> None:
    wanted = target(tmp_path, source, **about)
    problem = check(wanted).problem
    assert problem is not None
    assert [word for word in words if word.format(path=wanted.path) not in problem] == [], problem


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    problem = check(Target(str(tmp_path / "absent.py"), "compute_score")).problem
    assert problem is not None
    assert f"reward file {tmp_path / 'absent.py'} does not exist" in problem


def target(
    folder: Path, source: str, file: str = "rewards.py", function: str = "compute_score", **about: Any
) -> Target:
    path = folder / file
    path.write_text(source)
    return Target(str(path), function, **about)
