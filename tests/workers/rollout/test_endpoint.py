"""``kind: endpoint``: real programs with OpenAI's client over a scripted engine, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from builders import make_prompt
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion, Prompt, Sampling
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.messages import FinishedSample, Program
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.endpoint import EndpointAgent, EndpointServer
from plaudit_workers.rollout.agents.session import EndpointSession, RequestError, parse_request
from plaudit_workers.rollout.engine import EngineFailedError, RequestRefusedError
from plaudit_workers.rollout.prompt_work import SampleRun, sample_body
from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch warn when they are imported
    pytest.mark.asyncio(loop_scope="module"),  # the tests share the template process, and so the event loop
]

PROGRAM = '''
import json, os, signal, sys, time

from openai import AsyncOpenAI, BadRequestError, OpenAI

TOOLS = [{
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}]


def answers(message):
    """The assistant's message as a client sends it back, and its tools' results."""
    calls = message.tool_calls or []
    yield message.model_dump()
    for call in calls:
        arguments = json.loads(call.function.arguments)
        yield {"role": "tool", "tool_call_id": call.id, "content": f"value of {arguments['key']}"}


def plain(prompt):
    client, messages = OpenAI(), list(prompt["messages"])
    while True:
        choice = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS).choices[0]
        messages += answers(choice.message)
        if choice.finish_reason != "tool_calls":
            return float(choice.message.content == prompt["ground_truth"])


async def concurrent(prompt):
    client, messages = AsyncOpenAI(), list(prompt["messages"])
    while True:
        completion = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
        messages += answers(completion.choices[0].message)
        if not completion.choices[0].message.tool_calls:
            return {"reward": 1}


def streamed(prompt):
    client, messages = OpenAI(), list(prompt["messages"])
    while True:
        with client.chat.completions.stream(model="gpt-4o", messages=messages, tools=TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
        messages += answers(message)
        if not message.tool_calls:
            return 1.0


def ask(client, *messages, **parameters):
    return client.chat.completions.create(model="m", messages=list(messages), **parameters).choices[0].message.content


def forks(prompt):
    """A main conversation, a sub-agent with a prompt of its own, a retry, and a compacted history."""
    client, user = OpenAI(), prompt["messages"][0]
    first = ask(client, user)
    said = {"role": "assistant", "content": first}
    sub = ask(client, {"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": first})
    ask(client, user, said, {"role": "user", "content": sub})
    ask(client, user, said, {"role": "user", "content": "Once more, please."})
    compacted = {"role": "user", "content": "Summary: much was done."}
    last = ask(client, compacted)
    return ask(client, compacted, {"role": "assistant", "content": last}, {"role": "user", "content": "Go on."})


def endless(prompt):
    client, messages = OpenAI(max_retries=0), list(prompt["messages"])
    while True:
        try:
            messages += [{"role": "assistant", "content": ask(client, *messages)}, {"role": "user", "content": "More."}]
        except BadRequestError:
            pass


def careful(prompt):
    client, messages = OpenAI(), list(prompt["messages"])
    try:
        while True:
            messages += [{"role": "assistant", "content": ask(client, *messages)}, {"role": "user", "content": "More."}]
    except BadRequestError as error:
        return {"outcome": "skipped", "reason": error.code}


def warm(prompt):
    ask(OpenAI(), *prompt["messages"], temperature=0.2, seed=3, tool_choice="required", user="me", stop=["END"])


def several(prompt):
    ask(OpenAI(), *prompt["messages"], n=2)


def raises(prompt):
    ask(OpenAI(), *prompt["messages"])
    raise KeyError("lost")


def exits(prompt):
    ask(OpenAI(), *prompt["messages"])
    sys.exit(3)


def hangs(prompt):
    ask(OpenAI(), *prompt["messages"])
    time.sleep(60)


def crashes(prompt):
    ask(OpenAI(), *prompt["messages"])
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves_a_fork(prompt):
    ask(OpenAI(), *prompt["messages"])
    pid = os.fork()
    if pid == 0:
        return -1.0
    return 1.0 + os.waitpid(pid, 0)[1]


def silent(prompt):
    return 1.0


def infinite(prompt):
    ask(OpenAI(), *prompt["messages"])
    return float("inf")


class Ambiguous:
    def __ne__(self, other):
        raise ValueError("the truth value is ambiguous")


def ambiguous(prompt):
    ask(OpenAI(), *prompt["messages"])
    return {"outcome": Ambiguous()}


def looks_around(prompt):
    ask(OpenAI(), *prompt["messages"])
    models = [model.id for model in OpenAI().models.list()]
    secret = os.environ.get("PLAUDIT_REDIS_PASSWORD")
    return {"outcome": "skipped", "reason": json.dumps([models, secret, os.listdir(".")])}


def main(prompt):
    return globals()[prompt["extra_info"]["function"]](prompt)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print("begins", file=sys.stderr)
    reward = plain(given)
    print(json.dumps({"reward": reward}))
'''
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


@pytest.fixture(scope="module")
def program_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "my_program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with EndpointServer() as server:
        yield server


@asynccontextmanager
async def started(program):
    processes = AgentProcesses([program])
    try:
        await processes.open()
        yield processes
    finally:
        await processes.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(program_file):
    """The processes of the file's functions. The rollout has a secret in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAUDIT_REDIS_PASSWORD", "hidden")
        async with started(Program(path=program_file, function="main")) as processes:
            yield processes


