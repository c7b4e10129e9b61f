"""Asserts about a program: of which forms they may be, what right programs return, and what cannot be judged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Worker

SQUARE = "def f(x): return x * x"
POINT = "class Point:\n    def __init__(self, x): self.x = x\n    def moved(self, by): return Point(self.x + by)"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert sorted([candidate(2, 2), 0]) == [0, 4]\n"

RIGHT: list[tuple[str, list[str]]] = [
    (SQUARE, ["assert f(3) == 9\nassert 16 == f(4), 'square'", "assert f(x=3) == 9", "assert f(-1.5) == 2.25"]),
    (SQUARE, ["assert abs(f(2 ** 0.5) - 2) < 1e-9", "assert math.isclose(f(0.1), 0.01)", "assert not f(0)"]),
    (SQUARE, ["for x in range(9):\n    assert f(x) == x ** 2", "assert [f(x) for x in (1, 2)] == [1, 4]"]),
    (SQUARE, ["import statistics\nassert statistics.mean(map(f, [1, 3])) == 5", "assert f(f(2)) == 16"]),
    ("def add(a, b): return a + b", [f"{CHECK}check(add)", "assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]),
    ("def sum(x): return -1", ["assert sum([1, 2]) == -1"]),
    (
        "class Solution:\n    def f(self, x): return [x]",
        ["assert Solution().f(3) == [3]", "s = Solution()\nassert s.f(1)"],
    ),
    (POINT, ["assert Point(4).x == 4", "p = Point(1).moved(by=2)\nassert p.x == 3\nassert Point(p.x).x == 3"]),
    ("def f(x):\n    x.sort()\n    return None", ["x = [3, 1]\nassert f(x) is None\nassert x == [1, 3]"]),
    (
        "def f(x): raise KeyError('gone')",
        ["try:\n    f(1)\nexcept LookupError as e:\n    assert 'gone' in str(e)\nelse:\n    assert 0"],
    ),
    (
        "class It:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n"
        "        if self.n > 2: raise StopIteration\n        return self.n\ndef f(): return [It()]",
        ["(it,) = f()\nassert next(it) == 1\nassert next(it) == 2\nassert next(it, None) is None"],
    ),
    ("def f(x):\n    yield from range(x)", ["assert list(f(3)) == [0, 1, 2]", "g = f(2)\nassert next(g) == 0"]),
    ("def f(): return {1: [2.5], (1, 'a'): {3, (4,)}}", ["assert f() == {(1, 'a'): {(4,), 3}, 1: [2.5]}"]),
    (
        "def f(x): return Counter(x), deque([1]), b'a', 2j",
        ["assert f('aa') == (Counter({'a': 2}), deque([1]), b'a', 2j)"],
    ),
    ("def f(x): return Counter(x).keys()", ["assert sorted(f('ba')) == ['a', 'b']"]),
    (
        "from fractions import Fraction\ndef f(): return Fraction(1, 3)",
        ["from fractions import Fraction\nassert f() * 3 == 1"],
    ),
    (
        "import datetime\ndef f(): return datetime.date(2020, 1, 2)",
        ["import datetime as d\nassert f() == d.date(2020, 1, 2)"],
    ),
    ("def f(n): return 10 ** n", ["assert f(6000) == 10 ** 6000", "assert f(25) == 10000000000000000000000000"]),
    ("def f(): return math.inf, -math.inf", ["assert f() == (math.inf, -math.inf)", "assert f() != (1, 2)"]),
    ("import numpy as np\ndef f(x): return np.array(x) * 2", ["assert (f([1, 2]) == np.array([2, 4])).all()"]),
    ("N = 7\ndef f(n=N): return n", ["assert N == 7", "assert f(N) == 7"]),
    ("def f(x): return x\nif __name__ == '__main__':\n    import sys\n    sys.exit()", ["assert f(3) == 3"]),
]

WRONG: list[tuple[str, str, str]] = [
    ("def g(x): return 9", "assert f(3) == 9", "wrong answer"),
    ("x = 1", "assert add(1, 2) == 3", "wrong answer"),  # operator.add is no definition of the program
    ("x = 1", "assert sum([1, 2]) == 3", "wrong answer"),
    ("def f(x): raise ValueError(x)", "assert abs(f(3)) == 9", "wrong answer: ValueError: 3"),
    ("def f(x): return x", "assert abs(f(3)) == 9", "wrong answer: AssertionError"),
    ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))", "wrong answer: RuntimeError: a function of"),
    ("def f(x): raise StopIteration", "assert sum(map(f, [1, 2])) == 0", "wrong answer: RuntimeError"),
    ("class Stop(StopIteration): pass\ndef f(x): raise Stop", "assert list(map(f, [1])) == []", "wrong answer: Runt"),
    ("raise ValueError('no')", "assert f(3) == 9", "raised: ValueError: no"),
    ("import np_is_missing", "assert f(3) == 9", "raised: ModuleNotFoundError"),
    ("class np:\n    allclose = lambda *_: True\ndef f(x): return 0", "assert np.allclose(f(3), 9)", "wrong answer"),
    ("def f(x): return 0\nmath = f", "assert math.isclose(f(3), 9)", "wrong answer"),
    (f"{POINT}\n    def __eq__(self, other): return True", "assert Point(1) == 5", "wrong answer"),
    (f"{POINT}\n    def __eq__(self, other): return True", "assert Point(1) == Point(2)", "wrong answer"),
]

NO_TESTS = {
    "assert True": "uses no name of the program",
    "# nothing": "uses no name of the program",
    "assert (": r"assert_case: '\(' was never closed",
    "import not_there\nassert f(1) == 1": "ModuleNotFoundError",
    "assert f(lambda: 1) == 1": "a value of type function cannot be passed to the program",
    " ": r"assert_case\[0\] is empty",
}


@pytest.mark.alike
@pytest.mark.parametrize(("program", "texts"), RIGHT)
def test_a_right_program_passes(worker: Worker, program: str, texts: list[str]) -> None:
    score = worker.score_cases(program, {"assert_case": texts})
    assert (score.get("value"), score.get("extra")) == (1.0, {"passed": float(len(texts)), "cases": float(len(texts))})


@pytest.mark.parametrize(("program", "text", "failure"), WRONG)
def test_a_wrong_program_fails_with_the_reason(worker: Worker, program: str, text: str, failure: str) -> None:
    score = worker.score_cases(program, {"assert_case": [text]})
    assert (score["outcome"], score["value"]) == ("scored", 0.0)
    assert score["extra"]["failure"].startswith(f"case 0: {failure}")


@pytest.mark.parametrize("text", NO_TESTS)
def test_a_text_that_judges_no_program_is_a_data_error(worker: Worker, text: str) -> None:
    answer: dict[str, Any] = worker.score_cases(SQUARE, {"assert_case": [text]})
    assert answer["error"] == "DataError"
    assert re.search(NO_TESTS[text], answer["reason"])


def test_input_and_output_beside_an_assert_count_too(worker: Worker) -> None:
    program = "n = int(input())\nprint('read', n)\ndef f(): return n"
    cases = {"assert_case": ["assert f() == 7"], "inputs": ["7"], "outputs": ["read 7"]}
    assert worker.score_cases(program, cases)["value"] == 1.0
    silent = worker.score_cases(program.replace("'read'", "'got'"), cases)
    assert silent["extra"]["failure"] == "case 0: wrong answer: it passes the assert but prints something else"
    assert worker.score_cases(program, {**cases, "outputs": [None]})["value"] == 1.0
