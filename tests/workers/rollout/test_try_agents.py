"""``plaudit try`` with a job's agent: rows are played without Redis and Ray, against scripted and served policies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import CHATML, chat_tokenizer
from faulty_server import FaultyServer, Reply, Request, completion
from harbor_tasks import write_sum_task
from plaudit_sandbox import machine
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.cli import EXIT_INTERRUPTED, main
from plaudit_workers.rollout import served
from plaudit_workers.rollout.agents.tool_calls import ToolCallParser
from plaudit_workers.rollout.served import TurnWriter
from plaudit_workers.tokenizer import ChatTemplate
from waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers and torch warn when imported

FILES = '''
import json, os, urllib.request

def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: the key.
    """
    return {"a": "4"}[key]

def last(solution_str, ground_truth, **others):
    return float(ground_truth in solution_str.rsplit("</tool_response>")[-1])

class Guess:
    def reset(self, **columns):
        self.reward = 0.0
        return " Guess it."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        self.reward = float(number == 4)
        return "right" if self.reward else "wrong"

    def get_reward(self):
        return self.reward

class Once:
    async def run(self, prompt, generate):
        import struct
        from plaudit_workers.agents.messages import Trajectory
        trajectory = Trajectory()
        trajectory.add_turn(await generate(list(struct.unpack(f"<{len(prompt.prompt_ids) // 4}i", prompt.prompt_ids))))
        return trajectory

def asked(messages, tools=()):
    body = json.dumps({"model": "m", "messages": messages, "tools": list(tools)}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]

def program(prompt):
    messages = list(prompt["messages"])
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    while True:
        message = asked(messages, tools)
        messages.append(message)
        if not message.get("tool_calls"):
            return float("4" in message["content"])
        for call in message["tool_calls"]:
            text = look_up(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

def says_why(prompt):
    try:
        asked(prompt["messages"])
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["code"])

def asks_the_box(prompt):
    asked(prompt["messages"])
    url = os.environ["PLAUDIT_ENVIRONMENT_BOX_URL"]
    return float(urllib.request.urlopen(url + "/said").read() == b"4")