@pytest.fixture
def hold(shared, server, chat_formats, tokenizer):
    """Runs one sample of a function of the program, or of another program; returns it as the trainer reads it."""

    async def held(function, *turns: str, max_tokens: int = 4000, processes=shared, max_turns=8, limit_s=30.0):
        engine = ScriptedEngine(Script(Constant(0.0), turns=list(turns)), tokenizer=tokenizer)
        await engine.load_weights(None, PolicyVersion(1, 0))
        prompt = prompt_of(max_tokens, function)
        run = SampleRun(prompt, 0, engine, lambda change: None)
        agent = EndpointAgent(processes, server, chat_formats, max_turns, limit_s, ground_truth=True)
        trajectory = await run.run(agent)
        return sample_body(prompt, 0, trajectory, run.record("rollout-0", trajectory, None), engine)

    return held


def prompt_of(max_tokens: int = 4000, function: str = "") -> Prompt:
    return make_prompt(
        n=1,
        sampling=Sampling(max_tokens=max_tokens),
        prompt="",
        prompt_ids=b"",
        ground_truth="It is a.",
        extra_info={"function": function},
        messages=[{"role": "user", "content": "Look it up."}],
    )


def trained_text(tokenizer, part) -> str:
    ids = np.frombuffer(part.response_ids, "<i4")
    return tokenizer.decode(ids[np.frombuffer(part.loss_mask, "u1") != 0])


