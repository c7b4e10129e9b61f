"""``kind: environment`` with the packages themselves: their own files and servers, unchanged."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from trainer_environments import CACHE, python

import episodes
from chat_tokenizer import chat_tokenizer
from plaudit_reward.endpoint.access import EndpointUsage
from plaudit_reward.endpoint.remote import RemoteClient
from plaudit_reward.endpoint.shapes import SHAPES
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.records import AgentReward, Sample
from plaudit_workers.agents.messages import EnvironmentClass, EnvironmentServer, Source
from plaudit_workers.agents.open_reward import write_tasks
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.data_files import checked_rows
from plaudit_workers.launch.redis import free_port

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM and torch warn when they are imported

HERE = Path(__file__).parent
EMPTY = [{"role": "user", "content": ""}]
"""The prompt of a row of the Open Reward Standard: its server gives the prompt."""
EXAMPLE = HERE.parents[1] / "examples" / "09-environment"


def packages(environment: str) -> Path:
    """Return the folder of an environment's packages; skip the test where it is not built."""
    if python(environment) is None:
        pytest.skip(f"the environment {environment} is not built in {CACHE}: make trainers-build")
    (folder,) = (CACHE / environment / "lib").glob("python3*/site-packages")
    return folder


@pytest_asyncio.fixture
async def open_agent(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Any]]:
    """Opens an agent whose processes also find the packages of a trainer, behind our own."""
    opened: list[AgentProcesses] = []

    async def open_agent(source: Source, environment: str = "", with_tokenizer: Any = None) -> Any:
        if environment:
            folder = packages(environment)
            (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(folder)!r})\n")
            if (folder / "antlr4").is_dir():  # hydra needs an older version than math-verify
                (tmp_path / "antlr4").symlink_to(folder / "antlr4")
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        opened.append(AgentProcesses([source]))
        return await episodes.open_agent(opened[-1], with_tokenizer or tokenizer)

    yield open_agent
    for processes in opened:
        await processes.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Runs a server in a trainer's environment; returns its URL."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(environment: str, program: str, *arguments: str) -> str:
        packages(environment)
        port = free_port()
        command = [str(python(environment)), str(HERE / "programs" / program), str(port), *arguments]
        started.append(subprocess.Popen(command))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                httpx.get(f"{url}/openapi.json", timeout=5)
                return url
            except httpx.HTTPError:
                assert started[-1].poll() is None
                time.sleep(0.1)
        raise AssertionError(f"{program} does not answer")

    yield serve
    for process in started:
        process.kill()
        process.wait()


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def trained_text(tokenizer: Any, body: Any) -> str:
    """Return the text of the tokens that are trained."""
    ids, mask = np.frombuffer(body.response_ids, "<i4"), np.frombuffer(body.loss_mask, "u1") != 0
    return str(tokenizer.decode(ids[mask]))


async def test_skyrl_gyms_own_environment_plays_its_turns(open_agent: Any, tokenizer: Any) -> None:
    file = packages("skyrl") / "skyrl_gym" / "envs" / "gsm8k" / "multi_turn_env.py"
    source = EnvironmentClass(str(file), "GSM8kMultiTurnEnv", max_turns=2)
    agent = await open_agent(source, "skyrl")
    _, body = await episodes.play(agent, tokenizer, "I think", "#### 6", extra_info={"max_turns": 2})
    assert trained_text(tokenizer, body) == "I think<|im_end|>#### 6<|im_end|>"
    assert body.sample.failure is None
    assert len(body.sample.turn_rewards) == 2
    reward = body.sample.agent_reward
    assert reward.outcome == "scored"
    assert reward.value == pytest.approx(sum(body.sample.turn_rewards))
    assert reward.value > 0.9


async def test_the_examples_skyrl_environment_runs(open_agent: Any, tokenizer: Any) -> None:
    source = EnvironmentClass(str(EXAMPLE / "repeat.py"), "RepeatEnv", {"reward": 0.5}, 2)
    agent = await open_agent(source, "skyrl")
    _, body = await episodes.play(agent, tokenizer, "3", "5", ground_truth="34")
    assert [message["content"] for message in body.sample.messages] == ["Play.3"]
    assert (body.sample.turn_rewards, body.sample.agent_reward) == ([0.5, 0.0], AgentReward("scored", 0.5))


def board_scripts() -> list[list[str]]:
    """Return the turns of a policy: calls in several turns, several calls in a turn, and none."""
    return [
        [call("add", number=4), "One moment.\n" + call("add", number=2, note='"half" ä'), "It is 6."],
        [call("add", number=1) + "\n" + call("look"), "Enough."],
        ["I will not play."],
    ]