'''
TOOLS = {"kind": "tools", "tools": [{"path": "own.py", "function": "look_up"}]}
ONCE = {"kind": "custom", "path": "own.py", "class": "Once"}
LAST = {"name": "last", "kind": "python", "python": {"path": "own.py", "function": "last"}}
OF_AGENT = {"name": "own", "kind": "environment"}
CALL = {"function": {"name": "look_up", "arguments": {"key": "a"}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's files, and the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    chat_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "own.py").write_text(FILES)
    rows = [
        {"data_source": "s", "prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": truth}}
        for text, truth in (("Value of a?", "4"), ("Value of b?", "5"))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write_job(folder: Path, agent: dict[str, Any], *scorers: dict[str, Any], **spec: Any) -> None:
    rollout = {"agent": agent, "sampling": {"maxTokens": 400}, **spec.pop("rollout", {})}
    job = {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tried"},
        "spec": {
            "model": {"source": "./model"},
            "data": {"train": {"path": "rows.jsonl"}},
            "algorithm": {"steps": 1},
            "rollout": rollout,
            "reward": {"workers": {"processes": 1}, "scorers": list(scorers)},
            "trainer": {},
            **spec,
        },
    }
    (folder / "job.yaml").write_text(json.dumps(job))


def write_answers(folder: Path, *lines: Any) -> str:
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "answers.jsonl"


def answered(request: Request, number: int) -> Reply:
    """Call the tool that is offered, then answer."""
    if "prompt" in request.body:
        return Reply(body={"choices": [{"text": "It is 4.", "finish_reason": "stop"}]})
    if request.body["messages"][-1]["role"] == "tool":
        return Reply(body=completion("It is 4."))
    function = request.body["tools"][0]["function"]
    arguments = '{"number": 4}' if function["name"] == "guess" else '{"key": "a"}'
    body = completion(None)
    body["choices"][0]["message"]["tool_calls"] = [
        {"id": "call_1", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    ]
    return Reply(body=body)


@pytest.mark.long
def test_turns_of_a_file_are_played_with_the_jobs_tools_and_scored_and_saved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(folder, TOOLS, LAST)
    spelled = '<tool_call>{"name": "look_up", "arguments": {"key": "b"}}</tool_call>'
    answers = write_answers(folder, {"turns": [{"tool_calls": [CALL]}, "It is 4."]}, [spelled, "It is 6."])
    assert main(["try", "job.yaml", "--rows", "2", "--answers", answers, "--save", "played.parquet"]) == 0
    out = capsys.readouterr().out
    assert "agent tools ready in " in out
    assert "with the tools look_up" in out
    assert "calls look_up (ok, " in out
    assert "tool look_up: 4" in out
    assert "calls look_up (error, " in out
    assert "KeyError: 'b'" in out
    assert "in 2 turns (" in out
    assert ", 1 × look_up; scoring " in out
    assert "2 of 2 samples have a score, on average 0.5\n" in out
    assert main(["samples", "played.parquet", "--lowest", "--json"]) == 0
    lowest, highest = map(json.loads, capsys.readouterr().out.splitlines())
    assert (lowest["score"], highest["score"]) == (0.0, 1.0)
    assert [turn["calls"][0]["tool"] for turn in json.loads(highest["turns_json"]) if turn.get("calls")] == ["look_up"]
    assert json.loads(highest["completion_json"])[0]["tool_calls"][0]["function"]["arguments"] == {"key": "a"}


def test_sigterm_ends_the_trial_and_removes_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))

    def end_once_it_runs() -> None:
        asyncio.run(until(lambda: any((folder / "tmp").glob("plaudit-try-*"))))
        os.kill(os.getpid(), signal.SIGTERM)

    write_job(folder, {"kind": "endpoint", "command": ["sleep", "60"]}, OF_AGENT)
    ending = threading.Thread(target=end_once_it_runs)
    ending.start()
    assert main(["try", "job.yaml", "--rows", "1"]) == EXIT_INTERRUPTED
    ending.join()
    assert [*(folder / "tmp").glob("plaudit-try-*")] == []


def test_without_a_policy_the_rows_own_answers_are_played(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(folder, ONCE, LAST)
    assert main(["try", "job.yaml", "--rows", "2"]) == 0
    assert "2 of 2 samples have a score, on average 1\n" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("agent", "scorer", "called"),
    [
        ({"kind": "environment", "path": "own.py", "class": "Guess"}, OF_AGENT, "tool guess: right"),
        ({"kind": "endpoint", "path": "own.py", "function": "program"}, OF_AGENT, "tool: 4"),
        (ONCE, LAST, "response: It is 4."),
        ({"kind": "singleTurn"}, LAST, "response: It is 4."),
    ],
    ids=lambda value: value.get("kind", "") if isinstance(value, dict) else "",
)
async def test_every_kind_of_agent_asks_a_served_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, agent, scorer, called
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hidden")
    write_job(folder, agent, scorer)

    def reply(request: Request, number: int) -> Reply:
        return Reply(body=completion("It is 4.")) if agent["kind"] == "singleTurn" else answered(request, number)

    async with FaultyServer("/v1/chat/completions", "/v1/completions") as server:
        server.reply = reply
        arguments = ["--rows", "1", "--url", server.url, "--model", "big", "--api-key-variable", "MY_KEY"]
        assert await asyncio.to_thread(main, ["try", "job.yaml", *arguments]) == 0
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer sk-hidden"}
        assert {request.body["model"] for request in server.requests} == {"big"}
        assert {request.body["temperature"] for request in server.requests} == {1.0}
    captured = capsys.readouterr()
    assert called in captured.out
    assert "1 of 1 samples have a score, on average 1\n" in captured.out
    assert "sk-hidden" not in captured.out + captured.err


@pytest.mark.long
async def test_a_server_that_fails_or_speaks_another_dialect_is_asked_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_FIRST_PAUSE_S", 0.01)
    write_job(folder, TOOLS, LAST)

    def reply(request: Request, number: int) -> Reply:
        if number < served.ATTEMPTS:
            return Reply(503, {"error": {"message": "warming up"}}) if number > 1 else Reply(cut="before")
        if "max_tokens" in request.body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return Reply(400, {"error": {"message": message}})
        return answered(request, number)

    async with FaultyServer() as server:
        server.reply = reply
        arguments = ["--rows", "1", "--url", server.url, "--model", "big"]
        assert await asyncio.to_thread(main, ["try", "job.yaml", *arguments]) == 0
        assert "max_completion_tokens" in server.requests[-1].body
        assert "max_tokens" not in server.requests[-1].body
        said = server.requests[-1].body["messages"]
        assert [message["role"] for message in said] == ["user", "assistant", "tool"]
        assert said[1]["tool_calls"][0]["function"]["arguments"] == '{"key": "a"}'
    assert "1 of 1 samples have a score, on average 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(401, {"error": {"message": "no key"}}), "HTTP 401: no key. Set the key in OPENAI_API_KEY"),
        (Reply(404, {"error": {"message": "no such model"}}), "Correct --url, which ends with /v1 for most servers"),
        (Reply(200, {"choices": []}), "answers with no completion"),
        (Reply(200, b"<html>"), "answers with no completion: <html>"),
    ],
    ids=["no key", "no model", "no choices", "a page"],
)
async def test_a_server_that_cannot_answer_ends_the_trial_with_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], reply: Reply, expected: str
) -> None:
    write_job(folder, {"kind": "singleTurn"}, LAST)
    async with FaultyServer() as server:
        server.reply = lambda request, number: reply
        arguments = ["--rows", "1", "--url", server.url, "--model", "big"]
        assert await asyncio.to_thread(main, ["try", "job.yaml", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("the policy failed: ")
    assert expected in captured.err


async def test_a_request_that_the_server_refuses_costs_its_sample_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(folder, {"kind": "singleTurn"}, LAST)

    def reply(request: Request, number: int) -> Reply:
        if "of b" in request.body["messages"][0]["content"]:
            return Reply(400, {"error": {"message": "the context has 9 tokens"}})
        return Reply(body=completion("It is 4."))

    async with FaultyServer() as server:
        server.reply = reply
        arguments = ["--rows", "2", "--url", server.url, "--model", "big"]
        assert await asyncio.to_thread(main, ["try", "job.yaml", *arguments]) == 0
    out = capsys.readouterr().out
    assert "refuses it: the context has 9 tokens" in out
    assert "1 of 2 samples have a score, on average 1; 1 ended with data_error\n" in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "This model's maximum context length is 8 tokens"}, "context_length_exceeded"),
        ({"message": "prompt: 9 > 8", "code": "context_length_exceeded"}, "context_length_exceeded"),
        ({"message": "tools are not supported"}, "None"),
    ],
)
async def test_a_program_learns_whether_its_conversation_or_its_request_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], error: dict[str, str], code: str
) -> None:
    write_job(folder, {"kind": "endpoint", "path": "own.py", "function": "says_why"}, OF_AGENT)
    async with FaultyServer() as server:
        server.reply = lambda request, number: Reply(400, {"error": error})
        arguments = ["--rows", "1", "--url", server.url, "--model", "big"]
        assert await asyncio.to_thread(main, ["try", "job.yaml", *arguments]) == 1
    out = capsys.readouterr().out
    assert f"refuses it: {error['message']}" in out
    assert f"ValueError: {code}" in out


def test_the_jobs_own_policy_plays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(folder, ONCE, LAST, rollout={"engine": {"kind": "scripted", "arguments": {"turns": ["It is 4."]}}})
    assert main(["try", "job.yaml", "--rows", "1", "--samples", "3", "--own-policy"]) == 0
    out = capsys.readouterr().out
    assert out.count("response: It is 4.") == 3
    assert "3 of 3 samples have a score, on average 1\n" in out


def test_an_environments_server_is_started_and_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "said").write_text("4")
    serves = "h.test(h.SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"
    command = [sys.executable, "-c", f"import os, http.server as h; {serves}"]
    agent = {"kind": "endpoint", "path": "own.py", "function": "asks_the_box"}
    write_job(folder, agent, OF_AGENT, environments=[{"name": "box", "command": command}])
    assert main(["try", "job.yaml", "--rows", "1"]) == 0
    assert "1 of 1 samples have a score, on average 1\n" in capsys.readouterr().out
    assert "PLAUDIT_ENVIRONMENT_BOX_URL" not in os.environ


def test_tests_run_in_the_machines_of_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        machine.require()
    except ConfigurationError as error:
        pytest.skip(str(error))
    write_sum_task(folder / "tasks" / "one")
    write_job(
        folder,
        {"kind": "tools", "tools": [{"sandbox": "bash"}]},
        {"name": "tests", "kind": "verifier"},
        data={"train": {"tasks": "tasks"}},
    )
    call = {"function": {"name": "bash", "arguments": {"command": "echo 7 > sum"}}}
    answers = write_answers(folder, [{"tool_calls": [call]}, "Done."])
    assert main(["try", "job.yaml", "--rows", "1", "--answers", answers]) == 0
    assert "1 of 1 samples have a score, on average 1\n" in capsys.readouterr().out
    assert main(["try", "job.yaml", "--rows", "1"]) == 2
    assert "row 1 has neither turns nor an answer to play" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--url", "http://a/v1"], "--url and --model belong together"),
        (["--model", "big"], "--url and --model belong together"),
        (["--url", "a:8000/v1", "--model", "big"], "--url a:8000/v1 does not begin with http"),
        (["--answers", "none.jsonl"], "--answers none.jsonl cannot be read"),
        (["--answers", "one.jsonl"], "has turns for 1 rows, and 2 are played: add lines, or lower --rows"),
        (["--answers", "bad.jsonl"], "--answers bad.jsonl:2 is no JSON"),
        (
            ["--answers", "numbers.jsonl"],
            "--answers numbers.jsonl:1: its turns are [4]; give a list of texts or messages",
        ),
        (["--save", "none/played.parquet"], "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    (folder / "one.jsonl").write_text('"It is 4."\n')
    (folder / "bad.jsonl").write_text('"It is 4."\n{\n')
    (folder / "numbers.jsonl").write_text("[4]\n[5]\n")
    write_job(folder, ONCE, LAST)
    assert main(["try", "job.yaml", "--rows", "2", *options]) == 2
    assert expected in capsys.readouterr().err


THINKING = CHATML.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
"""A template that opens a thought for the policy."""


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["plain", "opens a thought"])
def test_calls_that_a_server_made_are_written_so_that_the_jobs_parser_reads_them(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    writer = TurnWriter(ChatTemplate(tokenizer, []))
    calls = [
        {"id": "1", "function": {"name": "look_up", "arguments": '{"key": "a <|b|> {c}"}'}},
        {"id": "2", "function": {"name": "look_up", "arguments": "{}"}},
        {"id": "3", "function": {"name": "look_up", "arguments": "{broken"}},
    ]
    text = writer.text({"role": "assistant", "content": "I look.", "tool_calls": calls})
    parsed = ToolCallParser("hermes", tokenizer, [], opened=template is THINKING).parse(text)
    assert [(call.name, call.arguments) for call in parsed.calls[:2]] == [
        ("look_up", {"key": "a <|b|> {c}"}),
        ("look_up", {}),
    ]
    assert parsed.calls[2].problem == "the arguments are not a JSON object"
    assert parsed.content.rstrip().endswith("I look.")


def test_a_template_without_a_place_for_calls_is_named() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    writer = TurnWriter(ChatTemplate(chat_tokenizer(plain), []))
    with pytest.raises(ValueError, match="does not write calls of tools"):
        writer.text({"content": "", "tool_calls": [CALL]})
