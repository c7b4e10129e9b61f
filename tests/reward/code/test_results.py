"""What programs score: verl's results by default, and the options that correct them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from plaudit_job.rules.arguments import RULE_ARGUMENTS, CodeOptions
from plaudit_reward.code.cases import Case, cases_of
from plaudit_reward.code.outputs import judge, same_output, same_result
from plaudit_reward.rules.scorer import rule_of
from plaudit_sandbox.program import encode_result
from plaudit_wire.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from conftest import Worker

SUMS = {"inputs": ["1 2\n", "5 7\n", "10 -3\n"], "outputs": ["3\n", "12", "7\n\n"]}
READS = "a, b = map(int, input().split())"
VERLS = [
    (f"{READS}\nprint(a + b)", 1.0),
    (f"{READS}\nprint(a + b if a < 9 else 0)", 2 / 3),
    (f"import sys\n{READS}\nprint(a + b)\nsys.exit()", 1.0),
    (f"def main():\n    {READS}\n    print(a + b)\nif __name__ == '__main__':\n    main()", 1.0),
    ("d = defaultdict(int)\nd[0] = sum(map(int, input().split()))\nprint(d[0])", 1.0),
]
ONLY_AS_SCRIPT = [
    "print(sum(map(int, open(0).read().split())))",
    f"{READS}\nprint(a + b)\nexit()",
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    f"x = 0\ndef f():\n    global x\n    x += 1\nf()\n{READS}\nprint(a + b)",
    f"from math import *\n{READS}\nprint(a + b)",
]
"""Right, and 0 in verl."""


@pytest.mark.parametrize(("program", "value"), VERLS)
def test_programs_score_as_in_verl_and_as_scripts(worker: Worker, program: str, value: float) -> None:
    assert worker.score_cases("\n" + program, SUMS, asScript=False)["value"] == pytest.approx(value)
    assert worker.score_cases(program, json.dumps(SUMS))["value"] == pytest.approx(value)


@pytest.mark.parametrize("program", ONLY_AS_SCRIPT)
def test_right_programs_that_verl_fails_pass_as_scripts(worker: Worker, program: str) -> None:
    assert worker.score_cases("\n" + program, SUMS, asScript=False)["value"] == 0.0
    assert worker.score_cases(program, SUMS)["value"] == 1.0


def test_functions_get_all_or_nothing_unless_the_share_is_asked_for(worker: Worker) -> None:
    cases = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[4]\n5"], "outputs": ["6", "9"]}
    right = "class Solution:\n    def f(self, a: List[int], b):\n        return sum(a) + b"
    assert worker.score_cases(right, cases)["value"] == 1.0
    half = right.replace("+ b", "+ 3")
    assert worker.score_cases(half, cases)["value"] == 0.0
    assert worker.score_cases(half, cases, continuous=True)["value"] == 0.5


def test_ten_cases_count_unless_more_are_asked_for(worker: Worker) -> None:
    cases = {"inputs": [str(n) for n in range(12)], "outputs": [str(n) for n in range(12)]}
    program = "n = int(input())\nprint(n if n < 10 else 0)"
    assert worker.score_cases(program, cases)["value"] == 1.0
    assert worker.score_cases(program, cases, cases=0)["value"] == pytest.approx(10 / 12)
    assert worker.score_cases(program, cases, cases=0, continuous=False)["value"] == 0.0


def test_a_row_without_cases_is_a_data_error(worker: Worker) -> None:
    answer = worker.score_cases("print(1)", {"inputs": [], "outputs": []})
    assert (answer["error"], answer["reason"]) == ("DataError", "ground_truth has no test case: inputs is empty")


def test_the_samples_time_ends_its_cases(worker: Worker) -> None:
    late = worker.score("while True: pass", limit_s=0.3, timeSeconds=1)
    assert (late["outcome"], late["value"]) == ("scored", 0.0)
    assert late["extra"]["failure"] == "case 0: time limit: of 0.3 s for all test cases of the sample"
    score = worker.score("print(1)", expected="1", timeSeconds=1)
    assert score["value"] == 1.0
    assert score["attempt"]["queued_s"] > 0  # for the program that still ran, until its own limit


def test_without_landlock_the_job_is_refused_unless_it_allows_it(start_worker: Callable[[str], Any]) -> None:
    with start_worker("WITHOUT_LANDLOCK") as worker:
        refused = worker.score("print(1)", expected="1")
        assert refused["error"] == "ConfigurationError"
        assert "has no Landlock" in refused["reason"]
        assert "allowWithoutLandlock: true" in refused["reason"]
        program = "import numpy\ntry:\n    open('/etc/hostname')\nexcept PermissionError:\n    print('refused')"
        assert worker.score(program, expected="refused", allowWithoutLandlock=True)["value"] == 1.0


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("  1 \n 2", "1\n2", True),
        ("1\n\n2", "1\n2\n", True),
        ("1.0000001\n2", "1.0\n2.0", True),
        ("1\n2", "1.0\n2", True),
        ("01", "1", False),
        ("1 2", "2 1", False),
        ("1\n2", "1", False),
        ("nan", "1.5", False),
        ("inf", "1e400", True),
        ("Yes", "YES", False),
    ],
)
def test_printed_text_is_compared_as_leniently_as_in_verl(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ((1, 2), "[1, 2]", True),
        ([1, 2], "[[1, 2]]", True),
        ([(1, 2)], "[[1, 2]]", False),
        ([(1, 2), (3, 4)], "[[[1, 2], [3, 4]]]", True),
        ({1: 2}, '{"1": 2}', True),
        ({"1": 2}, '{"1": 2}', False),
        (6.0, "6", True),
        ("6", "6", False),
        (None, "null", True),
    ],
)
def test_results_are_compared_as_in_verl(returned: Any, expected: str, same: bool) -> None:
    assert same_result(json.loads(encode_result(returned)), expected) is same


@pytest.mark.parametrize("text", [b"", b"[]", b"[1]", b'["list", 3]', b'["set", [1]]', b"[[1, 2], 3]", b"\xff", b"{}"])
def test_an_invalid_result_is_wrong(text: bytes) -> None:
    assert not judge("result", text, "[[1, 2], 3]")


def test_cases_are_read_from_objects_json_and_asserts() -> None:
    assert cases_of('{"inputs": [["a", "b"]], "outputs": ["c"]}').cases == [Case("a\nb", "c")]
    assert cases_of({"assert_case": ["assert f()"]}).cases == [Case("", None, "assert f()")]


@pytest.mark.parametrize(
    ("ground_truth", "words"),
    [
        ("4", "ground_truth is int; code rules need an object with inputs and outputs"),
        ("{", "ground_truth is not JSON"),
        ({"inputs": ["1"]}, "ground_truth.outputs is NoneType"),
        ({"inputs": ["1"], "outputs": []}, "has 1 inputs, 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, r"ground_truth.inputs\[0\] is int; it must be a text"),
        ({"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}, "case 0 is not JSON"),
    ],
)
def test_a_bad_ground_truth_is_reported(ground_truth: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        cases_of(ground_truth)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"timeSeconds": 0}, "timeSeconds is 0.0; give seconds above 0"),
        ({"memory": "lots"}, "memory is 'lots'; write it like 512Mi"),
        ({"url": "sandbox:8080"}, "url is 'sandbox:8080'; write it like http://sandbox:8080/run_code"),
        ({"time": 3}, "unknown field `time`; arguments are timeSeconds, memory"),
        ({"continuous": "yes"}, r"Expected `bool \| null`, got `str` - at `\$.continuous`"),
    ],
)
def test_a_bad_option_is_reported(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CodeOptions.read(arguments)


def test_verls_code_sources_have_the_rule() -> None:
    assert {rule_of(source) for source in ("codecontests", "apps", "codeforces", "taco")} == {"code"}
    assert RULE_ARGUMENTS["code"].read({"cases": 0}) == CodeOptions(cases=0)
