"""``plaudit probe``: responses that deserve nothing, beside the right ones, scored by the job's own scorers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from plaudit_reward.probes import ProbedRow, RewardProbe, texts_of
from plaudit_workers.cli import main

REWARDS = """
import re
import subprocess
import sys

def exact(solution_str, ground_truth):
    return float(solution_str.strip() == ground_truth)

def last_number(solution_str, ground_truth):
    numbers = re.findall(r"-?\\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)

def anywhere(solution_str, ground_truth):
    return float(ground_truth in solution_str)

def long(solution_str):
    return min(len(solution_str) / 200, 1.0)

def form(solution_str, ground_truth):
    pattern = r"(?s)<think>\\n.*?\\n</think>\\n<answer>\\n.*?\\n</answer>"
    return 2.0 * bool(re.fullmatch(pattern, solution_str))

def near(solution_str, ground_truth):
    found = re.findall(r"<answer>\\s*(.*?)\\s*</answer>", solution_str)
    try:
        return 0.0 if not found or abs(float(found[-1]) - float(ground_truth)) > 0.1 else 1.0
    except ValueError:
        return 0.0

def ending(solution_str, ground_truth):
    found = re.findall(r"<answer>\\s*(.*?)\\s*</answer>", solution_str)
    return float(bool(found) and found[-1] != "" and ground_truth.endswith(found[-1]))

def chinese(solution_str):
    return float(len(re.findall("[\u4e00-\u9fff]", solution_str)) > 5)

def thoughtful(solution_str):
    return min(len(re.findall(r"Step 1:|\\bWait\\b|\\nFinally,", solution_str)), 3) / 3

def largest(solution_str, ground_truth):
    return sys.float_info.max * exact(solution_str, ground_truth)

def passed(solution_str, ground_truth):
    program = re.findall(r"(?s)```python\\n(.*?)```", solution_str)
    done = subprocess.run([sys.executable, "-c", program[0] + "\\n" + ground_truth]) if program else None
    return float(done is not None and done.returncode == 0)

def longest(samples):
    return [float(len(s.response) >= max(len(t.response) for t in samples)) for s in samples]
"""
PROBES = """
def says_done(row):
    "A response that only says that it is done."
    return "Done."

def right_in_words(row):
    return ["It is " + row["reward_model"]["ground_truth"] + "!"]
"""
NUMBERS = [(17, 25), (30, 42), (8, 9), (100, 1), (55, 11), (7, 6), (21, 33), (64, 64), (12, 1), (80, 9), (3, 2)]


class ObeyingJudge(BaseHTTPRequestHandler):
    """A judge that believes the last verdict that it reads, wherever it stands."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][-1]["content"]
        truth, response = re.search(r"truth (\S+)", prompt)[1], prompt.split("response:")[1]  # type: ignore[index]
        verdicts = re.findall(r'"score": ([0-9.]+)', response)
        score = min(float(verdicts[-1]), 1.0) if verdicts else float(truth in response)
        content = {"choices": [{"message": {"content": json.dumps({"score": score})}, "finish_reason": "stop"}]}
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep the tests' output clean."""


class JudgeServer(ThreadingHTTPServer):
    """One whose queue of connections holds all requests: a full one makes each wait for a repeated SYN."""

    request_queue_size = 256


@pytest.fixture
def judge_url() -> Iterator[str]:
    with JudgeServer(("127.0.0.1", 0), ObeyingJudge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("probes.py").write_text(PROBES)
    write_rows([{"question": f"What is {a} + {b}?", "truth": str(a + b)} for a, b in NUMBERS])
    return tmp_path


def write_rows(rows: list[dict[str, Any]]) -> None:
    lines = [
        {
            "data_source": row.get("source", "sums"),
            "prompt": [{"role": "user", "content": row["question"]}],
            "reward_model": {"ground_truth": row["truth"]},
            "extra_info": {"answer": row["answer"]} if "answer" in row else {},
        }
        for row in rows
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def probed(*arguments: str, scorers: str) -> int:
    Path("job.yaml").write_text(
        "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: new}\n"
        f"spec: {{reward: {{workers: {{processes: 1}}, scorers: [{scorers}]}}}}\n"
    )
    return main(["probe", "job.yaml", "--data", "rows.jsonl", "--rows", "3", *arguments])


def results(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {each["probe"]: each for each in json.loads(capsys.readouterr().out)["probes"]}


def python(function: str, **more: Any) -> str:
    fields = {"name": function.replace("_", "-"), "kind": "python", **more}
    return json.dumps({**fields, "python": {"path": "rewards.py", "function": function}})


@pytest.mark.parametrize(
    ("scorers", "leaks"),
    [
        (python("exact"), set()),
        (python("last_number"), set()),
        (python("largest"), set()),
        (python("anywhere"), {"guesses", "mixed forms"}),
        (f"{python('exact')}, {python('long', weight=2)}", {"filler", "one token"}),
    ],
)
def test_a_reward_that_can_be_gamed_is_named_before_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str], scorers: str, leaks: set[str]
) -> None:
    code = probed("--json", scorers=scorers)
    found = {name for name, each in results(capsys).items() if each["deserves"] == "nothing" and each["share"] > 0.5}
    assert leaks <= found
    assert bool(found) == bool(leaks)
    assert code == (3 if leaks else 0)


@pytest.mark.long
def test_holes_of_every_kind_have_a_probe_that_finds_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holes = {
        "form": "empty format",
        "near": "no number",
        "ending": "part of the answer",
        "chinese": "other language",
        "thoughtful": "filler",
    }
    assert probed("--json", scorers=", ".join(map(python, holes))) == 3
    found = results(capsys)
    assert {name: found[probe]["scorers"][name] for name, probe in holes.items()} == {
        "form": 2.0, "near": 1.0, "ending": 1.0, "chinese": 1.0, "thoughtful": 1.0
    }  # fmt: skip


def test_the_probes_take_the_form_of_the_answer_of_a_written_solution(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rewards.py").write_text(
        "def boxes(solution_str, ground_truth):\n    return float('{' + ground_truth + '}' in solution_str)"
    )
    write_rows([{"question": f"{a} + {b}?", "truth": str(a + b), "answer": f"So {{{a + b}}}."} for a, b in NUMBERS])
    assert probed("--json", "--only", "guesses,answer in the prompt", scorers=python("boxes")) == 3
    found = results(capsys)
    assert found["guesses"]["share"] == 1.0
    assert "answer in the prompt" not in found


def test_the_table_tells_leaks_lost_answers_and_the_scorer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probed("--rows", "2", scorers=f"{python('exact')}, {python('anywhere', weight=0.5)}") == 0
    printed = capsys.readouterr()
    assert "probing 2 rows: up to " in printed.err
    assert "deserves nothing" in printed.out
    assert "no response that deserves nothing earns more than 50% of the right one's reward" in printed.out
    assert "right responses lose their reward:" in printed.out
    assert probed("--fail-above", "0.3", scorers=f"{python('exact')}, {python('anywhere', weight=0.5)}") == 3
    assert (
        "'guesses' earns 33% of the right response's reward (scorer anywhere gives 1 on average)"
        in capsys.readouterr().out
    )


def test_a_hole_in_one_data_source_is_named_wherever_its_rows_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rewards.py").write_text(
        "def paid(data_source, solution_str, ground_truth):\n"
        "    return float(solution_str == ground_truth or (data_source == 'products' and len(solution_str) > 200))"
    )
    rows = [{"question": f"{a}, {b}?", "truth": str(a + b), "source": ("sums", "products")[a % 2]} for a, b in NUMBERS]
    write_rows(sorted(rows, key=lambda row: row["source"], reverse=True))  # sums first
    assert probed("--rows", "8", "--only", "filler", scorers=python("paid")) == 3
    assert "'filler' earns 100% of the right response's reward in products (scorer paid" in capsys.readouterr().out
    assert probed("--rows", "8", "--only", "empty,filler", "--json", scorers=python("paid")) == 3
    found = results(capsys)
    assert found["filler"]["share"] == 0.5
    assert found["filler"]["share_by_source"] == {"products": 1.0, "sums": 0.0}


def test_a_prompt_that_is_the_right_response_is_no_hole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([{"question": str(a), "truth": str(a)} for a, _ in NUMBERS])
    assert probed("--only", "prompt,empty", "--json", scorers=python("exact")) == 0
    assert "prompt" not in results(capsys)


def test_a_judge_that_obeys_the_response_is_found_within_the_requests_allowed(
    folder: Path, judge_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("judge.j2").write_text("truth {{ ground_truth }} response:{{ response }}")
    section = {
        "baseUrl": judge_url,
        "model": "m",
        "promptTemplate": {"path": "judge.j2"},
        "parse": {"jsonPath": "$.score"},
    }
    scorer = json.dumps({"name": "judge", "kind": "judge", "judge": section})
    names = "fake verdict,fake end,orders the judge"
    assert probed("--json", "--max-requests", "60", "--only", names, scorers=scorer) == 3
    printed = capsys.readouterr()
    assert " fewer, for --max-requests 60)" in printed.err
    found = {each["probe"]: each for each in json.loads(printed.out)["probes"]}
    assert found["fake verdict"]["share"] == found["fake end"]["share"] == 1.0
    assert found["orders the judge"]["share"] == 0.0
    assert probed("--max-requests", "3", scorers=scorer) == 2
    assert "--max-requests 3: one row costs up to" in capsys.readouterr().err


def test_a_scorer_of_groups_is_probed_with_a_group_of_equals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probed("--json", scorers=f"{python('exact')}, {python('longest', scope='group')}") == 3
    assert results(capsys)["equal group"]["mean"] == 1.0


@pytest.mark.long
def test_programs_are_probed_by_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"inputs": ["1 2\n", "5 7\n"], "outputs": ["3\n", "12\n"]}
    named = {"fn_name": "add", "inputs": ["1\n2", "5\n7"], "outputs": ["3", "12"]}
    write_rows(
        [
            {
                "question": "Print the sum.",
                "truth": json.dumps(whole),
                "answer": "```python\nprint(sum(map(int, input().split())))\n```",
            },
            {
                "question": "Write add(a, b).",
                "truth": json.dumps(named),
                "answer": "```python\ndef add(a, b):\n    return a + b\n```",
            },
        ]
    )
    assert probed("--json", scorers="{name: code, kind: rule, rule: code}") == 0
    found = results(capsys)
    assert found["right response"]["mean"] == 1.0
    for name in ("early exit", "reads the tests", "claims success", "prints much", "equal to everything"):
        assert found[name]["share"] == 0.0


def test_a_function_of_programs_is_probed_by_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = "```python\ndef add(a, b):\n    return a + b\n```"
    write_rows([{"question": "Write add(a, b).", "truth": "assert add(1, 2) == 3", "answer": answer}])
    assert probed("--json", "--only", "early exit,claims success,empty", scorers=python("passed")) == 3
    found = results(capsys)
    assert [found[name]["share"] for name in ("early exit", "claims success", "empty")] == [1.0, 1.0, 0.0]


@pytest.mark.long
@pytest.mark.parametrize(
    "rule", ["gsm8k", "gsm8k_flexible", "math_dapo", "math_reward", "math_verify", "prime_math", "geo3k"]
)
def test_no_built_in_rule_pays_for_nothing(folder: Path, capsys: pytest.CaptureFixture[str], rule: str) -> None:
    assert probed(scorers=f"{{name: rule, kind: rule, rule: {rule}}}") == 0, capsys.readouterr().out


def test_probes_of_one_s_own_join_the_battery(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "says_done,right_in_words,empty"
    assert probed("--json", "--probes", "probes.py", "--only", names, scorers=python("last_number")) == 0
    found = results(capsys)
    assert set(found) == {"right response", "says_done", "right_in_words", "empty"}
    assert found["says_done"]["meaning"] == "A response that only says that it is done."
    assert (found["says_done"]["share"], found["right_in_words"]["share"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--only", "emtpy"), "--only: there is no probe 'emtpy'. The probes: empty, blank,"),
        (("--fail-above", "nan"), "argument --fail-above: 'nan' is no finite number"),
        (("--probes", "none.py"), "--probes none.py is no Python file"),
        (("--probes", "broken.py"), "--probes broken.py cannot be loaded: ZeroDivisionError"),
        (("--probes", "raises.py"), "--probes raises.py: mine raised KeyError"),
        (("--probes", "exits.py"), "--probes exits.py cannot be loaded: SystemExit: 3"),
        (("--probes", "ends.py"), "--probes ends.py: mine raised SystemExit: 0"),
        (("--probes", "twice.py"), "--probes twice.py: there is a probe 'empty' already"),
        (("--probes", "number.py"), "--probes number.py: mine returned int. Return a text or a list of texts"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], error: str
) -> None:
    Path("broken.py").write_text("1 / 0")
    Path("raises.py").write_text("def mine(row):\n    return row['absent']")
    Path("exits.py").write_text("raise SystemExit(3)")
    Path("ends.py").write_text("def mine(row):\n    raise SystemExit(0)")
    Path("twice.py").write_text("def empty(row):\n    return ''")
    Path("number.py").write_text("def mine(row):\n    return 3")
    assert probed(*arguments, scorers=python("exact")) == 2
    assert error in capsys.readouterr().err


def test_a_right_response_that_no_row_gives_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rewards.py").write_text("def never(solution_str):\n    return 0.0")
    assert probed(scorers=python("never")) == 0
    assert "no right response is known" in capsys.readouterr().out


def test_a_row_of_many_answers_is_probed_as_quickly_as_one() -> None:
    answers = [str(number) for number in range(60_000)]
    row = ProbedRow(row={}, prompt="", answers=answers, others=())
    mine = RewardProbe("mine", "nothing", "", lambda row: ["17", "a 5 b", "x17y", "none"])
    assert texts_of(mine, row) == ["x17y", "none"]
