"""What programs score: verl's results by default, and the options that correct them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plaudit_job.rules.arguments import RULE_ARGUMENTS, CodeOptions
from plaudit_reward.code.cases import Case, cases_of
from plaudit_reward.code.outputs import OutputForm, judge, same_output, same_result
from plaudit_reward.rules.scorer import rule_of
from plaudit_sandbox.program import encode_result
from plaudit_sandbox.sandbox import Sandbox
from plaudit_wire.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from conftest import Worker

IN_ONE_STATE = pytest.mark.parametrize("worker", ["ROOT" if os.geteuid() == 0 else "UNPRIVILEGED"], indirect=True)
"""What a program's text is worth does not depend on the user under which its worker runs."""
NUM_BUSY = 2 * len(os.sched_getaffinity(0))
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
    f"{READS}\nprint(a + b)\nexit()",
    f"x = 0\ndef f():\n    global x\n    x += 1\nf()\n{READS}\nprint(a + b)",
    f"from math import *\n{READS}\nprint(a + b)",
    f"from __future__ import annotations\n{READS}\nprint(a + b)",
]
"""Right, and 0 in verl."""


IN_EVERY_FORM = [
    "print(sum(map(int, open(0).read().split())))",
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "import sys\ninput = sys.stdin.buffer.readline\nprint(sum(map(int, input().split())))",
    "import sys; input = sys.stdin.buffer.readline\nprint(sum(map(int, input().split())))",
    "from sys import stdin\nprint(sum(map(int, next(stdin.buffer).split())))",
    "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.read().split())))",
    "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\nprint(sum(map(int, input().split())))",
    "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(sum(map(int, input().split())))",
    "import os, sys\nr=os.read(sys.stdin.fileno(), 9)\nos.write(sys.stdout.fileno(), b'%d'% sum(map(int, r.split())))",
    "import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()",
]
"""Right, and 0 in verl: here they need no option."""


@IN_ONE_STATE
@pytest.mark.parametrize(("program", "value"), VERLS)
def test_programs_score_as_in_verl_and_as_scripts(worker: Worker, program: str, value: float) -> None:
    assert worker.score_cases("\n" + program, SUMS, asScript=False)["value"] == pytest.approx(value)
    assert worker.score_cases(program, json.dumps(SUMS))["value"] == pytest.approx(value)


@IN_ONE_STATE
@pytest.mark.parametrize("program", ONLY_AS_SCRIPT)
def test_right_programs_that_verl_fails_pass_as_scripts(worker: Worker, program: str) -> None:
    assert worker.score_cases("\n" + program, SUMS, asScript=False)["value"] == 0.0
    assert worker.score_cases(program, SUMS)["value"] == 1.0


@IN_ONE_STATE
@pytest.mark.parametrize("program", IN_EVERY_FORM)
def test_programs_may_read_and_write_bytes(worker: Worker, program: str) -> None:
    assert worker.score_cases("\n" + program, SUMS, asScript=False)["value"] == 1.0
    assert worker.score_cases(program, SUMS)["value"] == 1.0


OBJECTS = [
    ("def f(d): return sum(d.values())", '{"apples": 2, "pears": 3}', "5", 1.0),
    ("def f(d): return -1", '{"apples": 2, "pears": 3}', "5", 0.0),
    ("def f(d, k): return d[k]", '{"apples": 2}\n"apples"', "2", 1.0),
    ("def f(d): return d[1]", '{"1": 2}', "2", 1.0),
    ("def f(d, k): return d[1] + k", '{"1": 2}\n3', "5", 1.0),
    ("def f(d, e, k): return d[1] + e['x'] + k", '{"1": 2}\n{"x": 4}\n3', "9", 1.0),
    ("def f(d): return d['a'] + d['1']", '{"1": 2, "a": 5}', "7", 1.0),
    ("def f(xs): return xs[0]['a']", '[{"a": 2}]', "2", 1.0),
    ("def f(d): return len(d)", "{}", "0", 1.0),
    ("def f(d, e): return d[1] + e[2]", '{"1": 2}\n{"2": 3}', "5", 1.0),
    ("def f(k, d): return d['2']", '1\n{"2": 3}', "3", 1.0),
    ("def f(): return 7", "", "7", 1.0),
    ("from __future__ import annotations\ndef f(): return 7", "", "7", 1.0),
    ("def f(x: Unknown): return x", "1", "1", 0.0),
    ("def f(d): return {k: v + 1 for k, v in d.items()}", '{"1": 2}', '{"1": 3}', 1.0),
    ("def f(d): return {k: v + 1 for k, v in d.items()}", '{"a": 2}', '{"a": 3}', 1.0),
    ("def f(d): return [d, {2: 3}]", '{"1": 2}', '[{"1": 2}, {"2": 3}]', 1.0),
    ("def f(d): return [d]", '{"1": 2}', '[{"1": 2}, {"2": 3}]', 0.0),
    ("class Solution:\n    def f(self, d, k): return d[1] + k", '{"1": 2}\n3', "5", 1.0),
]