@pytest.mark.parametrize("function", ["plain", "concurrent", "streamed"])
async def test_a_program_with_tools_is_captured_token_by_token(hold, chat_formats, tokenizer, function) -> None:
    body = await hold(function, CALL, CALL, "It is a.")
    sample = body.sample
    assert [message["role"] for message in sample.completion] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert sample.completion[1]["content"] == "value of a"
    assert (sample.answer, sample.agent_reward, sample.failure) == ("It is a.", AgentReward("scored", 1.0), None)
    assert body.branches == []
    assert trained_text(tokenizer, body) == f"{CALL}<|im_end|>{CALL}<|im_end|>It is a.<|im_end|>"
    # The ids that are trained are those of the rendered conversation with the program's tools, read as a whole.
    tool = {
        "name": "look_up",
        "description": "Look a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    }
    template = chat_formats.of([{"type": "function", "function": tool}]).template
    whole = template.render([*sample.messages, *sample.completion], generate=False)
    assert sample.prompt == template.render(sample.messages, generate=True)
    ids = np.frombuffer(body.prompt_ids + body.response_ids, "<i4").tolist()
    assert ids == template.encode(whole.removesuffix("\n"))
    assert len(body.generation.turns) == 3


@pytest.mark.long
async def test_a_command_reads_its_prompt_and_prints_its_reward(hold, program_file) -> None:
    async with started(Program(command=[sys.executable], path=program_file)) as processes:
        body = await hold("", CALL, "It is b.", processes=processes)
    assert (body.sample.agent_reward, body.sample.failure) == (AgentReward("scored", 0.0), None)


async def test_a_command_that_fails_names_its_exit_code_and_its_last_lines(hold) -> None:
    asks = (
        "import json, os, urllib.request as r; r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions'"
    )
    asks += ", json.dumps({'messages': json.load(open('prompt.json'))['messages']}).encode()"
    asks += ", {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}))"
    async with started(Program(command=[sys.executable, "-c", f"{asks}; raise ValueError('no luck')"])) as processes:
        body = await hold("", "Yes.", processes=processes)
    assert body.sample.failure is not None
    assert body.sample.failure.outcome == "data_error"
    assert "exited with 1" in body.sample.failure.reason
    assert "no luck" in body.sample.failure.reason


async def test_histories_that_fork_become_branches_and_no_token_is_trained_twice(hold, tokenizer) -> None:
    turns = ["One.", "Two.", "Three.", "Four.", "Five.", "Six."]
    body = await hold("forks", *turns)
    parts = [body, *body.branches]
    assert [trained_text(tokenizer, part) for part in parts] == [
        "Five.<|im_end|>Six.<|im_end|>",
        "One.<|im_end|>Three.<|im_end|>",
        "Two.<|im_end|>",
        "Four.<|im_end|>",
    ]
    prompts = [tokenizer.decode(np.frombuffer(part.prompt_ids, "<i4")) for part in parts]
    assert "One.<|im_end|>\n<|im_start|>user\nOnce more, please.<|im_end|>" in prompts[3]
    assert body.sample.answer == "Six."
    assert body.generation.turns[0].first == len(body.response_ids) // 4
    assert [turn.tokens for turn in body.generation.turns] == [len(tokenizer(turn)["input_ids"]) + 1 for turn in turns]


FAILURES = [
    ("raises", "data_error", "KeyError: 'lost'"),
    ("exits", "data_error", "SystemExit: 3"),
    ("hangs", "timeout", "the program took longer than 1.5 s"),
    ("crashes", "infra_error", "was killed by SIGSEGV"),
]


@pytest.mark.parametrize(("function", "outcome", "reason"), FAILURES)
async def test_a_program_that_fails_gives_its_sample_no_score(hold, function, outcome, reason) -> None:
    body = await hold(function, "Yes.", limit_s=1.5 if function == "hangs" else 30.0)
    assert body.sample.failure is not None
    assert (body.sample.failure.outcome, body.sample.failure.value) == (outcome, None)
    assert reason in body.sample.failure.reason
    assert body.sample.agent_reward is None


@pytest.mark.parametrize(
    ("function", "message"), [("silent", "it made no request"), ("several", "policy: its request was refused: n is 2")]
)
async def test_a_program_without_a_turn_gives_its_sample_no_score(hold, function, message) -> None:
    body = await hold(function, "Yes.")
    assert (body.sample.failure.outcome, body.sample.failure.value) == ("data_error", None)
    assert message in body.sample.failure.reason
    assert body.sample.response_tokens == 1  # only a sample with tokens is published
    assert body.sample.completion == []


async def test_a_reward_that_cannot_be_read_is_its_programs_failure(hold) -> None:
    body = await hold("ambiguous", "Yes.")
    reason = "ValueError: the truth value is ambiguous"
    assert body.sample.failure == AgentReward("data_error", reason=reason)


async def test_what_a_program_forks_gives_no_reward_of_its_own(hold) -> None:
    body = await hold("leaves_a_fork", "Yes.")
    assert body.sample.agent_reward == AgentReward("scored", 1.0)


async def test_an_infinite_reward_is_a_data_error(hold) -> None:
    body = await hold("infinite", "Yes.")
    assert body.sample.agent_reward == AgentReward("data_error", reason="the program's reward is inf")


@pytest.mark.parametrize(
    ("function", "limits", "num_turns", "reward"),
    [
        ("careful", {"max_turns": 2}, 2, AgentReward("skipped", reason="max_turns")),
        ("careful", {"max_tokens": 40}, 2, AgentReward("skipped", reason="context_length_exceeded")),
        ("endless", {"max_turns": 2}, 2, None),
    ],
)
async def test_a_sample_at_its_limit_is_trained_as_cut(hold, function, limits, num_turns, reward) -> None:
    body = await hold(function, "Yes.", **limits)
    assert len(body.generation.turns) == num_turns
    assert (body.sample.finish_reason, body.sample.failure, body.sample.agent_reward) == ("length", None, reward)


async def test_parameters_that_would_change_the_distribution_are_replaced_by_name(hold) -> None:
    body = await hold("warm", "Yes, END of it.")
    assert body.generation.replaced_parameters == ["seed", "temperature", "tool_choice"]
    assert body.sample.answer == "Yes, "


async def test_a_program_sees_its_prompt_and_no_secret(hold) -> None:
    body = await hold("looks_around", "Yes.")
    assert body.sample.agent_reward is not None
    assert json.loads(body.sample.agent_reward.reason) == [["policy"], None, ["prompt.json"]]


@pytest.mark.parametrize("key", ["", "Bearer sk-plaudit-of-an-ended-sample"])
async def test_a_key_of_no_running_sample_is_refused(server, key) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": key} if key else {}) as client:
        answers = [await client.get("/models"), await client.post("/chat/completions", json={}), await client.get("/x")]
    assert [answer.status_code for answer in answers] == [401, 401, 404]
    assert answers[2].json()["error"]["message"].startswith("GET /v1/x is not served: a policy in training speaks Chat")


async def test_a_machine_has_its_share_of_connections_and_takes_none_of_anothers() -> None:
    """Programs in pods share a socket; each machine has an address of its own."""
    async with EndpointServer(("127.0.0.1", 0)) as served, AsyncExitStack() as held:
        host, port = httpx.URL(served.url_of_pods).host, httpx.URL(served.url_of_pods).port

        async def connect(machine: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(machine, 0))
            held.callback(writer.close)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
            return reader

        answers = [await (await connect("127.0.0.3")).read(12) for _ in range(64)]
        assert answers == [b"HTTP/1.1 401"] * 64
        assert await closed(await connect("127.0.0.3"))
        assert await (await connect("127.0.0.4")).read(12) == b"HTTP/1.1 401"
        await held.aclose()
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address="127.0.0.3")) as client:
            assert await answered(client, f"{served.url_of_pods}/models") == 401


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


