"""``plaudit score``: a file of samples through a job's scorers; bad input is told by its line."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plaudit_reward.attempts import Stage
from plaudit_reward.pipeline import Pipeline
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import Sample
from plaudit_workers.cli import main
from plaudit_workers.commands.score import StoredReader, scored_in_order
from plaudit_workers.service.lines import file_entries
from scripted_scorer import ScriptedScorer
from waiting import until

RULE = "{name: rule, kind: rule}"
Score = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def score(tmp_path: Path) -> Score:
    """Runs the command on samples (or raw lines); gives its exit code and what it wrote."""

    def run(samples: list[Any], *scorers: str) -> tuple[int, list[dict[str, Any]]]:
        job, stored, output = tmp_path / "job.yaml", tmp_path / "samples.jsonl", tmp_path / "scores.jsonl"
        job.write_text(
            "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: rescore}\n"
            f"spec: {{reward: {{scorers: [{', '.join(scorers or [RULE])}]}}}}\n"
        )
        stored.write_text("".join(f"{s if isinstance(s, str) else json.dumps(s)}\n" for s in samples))
        code = main(["score", "--job", str(job), "--input", str(stored), "--output", str(output)])
        written = output.read_text().splitlines() if output.exists() else []
        return code, [json.loads(line) for line in written]

    return run


def gsm8k(answer: str, truth: Any = "4", **more: Any) -> dict[str, Any]:
    return {"data_source": "openai/gsm8k", "response": f"#### {answer}", "ground_truth": truth, **more}


def test_scores_are_written_in_the_order_of_the_samples(score: Score, capsys: pytest.CaptureFixture[str]) -> None:
    code, scores = score([gsm8k(str(i % 5)) for i in range(3000)])
    assert code == 0
    assert [one["score"] for one in scores] == [float(i % 5 == 4) for i in range(3000)]
    assert scores[4] == {
        "score": 1.0,
        "outcome": "scored",
        "reason": None,
        "scorers": {"rule": {"outcome": "scored", "value": 1.0, "seconds": scores[4]["scorers"]["rule"]["seconds"]}},
    }
    assert ": scored 3,000; mean score 0.2\n" in capsys.readouterr().err


def test_a_sample_that_cannot_be_scored_has_its_reason_in_its_line(score: Score) -> None:
    code, scores = score([gsm8k("4"), gsm8k("4", truth=4), "", gsm8k("4")])
    assert (code, [one["outcome"] for one in scores]) == (0, ["scored", "data_error", "scored"])
    assert (scores[1]["score"], scores[1]["reason"]) == (
        None,
        scores[1]["scorers"]["rule"]["reason"].join(["rule: ", ""]),
    )


def test_broken_lines_are_reported_by_number_before_anything_is_scored(
    score: Score, capsys: pytest.CaptureFixture[str]
) -> None:
    code, scores = score([gsm8k("4"), "{", {"prompt": "?"}, gsm8k("4", reponse=1), {**gsm8k("4"), "data_source": "x"}])
    told = capsys.readouterr().err.splitlines()
    assert (code, scores, len(told)) == (2, [], 4)
    for line, number, words in zip(
        told,
        (2, 3, 4, 5),
        (
            "Input data was truncated",
            "required field `response`",
            "unknown field `reponse`",
            "no rule for data_source 'x'",
        ),
        strict=True,
    ):
        assert f"samples.jsonl:{number}: " in line
        assert words in line


def test_groups_are_scored_as_a_whole(score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def ranks(samples):\n    return [len(samples) + s.index / 10 for s in samples]\n")
    scorer = f"{{name: ranks, kind: python, scope: group, python: {{path: {rewards}, function: ranks}}}}"
    samples = [{"response": "a", "group": group} for group in ("g", "g", "g", "h")] + [{"response": "alone"}] * 2
    code, scores = score(samples, scorer)
    assert (code, [one["score"] for one in scores]) == (0, [3.0, 3.1, 3.2, 1.0, 1.0, 1.0])
    code, _ = score([*samples, {"response": "late", "group": "g"}], scorer)
    assert code == 2
    assert "samples.jsonl:7: group 'g' ended before this line. Sort the lines by group" in capsys.readouterr().err


def test_standard_input_is_scored_up_to_the_broken_line(
    score: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    score([])  # writes the job
    lines = f"{json.dumps(gsm8k('4'))}\n{json.dumps(gsm8k('5'))}\nnothing\n".encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    assert main(["score", "--job", str(tmp_path / "job.yaml"), "--input", "-", "--output", "-"]) == 2
    shown = capfdbinary.readouterr()
    assert [json.loads(line)["score"] for line in shown.out.splitlines()] == [1.0, 0.0]
    assert b"standard input:3: is not JSON (JSON is malformed" in shown.err


@pytest.mark.long
def test_an_interrupt_ends_a_command_that_waits_for_a_line(score: Score, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import pathlib\ndef compute_score(sample):\n    pathlib.Path(__file__).with_name('scored').touch()\n    pass\n"
    )
    score([], f"{{name: mine, kind: python, python: {{path: {tmp_path}/rewards.py}}}}")  # writes the job
    command = [sys.executable, "-m", "plaudit_workers.cli", "score", "--job", str(tmp_path / "job.yaml")]
    with subprocess.Popen(
        [*command, "--input", "-", "--output", str(tmp_path / "o")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b'{"response": "a"}\n')
        process.stdin.flush()
        asyncio.run(until((tmp_path / "scored").exists))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("source", "output", "words"),
    [
        ("absent.jsonl", "scores.jsonl", "--input absent.jsonl cannot be read: No such file"),
        ("loop.jsonl", "scores.jsonl", "--input loop.jsonl cannot be read: Too many levels of symbolic links"),
        ("/dev/zero", "scores.jsonl", "--input /dev/zero is no regular file: write the samples to one"),
        ("pipe.jsonl", "scores.jsonl", "--input pipe.jsonl is no regular file: write the samples to one"),
        ("empty.parquet", "scores.jsonl", "--input empty.parquet is empty, which no Parquet file is. Write it again"),
        ("cut.parquet", "scores.jsonl", "--input cut.parquet cannot be read: Couldn't deserialize thrift"),
        ("samples.jsonl", "absent/scores.jsonl", "--output absent/scores.jsonl cannot be written"),
        ("samples.jsonl", "samples.jsonl", "--output samples.jsonl is the input"),
        ("samples.jsonl", "linked.jsonl", "--output linked.jsonl is the input samples.jsonl"),
        ("samples.jsonl", "job.yaml", "--output job.yaml is the input job.yaml"),
        ("samples.jsonl", "/dev/full", "plaudit score: /dev/full: No space left on device. Make room"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    score: Score,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    output: str,
    words: str,
) -> None:
    score([gsm8k("4")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "linked.jsonl").hardlink_to("samples.jsonl")
    os.mkfifo("pipe.jsonl")
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + bytes(92) + b"\x40\0\0\0PAR1")
    assert main(["score", "--job", "job.yaml", "--input", source, "--output", output]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").stat().st_size > 0
    assert (tmp_path / "job.yaml").stat().st_size > 0


def test_an_output_that_another_command_writes_is_left_alone(
    score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.jsonl"
    with output.open("w") as file:
        file.write("{}\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert score([gsm8k("4")])[0] == 2
    assert "scores.jsonl belongs to a command that is under way" in capsys.readouterr().err
    assert output.read_text() == "{}\n"


def test_a_reader_of_standard_output_without_room_ends_it_in_a_line(score: Score, tmp_path: Path) -> None:
    score([gsm8k("4")])
    command = [sys.executable, "-m", "plaudit_workers.cli", "score", "--job", "job.yaml", "--output", "-"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*command, "--input", "samples.jsonl"], stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True
        )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "plaudit score: standard output: No space left on device. Make room"


@pytest.mark.parametrize("change", ["cut", "replaced", "removed"])
async def test_a_file_that_changes_while_it_is_scored_keeps_the_scores_so_far(tmp_path: Path, change: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"response": "x" * 100}) + "\n" for _ in range(5000)))
    reader = StoredReader("samples.jsonl", None, grouped=False)
    read = 0

    async def entries() -> Any:
        for entry in file_entries(path):
            yield entry

    with (
        pytest.raises(RefusedError, match=r"samples\.jsonl:\d+: is not JSON") if change != "removed" else nullcontext()
    ):
        async for _ in reader.units(entries()):
            read += 1
            if read == 1000:
                {
                    "cut": lambda: os.truncate(path, 300_007),
                    "replaced": lambda: path.write_bytes(b"\xff" * 600_000),
                    "removed": path.unlink,
                }[change]()
    assert read >= 1000


async def test_a_slow_sample_holds_only_so_many_others() -> None:
    taken: list[int] = []
    slow = ScriptedScorer("s", lambda sample: float(len(sample.response)), takes_s=lambda s: 0.3 * (not s.response))
    reader = StoredReader("lines", None, grouped=False)

    async def lines() -> Any:
        for number in range(200):
            taken.append(number)
            yield number, json.dumps({"response": "x" * number}).encode()

    async def units() -> Any:
        async for unit in reader.units(lines()):
            yield unit

    values: list[float | None] = []
    async for scoring in scored_in_order(Pipeline([Stage(slow)]), units(), max_concurrent=4):
        if not values:
            assert len(taken) <= 16 * 4 + 2
        values.append(scoring.value)
    assert values == [float(number) for number in range(200)]


def test_messages_are_the_prompt_of_a_chat() -> None:
    reader = StoredReader("lines", None, grouped=False)
    stored = reader.parse(1, b'{"response": "a", "prompt": [{"role": "user", "content": "2 + 2?"}], "index": 3}')
    assert stored is not None
    sample: Sample = stored.as_sample(1, 0)
    assert (sample.prompt, sample.messages[0]["role"], sample.index) == ("2 + 2?", "user", 3)


NULLS = {"prompt": None, "extra_info": None, "ground_truth": "4", "id": None, "group": None, "index": None}


def test_null_means_absent_in_every_optional_field(score: Score) -> None:
    row = {**gsm8k("4"), **NULLS, "response_tokens": None, "max_tokens": None, "finish_reason": None}
    code, scores = score([row])
    assert (code, [one["score"] for one in scores]) == (0, [1.0])


def test_verl_s_columns_are_read_and_ids_are_repeated(score: Score) -> None:
    verl = {"reward_model": {"ground_truth": "4", "style": "rule"}, "ability": "math", "extra_info": '{"index": 1}'}
    code, scores = score([{"data_source": "openai/gsm8k", "response": "#### 4", "id": "a", **verl}])
    assert (code, [(one["id"], one["score"]) for one in scores]) == (0, [("a", 1.0)])


@pytest.mark.parametrize("answers", [{"response": "#### 4"}, {"responses": ["#### 4", "#### 5"]}])
def test_parquet_is_read_by_its_content(score: Score, tmp_path: Path, answers: dict[str, Any]) -> None:
    score([])  # writes the job
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2+2"}], **answers}
    rows = [{**row, "reward_model": {"ground_truth": "4"}, "extra_info": None, "whatever": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "samples.jsonl")
    arguments = ["--input", str(tmp_path / "samples.jsonl"), "--output", str(tmp_path / "scores.jsonl")]
    assert main(["score", "--job", str(tmp_path / "job.yaml"), *arguments]) == 0
    written = [json.loads(line)["score"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert written == [1.0, 0.0][: len(written)]
    assert len(written) == len(answers.get("responses", [0]))


def test_json_lines_may_have_verl_s_responses(
    score: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}, "responses": ["#### 4", "#### 5"]}
    single = {**row, "responses": "#### 4"}
    text = gsm8k('"responses" is only a word here')
    code, scores = score([row, single, text])
    assert (code, [one["score"] for one in scores]) == (0, [1.0, 0.0, 1.0, 0.0])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(row).encode())))
    assert main(["score", "--job", str(tmp_path / "job.yaml"), "--input", "-", "--output", "-"]) == 0
    assert [json.loads(line)["score"] for line in capfdbinary.readouterr().out.splitlines()] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"response": "a", "ground_truth": ' + "1" * 30 + "}", "ground_truth: is an integer beyond 64 bits"),
        ('{"response": "a", "index": ' + "1" * 30 + "}", "index: is an integer beyond 64 bits"),
        ('{"response": "a", "extra_info": ' + "[" * 100_000, "is nested more than 64 levels deep"),
        ('{"response": "a", "extra_info": {"a": ' + "[" * 70 + "]" * 70 + "}}", "extra_info.a"),
        ('{"responses": [5]}', "response is 5"),
        ("[1]", "is [1]; write one JSON object a line"),
    ],
)
def test_lines_that_cannot_travel_are_refused_by_name(
    score: Score, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    code, scores = score([gsm8k("4"), line])
    assert (code, scores) == (2, [])
    shown = capsys.readouterr().err
    assert "samples.jsonl:2: " in shown
    assert message in shown


def test_a_line_after_one_of_several_responses_keeps_its_number(
    score: Score, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score([{"responses": ["4"] * 3, "ground_truth": "4", "data_source": "openai/gsm8k"}, "broken"])[0] == 2
    assert "samples.jsonl:2: is not JSON" in capsys.readouterr().err


def test_parquet_without_responses_names_its_columns(
    score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score([])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a"}]), tmp_path / "data.parquet")
    arguments = ["--input", str(tmp_path / "data.parquet"), "--output", "-"]
    assert main(["score", "--job", str(tmp_path / "job.yaml"), *arguments]) == 2
    assert "has no column response or responses (it has prompt)" in capsys.readouterr().err


@pytest.mark.long
def test_the_output_and_reasons_of_a_reward_function_are_shown(score: Score, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import sys, warnings\n"
        "def mine(sample):\n"
        "    print('seen', sample.response, flush=True)\n"
        "    print('on stderr', file=sys.stderr, flush=True)\n"
        "    warnings.warn('old')\n"
        "    return {}['answer']\n"
    )
    score([{"response": "a"}] * 3, f"{{name: mine, kind: python, python: {{path: {rewards}, function: mine}}}}")
    command = [sys.executable, "-m", "plaudit_workers.cli", "score", "--job", "job.yaml", "--output", "-"]
    done = subprocess.run(
        [*command, "--input", "samples.jsonl"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["outcome"] for line in done.stdout.splitlines()] == ["data_error"] * 3
    for line in ("mine: seen a", "mine: on stderr", "UserWarning: old", "3 × mine: KeyError: 'answer'"):
        assert line in done.stderr, done.stderr


@pytest.mark.long
def test_a_closed_pipe_ends_the_command_without_a_traceback(score: Score, tmp_path: Path) -> None:
    score([gsm8k("4")] * 3000)
    scoring = "score --job job.yaml --input samples.jsonl --output -"
    for command in (scoring, "schema"):
        piped = f"{sys.executable} -m plaudit_workers.cli {command} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", piped], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "Traceback" not in done.stderr
        assert "BrokenPipe" not in done.stderr
        assert done.stdout.strip() == "141"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (gsm8k("4", 10**30), "ground_truth: is an integer beyond 64 bits ("),
        (gsm8k("4", extra_info=json.dumps({"n": [1, 2**64]})), "extra_info.n[1]: is an integer beyond 64 bits ("),
        ('{"response": "4", "ground_truth": NaN}', "is not JSON ("),
        ("[" * 100_000, "is nested more than 64 levels deep; give flatter data"),
        ("[1]", "is [1]; write one JSON object a line"),
    ],
)
def test_what_cannot_travel_is_refused_by_line(
    score: Score, capsys: pytest.CaptureFixture[str], line: Any, words: str
) -> None:
    code, scores = score([gsm8k("4"), line, gsm8k("4")])
    assert (code, scores) == (2, [])
    assert f"samples.jsonl:2: {words}" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_sample(score: Score) -> None:
    code, scores = score(["\ufeff" + json.dumps(gsm8k("4"))])
    assert (code, [one["score"] for one in scores]) == (0, [1.0])


def test_responses_of_another_type_are_refused_by_row(
    score: Score, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score([])  # writes the job
    table = pyarrow.table({"responses": [1], "extra_info": pyarrow.array([b"{}"], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    arguments = ["--job", str(tmp_path / "job.yaml"), "--input", str(tmp_path / "rows.parquet")]
    assert main(["score", *arguments, "--output", str(tmp_path / "o.jsonl")]) == 2
    assert "rows.parquet:1: " in capsys.readouterr().err