@IN_ONE_STATE
@pytest.mark.parametrize(("program", "given", "wanted", "value"), OBJECTS)
def test_functions_take_and_return_objects(worker: Worker, program: str, given: str, wanted: str, value: float) -> None:
    cases = {"fn_name": "f", "inputs": [given], "outputs": [wanted]}
    assert worker.score_cases(program, cases)["value"] == value


@pytest.mark.long
def test_an_input_that_cannot_be_passed_to_a_program_is_no_failure_of_the_program(worker: Worker) -> None:
    cases = {"fn_name": "f", "inputs": [json.dumps(list(range(2_000_000)))], "outputs": ["1"]}
    answer = worker.score_cases("def f(a): return 1", cases, memory="8Mi")
    assert answer["error"] == "DataError"
    assert answer["reason"].startswith("ground_truth: the input of a test case cannot be passed to a program: MemoryE")
    pretended = "import os\nos._exit(2)"
    assert worker.score(pretended, expected="1")["value"] == 0.0


PLACES = [
    ({}, "x = 1\n\n# a comment\nprint(y)", "NameError: name 'y' is not defined (line 4)"),
    ({}, "x = 1\nif x\n    print(x)", "SyntaxError: expected ':' (line 2)"),
    ({}, "def f():\n    return 1 / 0\n\nf()", "ZeroDivisionError: division by zero (line 2)"),
    ({"asScript": False}, "import sys\n\n# read\nprint(y)", "NameError: name 'y' is not defined (line 4)"),
    (
        {"asScript": False},
        "# verl rewrites\ndef f():\n\n    print((1,\n      2))\n    1 / 0\n\nif __name__ == '__main__':\n\n    f()",
        "ZeroDivisionError: division by zero (line 6)",
    ),
]


@IN_ONE_STATE
@pytest.mark.parametrize(("options", "program", "reason"), PLACES)
def test_an_error_names_the_line_that_the_model_wrote(
    worker: Worker, options: dict[str, Any], program: str, reason: str
) -> None:
    score = worker.score(program, expected="1", **options)
    assert score["extra"]["failure"] == f"case 0: raised: {reason}"


@IN_ONE_STATE
def test_an_error_in_a_function_names_its_line(worker: Worker) -> None:
    cases = {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}
    score = worker.score_cases("\n\ndef f(x):\n    return y", cases)
    assert score["extra"]["failure"] == "case 0: raised: NameError: name 'y' is not defined (line 4)"