def in_trls_own_loop(folder: Path, **given: Any) -> list[dict[str, Any]]:
    """Return what TRL's GRPOTrainer would train on for each script."""
    (folder / "given.json").write_text(json.dumps(given))
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HOME": str(folder)}
    command = [str(python("trl")), str(HERE / "programs" / "trl_loop.py"), str(folder / "given.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


async def test_an_environment_of_trl_plays_as_in_trls_own_loop(open_agent: Any, tmp_path: Path) -> None:
    template = (packages("trl") / "trl" / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer, file = chat_tokenizer(template), HERE / "programs" / "trl_board.py"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    scripts = board_scripts()
    row = {"prompt": [{"role": "user", "content": "Play."}], "answer": "6"}
    about = {"tokenizer": str(tmp_path / "tokenizer"), "file": str(file), "class": "Board", "row": row}
    theirs = in_trls_own_loop(tmp_path, scripts=scripts, **about)

    agent = await open_agent(EnvironmentClass(str(file), "Board", {}), with_tokenizer=tokenizer)
    for script, trl in zip(scripts, theirs, strict=True):
        _, body = await episodes.play(agent, tokenizer, *script, max_tokens=4000)
        ours = {
            "prompt_ids": np.frombuffer(body.prompt_ids, "<i4").tolist(),
            "response_ids": np.frombuffer(body.response_ids, "<i4").tolist(),
            "loss_mask": list(body.loss_mask),
        }
        assert {name: tokenizer.decode(ids) for name, ids in ours.items() if name != "loss_mask"} == {
            name: tokenizer.decode(trl[name]) for name in ("prompt_ids", "response_ids")
        }
        assert ours == {name: trl[name] for name in ours}
        assert body.sample.agent_reward.value == pytest.approx(trl["reward"])
        assert body.sample.environment == {**trl["attributes"], "limit": 3}  # of the class, not in the instance's vars


@pytest.mark.parametrize(
    ("file", "name"),
    [("single_turn_agent_loop.py", "SingleTurnAgentLoop"), ("tool_agent_loop.py", "ToolAgentLoop")],
)
async def test_verls_own_agent_loops_generate_in_our_engine(
    file: str, name: str, open_agent: Any, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    path = packages("verl") / "verl" / "experimental" / "agent_loop" / file
    source = EnvironmentClass(str(path), name, {}, 4, 120.0, {"source": str(tmp_path / "model")})
    prompt_ids, body = await episodes.play(await open_agent(source, "verl"), tokenizer, "six")
    assert prompt_ids
    assert body.prompt_ids == b""  # verl renders the prompt as the trainer does
    assert trained_text(tokenizer, body) == "six<|im_end|>"
    assert body.sample.agent_reward is None
    assert (np.frombuffer(body.logprobs, "<f4") < 0).all()


async def test_an_openenv_server_is_played_over_its_socket(open_agent: Any, tokenizer: Any, serve: Any) -> None:
    agent = await open_agent(EnvironmentServer(serve("openenv", "openenv_server.py")))
    turns = (call("step", number=2), call("step", text="x"), call("step", number=4), "never asked")
    _, body = await episodes.play(agent, tokenizer, *turns)
    results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
    assert (results[0], results[2]) == ("2", "6")
    assert "ValueError: " in results[1]
    assert body.sample.agent_reward == AgentReward("scored", 1.0)


@pytest.mark.parametrize("action", ["call_tool", "plain"])
async def test_an_openenv_server_offers_its_mcp_tools(action: str, open_agent: Any, tokenizer: Any, serve: Any) -> None:
    agent = await open_agent(EnvironmentServer(serve("openenv", "openenv_mcp_server.py", action)))
    (tool,) = agent.tools.values()
    described = tool.schema["function"]
    assert (described["name"], described["description"]) == ("turn", "Turn the lock to a digit.")
    assert described["parameters"]["properties"]["digit"]["type"] == "integer"
    turns = (call("turn", digit=10), call("turn", digit=4), call("turn", digit=2), "never asked")
    _, body = await episodes.play(agent, tokenizer, *turns)
    results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
    assert results[0].startswith("ValueError: ")
    assert "no such digit" in results[0]
    assert results[1:] == ["turned to [4]", "turned to [4, 2]"]
    assert [[step.outcome for step in turn.calls] for turn in body.generation.turns] == [["error"], ["ok"], ["ok"]]
    assert body.sample.agent_reward == AgentReward("scored", 0.5)


async def test_a_server_of_the_open_reward_standard_is_played(open_agent: Any, tokenizer: Any, serve: Any) -> None:
    url = serve("open-reward", "open_reward_server.py")
    agent = await open_agent(EnvironmentServer(url, {"secrets": {"hint": "odd"}}))
    turns = (call("guess", number=3), call("guess", number=-1), call("guess", number=4), "never asked")
    row = {"split": "train", "task_index": 1}
    _, body = await episodes.play(agent, tokenizer, *turns, max_tokens=20_000, messages=EMPTY, extra_info=row)
    assert body.sample.messages == [{"role": "user", "content": "Guess.\nHint: odd"}]
    results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
    assert results[:2] == ["wrong", "RuntimeError: below zero"]
    assert results[2].startswith("ä right ä right ")
    assert (body.sample.agent_reward, body.sample.turn_rewards) == (AgentReward("scored", 1.25), [0.25, 0, 1.0])


async def test_a_conversation_of_the_open_reward_standard_ends_with_its_terminal_tool(
    open_agent: Any, tokenizer: Any, serve: Any
) -> None:
    url = serve("open-reward", "open_reward_server.py")
    agent = await open_agent(EnvironmentServer(url, {"env_name": "talk"}))
    assert list(agent.tools) == ["look"]  # the policy does not see the terminal one
    row = {"task_spec": {"answer": "blue"}}
    _, body = await episodes.play(agent, tokenizer, call("look"), "It is blue.", messages=EMPTY, extra_info=row)
    assert [message["role"] for message in body.sample.messages] == ["system", "user", "assistant", "tool", "user"]
    assert body.sample.agent_reward == AgentReward("scored", 1.5)


async def test_the_tasks_of_an_open_reward_server_are_a_jobs_data(serve: Any, tmp_path: Path) -> None:
    source = EnvironmentServer(serve("open-reward", "open_reward_server.py"))
    write_tasks(source, "train", tmp_path / "tasks.jsonl")
    rows = [row.row for row in checked_rows(tmp_path / "tasks.jsonl")]
    assert [(row.extra_info["task_index"], row.extra_info["task_spec"]) for row in rows] == [
        (index, {"number": number}) for index, number in enumerate((3, 4, 5))
    ]
    with pytest.raises(ConfigurationError, match="has no split 'trian'; it has train, test"):
        write_tasks(source, "trian", tmp_path / "tasks.jsonl")


async def test_a_resources_server_of_nemo_gym_verifies_the_conversation(
    open_agent: Any, tokenizer: Any, serve: Any
) -> None:
    agent = await open_agent(EnvironmentServer(serve("nemo-gym", "nemo_gym_weather.py")))
    assert list(agent.tools) == ["get_weather"]
    _, body = await episodes.play(agent, tokenizer, call("get_weather", city="Rome"), "It is cold.")
    assert "The weather in Rome is cold." in body.sample.completion[1]["content"]
    assert body.sample.agent_reward == AgentReward("scored", 1.0)


async def test_each_sample_has_a_session_of_its_own_with_nemo_gym(open_agent: Any, tokenizer: Any, serve: Any) -> None:
    agent = await open_agent(EnvironmentServer(serve("nemo-gym", "nemo_gym_counter.py")))
    turns = (call("increment_counter", count=2), call("get_counter_value"), "Done.")
    row = {"initial_count": 3, "expected_count": 5}
    played = await asyncio.gather(*(episodes.play(agent, tokenizer, *turns, extra_info=row) for _ in range(4)))
    for _, body in played:  # all on one counter, they would read 5, 7, 9 and 11
        assert [m["content"] for m in body.sample.completion if m["role"] == "tool"][1] == '{"count":5}'
        assert body.sample.agent_reward == AgentReward("scored", 1.0)


async def test_a_scorer_verifies_in_the_session_that_the_row_seeds_with_nemo_gym(serve: Any) -> None:
    client = RemoteClient(f"{serve('nemo-gym', 'nemo_gym_counter.py')}/verify", SHAPES["nemo-gym"], EndpointUsage())
    # Without its session the server has no counter for the sample.
    samples = [
        Sample("g", n, "count", "p", "r", extra_info={"initial_count": n, "expected_count": 2}) for n in range(4)
    ]
    try:
        scores = await asyncio.gather(*(client.score(sample, 60.0) for sample in samples))
    finally:
        await client.close()
    assert [score.value for score in scores] == [0.0, 0.0, 1.0, 0.0]