async def answered(client: httpx.AsyncClient, url: str) -> int:
    """Return the status of the first answer; connections that have just been closed may count for a moment."""
    while True:
        try:
            return (await client.get(url)).status_code
        except httpx.TransportError:
            await asyncio.sleep(0.01)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def call_with(arguments: object) -> dict:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "n": 1 << 67}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call_with('{"x": 1' + "0" * 30 + "}")]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call_with(nested(300))]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [call_with(json.dumps(nested(300)))]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ["f"]}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [5]}}]}, "tools"),
        ({"metadata": nested(300)}, "metadata"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1 << 70}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stream_options": "usage"}, "stream_options"),
    ],
)
async def test_requests_that_cannot_be_answered_are_refused_by_name(changes, param) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **changes}
    with pytest.raises(RequestError) as refused:
        parse_request(json.dumps(body).encode(), Sampling(max_tokens=8))
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"{", b"[]", b"[" * 100_000, b'{"n": 1' + b"0" * 5000 + b"}", b"\xff"])
async def test_a_body_that_is_no_json_object_is_refused(body) -> None:
    with pytest.raises(RequestError, match="JSON"):
        parse_request(body, Sampling(max_tokens=8))


async def test_a_request_that_breaks_the_template_costs_the_request_only(server, chat_formats) -> None:
    """Whatever a program sends, it gets an answer, and its next request is answered."""

    async def generate(ids, max_tokens=None, stop=(), chat=None):
        return FinishedSample([4, chat_formats.tokenizer.eos_token_id], [-1.0, -1.0], [(0, 1, 0)], "stop", 0.0)

    user = {"role": "user", "content": "a"}
    odd = [
        b'{"messages": [{"role": "user", "content": "half \\ud800 of a pair"}]}',
        json.dumps({"messages": [{"role": "tool", "content": "a"}]}).encode(),
        json.dumps({"messages": [user, {"role": "assistant", "tool_calls": [call_with(["a"])]}]}).encode(),
        json.dumps({"messages": [user, {"role": "assistant", "tool_calls": [call_with("no json")]}]}).encode(),
        json.dumps({"messages": [user], "tools": [{"function": {"name": "f", "description": 5}}]}).encode(),
        b"\xff" * 100,
    ]
    session = EndpointSession(prompt_of(), generate, chat_formats, 100)
    with server.serving(session) as key:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
            answers = [await client.post(f"{server.url}/chat/completions", content=content) for content in odd]
            last = await client.post(f"{server.url}/chat/completions", json={"messages": [user]})
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert answers[0].status_code == last.status_code == 200