RIGHT = "print(sum(map(int, input().split())))"
FENCED = [
    (f"So:\n```py\n{RIGHT}\n```", 1.0),
    (f"So:\n```Python\n{RIGHT}\n```\nDone.", 1.0),
    (f"So:\n```python3\n{RIGHT}\n```", 1.0),
    (f"So:\n```\n{RIGHT}\n```\n", 1.0),
    (f"So:\n~~~python\n{RIGHT}\n~~~\n", 1.0),
    (f"```python\nother = 'a\u2028b\x0cc'\n{RIGHT}\n```", 1.0),
    (f"So:\n~~~\n{RIGHT}\n~~~\n", 1.0),
    (f"1. So:\n   ```py\n   {RIGHT}\n   ```\n", 1.0),
    (f"Wrong:\n```py\nprint(0)\n```\nRight:\n```py\n{RIGHT}\n```\nIt prints\n```\n3\n```", 1.0),
    (f"```py\n{RIGHT}", 1.0),
    (f"```sh\npython a.py\n```\n```py\n{RIGHT}\n```", 1.0),
    *(
        (f"So:\n{fence}\n{RIGHT}\n{fence[:3]}\nDone.", 1.0)
        for fence in (
            *(
                '```python title="a.py"',
                "```python {.line-numbers}",
                "``` python",
                "```python:main.py",
                "```python {1,3}",
            ),
            *("```{.python}", "```{python}", "```{.python .numberLines}", "```{python, echo=TRUE}", "```python,ignore"),
            *(
                "```py title='a b'",
                "```Python 3",
                "```python3.11",
                "```python3 linenos",
                "```ipython",
                "```PY3 hl_lines=2",
            ),
            *('~~~python title="a"', "~~~ {.python}", "```python filename=main.py", "```python showLineNumbers {1-2}"),
        )
    ),
    (f"```python-repl\n>>> 1\n```\n```py\n{RIGHT}\n```", 1.0),
    (f"````python\n{RIGHT}\n````", 1.0),
    (f"````python\nassert '```'\n{RIGHT}\n````\nDone.", 1.0),
    ('```pycon title="a"\n>>> 3\n```', 0.0),
    (f"```javascript\n{RIGHT}\n```", 0.0),
    (f"```{{.javascript}}\n{RIGHT}\n```", 0.0),
    (f"```python-repl\n{RIGHT}\n```", 0.0),
    ("```python title='a.py'\n```", 0.0),
    (RIGHT, 1.0),
    (f"{RIGHT}\n```\nIt adds.", 1.0),
    ("```java\nint x;\n```", 0.0),
    ("I cannot.", 0.0),
]


@pytest.mark.alike
@IN_ONE_STATE
@pytest.mark.parametrize(("response", "value"), FENCED)
def test_a_program_is_found_between_fences(worker: Worker, response: str, value: float) -> None:
    assert worker.score_response(response, SUMS, asScript=False)["value"] == value


@IN_ONE_STATE
def test_a_script_may_stand_in_a_list(worker: Worker) -> None:
    assert worker.score_response(f"1. So:\n   ```python\n   x = 1\n   {RIGHT}\n   ```\n", SUMS)["value"] == 1.0


async def test_programs_that_cannot_read_pythons_modules_are_remarked(caplog: pytest.LogCaptureFixture) -> None:
    """Python below ``/root`` is such a case: the programs of a root run as nobody."""
    library = Path(sysconfig.get_path("stdlib"))
    is_open = all(folder.stat().st_mode & 0o001 for folder in (library, *library.parents))
    sandbox = Sandbox(1)
    await sandbox.open()
    await sandbox.close()
    remarked = [record for record in caplog.records if str(library) in getattr(record, "fields", {}).get("folders", ())]
    assert len(remarked) == (os.geteuid() == 0 and not is_open)


@IN_ONE_STATE
def test_functions_get_all_or_nothing_unless_the_share_is_asked_for(worker: Worker) -> None:
    cases = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[4]\n5"], "outputs": ["6", "9"]}
    right = "class Solution:\n    def f(self, a: List[int], b):\n        return sum(a) + b"
    assert worker.score_cases(right, cases)["value"] == 1.0
    half = right.replace("+ b", "+ 3")
    assert worker.score_cases(half, cases)["value"] == 0.0
    assert worker.score_cases(half, cases, continuous=True)["value"] == 0.5


@IN_ONE_STATE
def test_ten_cases_count_unless_more_are_asked_for(worker: Worker) -> None:
    cases = {"inputs": [str(n) for n in range(12)], "outputs": [str(n) for n in range(12)]}
    program = "n = int(input())\nprint(n if n < 10 else 0)"
    assert worker.score_cases(program, cases)["value"] == 1.0
    assert worker.score_cases(program, cases, cases=0)["value"] == pytest.approx(10 / 12)
    assert worker.score_cases(program, cases, cases=0, continuous=False)["value"] == 0.0


@IN_ONE_STATE
def test_a_row_without_cases_is_a_data_error(worker: Worker) -> None:
    answer = worker.score_cases("print(1)", {"inputs": [], "outputs": []})
    assert (answer["error"], answer["reason"]) == ("DataError", "ground_truth has no test case: inputs is empty")


@pytest.mark.long
def test_the_samples_time_ends_its_cases(worker: Worker) -> None:
    late = worker.score("while True: pass", limit_s=0.3, timeSeconds=1)
    assert (late["outcome"], late["value"]) == ("scored", 0.0)
    assert late["extra"]["failure"] == "case 0: time limit: of 0.3 s for all test cases of the sample"
    cases = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}
    slow = "n = input()\nwhile n > '2': pass\nprint(n)"
    assert worker.score_cases(slow, cases, limit_s=0.6, timeSeconds=1)["value"] == 0.5


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


@pytest.mark.parametrize(
    ("form", "written", "expected", "same"),
    [
        ("printed", "x 1.0000001 y", "x 1.0 y", True),
        ("printed", "x 1.01 y", "x 1.0 y", False),
        ("printed", "1.0000001", "1", True),
        ("printed", "1000001", "1000000", False),
        ("printed", "1000001.0", "1000000", True),
        ("printed", "0.50 1e3\n 7", "0.5 1000\n7", True),
        ("printed", "1 2", "1 2 3", False),
        ("printed", "nan", "nan", True),
        ("printed", "nan", "1.0", False),
        ("printed", "inf", "1.0", False),
        ("printed", "1_0", "10", False),
        ("printed", "Yes", "YES", False),
        ("result", [1.0, 2.0000001], "[1, 2]", True),
        ("result", [1.0, 2.1], "[1, 2]", False),
        ("result", (1.0000001, [2]), "[[1, [2]]]", True),
        ("result", [(1, 2)], "[[1, 2]]", True),
        ("result", {"a": 0.30000000000000004}, '{"a": 0.3}', True),
        ("result", {1: 2.0, None: 3}, '{"1": 2, "null": 3}', True),
        ("result", {"1": 2}, '{"1": 2}', True),
        ("result", {"1": 2}, '{"2": 2}', False),
        ("result", 10**20 + 1, str(10**20), False),
        ("result", "1.0", "1", False),
        ("result", None, "0", False),
        ("result", [1, 2, 3], "[1, 2]", False),
        ("same text", "[1.0, 2.0000001]", "[1, 2]", True),
        ("same text", "3.0000001", "3", True),
        ("same text", "x 3.0000001", "x 3", True),
        ("same text", "x 4", "x 3", False),
    ],
)
def test_a_tolerance_holds_for_words_and_inside_results(
    form: OutputForm, written: Any, expected: str, same: bool
) -> None:
    text = encode_result(written) if form == "result" else written
    assert judge(form, text.encode(), expected, 1e-6) is same


@IN_ONE_STATE
def test_the_tolerance_is_an_option(worker: Worker) -> None:
    cases = {"inputs": [""], "outputs": ["area 0.333333"]}
    assert worker.score_cases("print('area', 1 / 3)", cases)["value"] == 0.0
    assert worker.score_cases("print('area', 1 / 3)", cases, tolerance=1e-5)["value"] == 1.0


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
        ({"tolerance": 2}, "tolerance is 2.0; give a number from 0 to below 1"),
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


@pytest.mark.long
def test_a_program_that_waits_for_a_processor_uses_no_time(worker: Worker) -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(NUM_BUSY)
    ]
    try:
        computes = "import time\nwhile time.process_time() < 0.15: pass\nprint(1)"
        in_a_thread = f"import threading\ndef main():\n    {computes.replace(chr(10), chr(10) + '    ')}\n"
        in_a_thread += "thread = threading.Thread(target=main)\nthread.start()\nthread.join()"
        for program in (computes, in_a_thread):
            score = worker.score(program, expected="1", timeSeconds=0.3, limit_s=0.36)
            assert (score["value"], score["extra"].get("failure")) == (1.0, None)
        late = worker.score("while True: pass", expected="1", timeSeconds=0.1)
        assert late["extra"]["failure"] == "case 0: time limit"
    finally:
        for each in busy:
            each.kill()
            each.wait()