@pytest.mark.long
async def test_a_large_request_does_not_hold_up_the_others(server, chat_formats) -> None:
    ticks = 0

    async def generate(ids, max_tokens=None, stop=(), chat=None):
        assert len(ids) > 1 << 19
        raise RequestRefusedError(f"the prompt has {len(ids)} tokens")

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    session = EndpointSession(prompt_of(), generate, chat_formats, 100)
    ticking = asyncio.create_task(tick())
    large = {"messages": [{"role": "user", "content": "b" * (1 << 20)}]}
    with server.serving(session) as key:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
            answer = await client.post(f"{server.url}/chat/completions", json=large)
            large["messages"] *= 4
            refused = await client.post(f"{server.url}/chat/completions", json=large)
    ticking.cancel()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "more than 4 MiB" in refused.json()["error"]["message"]
    assert ticks > 20


async def test_defaults_and_the_jobs_own_values_replace_nothing() -> None:
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    }
    neutral = {"n": 1, "temperature": 0.7, "parallel_tool_calls": True, "logit_bias": {}, "presence_penalty": 0.0}
    used = {"tool_choice": "none", "stop": "x", "max_tokens": 9, "max_completion_tokens": 7, "metadata": {"a": "b"}}
    request = parse_request(json.dumps(body | neutral | used).encode(), Sampling(max_tokens=8, temperature=0.7))
    assert request.messages == [{"role": "system", "content": "ab"}]
    assert (request.replaced, request.stop, request.max_tokens, request.calls_allowed) == ((), ("x",), 7, False)


async def test_a_missing_program_is_refused_before_anything_runs() -> None:
    with pytest.raises(RefusedError, match="there is no program 'no-such-program'"):
        async with started(Program(command=["no-such-program"])):
            pass


LOOKS = """
import json, os, sys, time, urllib.request
from pathlib import Path

given = json.load(sys.stdin)
meeting = Path(given["extra_info"]["meeting"])
body = json.dumps({"messages": given["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()


def wait_for(name):
    while not (meeting / name).exists():
        time.sleep(0.02)


def attempt(action, *arguments):
    try:
        return str(action(*arguments))
    except OSError as error:
        return type(error).__name__


def keys():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield from (line for line in (process / "environ").read_text().split("\\0") if "OPENAI_API_KEY=sk-" in line)
        except OSError:
            pass


if given["extra_info"]["looks"]:
    wait_for("there")
    here = Path.cwd()
    (other,) = [folder for folder in here.parent.iterdir() if folder != here]
    seen = {
        "keys": len({key for key in keys()} - {"OPENAI_API_KEY=" + os.environ["OPENAI_API_KEY"]}),
        "answer": given.get("ground_truth"),
        "other": [
            attempt((other / "prompt.json").read_text),
            attempt((other / "planted").write_text, "a"),
            attempt((other / "prompt.json").unlink),
            attempt(os.rename, other / "prompt.json", here / "stolen"),
        ],
        "run": attempt((meeting.parent / "run" / "redis.json").read_text),
        "own": [attempt(Path("a").write_text, "abc"), attempt(os.rename, "a", "b"), os.environ["TMPDIR"] == str(here)],
        "elsewhere": [attempt((meeting / "seen").write_text, "abc"), attempt(os.rename, meeting / "seen", "seen")],
    }
    (meeting / "done").touch()
    print(json.dumps({"outcome": "skipped", "reason": json.dumps(seen)}))
else:
    (meeting / "there").touch()
    wait_for("done")
    print(json.dumps({"reward": len(list(Path.cwd().iterdir()))}))
"""


async def test_a_program_sees_neither_its_answer_nor_other_samples(
    server, chat_formats, tokenizer, tmp_path, monkeypatch
):
    program, meeting, folders = tmp_path / "looks.py", tmp_path / "meeting", tmp_path / "folders"
    program.write_text(LOOKS)
    meeting.mkdir()
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    monkeypatch.setenv("PLAUDIT_RUN_FOLDER", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "redis.json").write_text("the password")

    async def one(*, looks: bool):
        engine = ScriptedEngine(Script(Constant(0.0), turns=["It is a."]), tokenizer=tokenizer)
        await engine.load_weights(None, PolicyVersion(1, 0))
        about = {"meeting": str(meeting), "looks": looks}
        run = SampleRun(msgspec.structs.replace(prompt_of(), extra_info=about), 0, engine, lambda change: None)
        return await run.run(EndpointAgent(processes, server, chat_formats, 8, 60.0))

    async with started(Program(command=[sys.executable], path=str(program))) as processes:
        left, looked = await asyncio.gather(one(looks=False), one(looks=True))
    assert left.reward == AgentReward("scored", 1.0), left.failure  # its prompt lies alone in its folder
    seen = json.loads(looked.reward.reason)
    assert (seen["keys"], seen["answer"]) == (0, None)
    assert seen["other"] == ["PermissionError"] * 4
    assert seen["run"] == "PermissionError"
    assert seen["own"] == ["3", "None", True]
    assert seen["elsewhere"] == ["3", "None"]
    assert not list(folders.glob("*/*"))


async def test_a_broken_engine_ends_the_sample_with_its_error(shared, server, chat_formats) -> None:
    async def broken(ids, max_tokens=None, stop=(), chat=None):
        raise EngineFailedError("out of memory")

    with pytest.raises(EngineFailedError, match="out of memory"):
        await EndpointAgent(shared, server, chat_formats, 8, 30.0).run(prompt_of(function="plain"), broken)


@pytest.mark.parametrize("seed", range(8))
async def test_random_trees_of_conversations_train_each_sampled_token_once_as_the_policy_saw_it(
    chat_formats, seed
) -> None:
    choose = random.Random(seed)
    seen: dict[int, list[int]] = {}
    sampled = 0

    async def generate(ids, max_tokens=None, stop=(), chat=None):
        nonlocal sampled
        text = choose.choice(["Yes.", "  spaced  ", "a\n\nb", "the other thing", CALL])
        response = [*chat_formats.tokenizer(text)["input_ids"], chat_formats.tokenizer.eos_token_id]
        sampled += len(response)
        for place in range(len(response)):
            seen[len(seen)] = [*ids, *response[: place + 1]]
        return FinishedSample(response, [-1.0] * len(response), [(0, 1, 0)], "stop", 0.0)

    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    session = EndpointSession(prompt_of(100_000), generate, chat_formats, 100)
    histories: list[list[dict]] = [[{"role": "user", "content": "Begin."}]]
    for _ in range(12):
        history = choose.choice(histories)
        document = {"messages": history, "tools": tools, "model": "m"}
        completion = await session.complete(parse_request(json.dumps(document).encode(), session.sampling))
        message = {**completion.message, "refusal": None}
        calls = [
            {"role": "tool", "tool_call_id": call["id"], "content": choose.choice(["4", "two words"])}
            for call in message.get("tool_calls", [])
        ]
        new = calls or [{"role": "user", "content": choose.choice(["Go on.", "Why?"])}]
        histories.append([*history, message, *new])
    trajectory = session.trajectory()
    assert trajectory is not None
    trained = []
    for part in [trajectory, *trajectory.branches]:
        ids = part.prompt_ids + part.response_ids
        trained += [ids[: len(part.prompt_ids) + i + 1] for i, kept in enumerate(part.loss_mask) if kept]
    assert len(trained) == sampled
    assert sorted(trained) == sorted(seen.values())
    session.close()
