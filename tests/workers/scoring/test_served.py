"""A model that the job serves, by a real vLLM: a judge asks it, and so do unchanged functions of verl's."""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_job.processes import server_command, server_environment
from plaudit_job.spec.rewards import ServedChatModelSpec
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import Sample
from plaudit_workers.launch.redis import free_port
from plaudit_workers.service.build import MAKERS, BuildContext, build_pipeline

PREPARE = Path(__file__).parents[3] / "examples" / "01-copy-digits" / "prepare.py"
READY_WITHIN_S = 400.0
SAMPLE = Sample("t-0-1.0", 0, "digits", "2718", "314", ground_truth="314")
DIGITS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logit_bias": {"10": -100, "11": -100}}
"""A random model, made to write digits."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# As in verl's recipes of generative reward models: the router's address, the model by its path, the model's tokenizer.
ASYNC = """
import aiohttp

GRM = "MODEL"

async def chat_complete(router_address, request):
    url = f"http://{router_address}/v1/chat/completions"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.post(url, json=request) as response:
            response.raise_for_status()
            return await response.json()

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                        reward_model_tokenizer):
    messages = [{"role": "user", "content": solution_str}]
    output = await chat_complete(reward_router_address, {"model": GRM, "messages": messages, **ARGUMENTS})
    prompt = reward_model_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    own = len(reward_model_tokenizer(prompt, add_special_tokens=False)["input_ids"])
    answer = output["choices"][0]["message"]["content"]
    return {"score": int(answer[0]) / 10, "asked": output["usage"]["prompt_tokens"], "own": own}
"""
BLOCKING = """
import json, urllib.request

def compute_score(solution_str, ground_truth, reward_router_address=None, **kwargs):
    assert kwargs["reward_model_tokenizer"].vocab_size
    body = {"model": "MODEL", "messages": [{"role": "user", "content": solution_str}], **ARGUMENTS}
    request = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return int(json.load(response)["choices"][0]["message"]["content"][0]) / 10
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that writes digits."""
    folder = tmp_path_factory.mktemp("judge")
    runpy.run_path(str(PREPARE))["prepare"](folder)
    return folder / "model"


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server, as a job starts it."""
    log, port = tmp_path_factory.mktemp("server") / "log", free_port()
    arguments = {"kv_cache_memory_bytes": 64 << 20}
    spec = ServedChatModelSpec(source=str(model), dtype="float32", max_model_length=128, arguments=arguments)
    command = [sys.executable, *server_command(spec, "grades", "127.0.0.1", port, with_gpu=False)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **server_environment(spec, with_gpu=False)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while not _healthy(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


async def score_of(reward: Any, url: str) -> Any:
    """Score one sample with the first scorer of a job's section, as a reward worker builds it."""
    (spec,) = reward.scorers
    scorer = MAKERS[spec.kind](spec, BuildContext(reward, "reward-0", model_servers={spec.name: [url]}))
    await scorer.open()
    try:
        while not scorer.room():
            await asyncio.sleep(0.01)
        return await scorer.score(SAMPLE, Attempt(120.0))
    finally:
        await scorer.close()


def function(source: str, model: Path) -> str:
    return source.replace("MODEL", str(model)).replace("ARGUMENTS", repr(DIGITS))


async def test_an_async_function_of_verls_asks_the_router_with_the_models_tokenizer(
    served: str, model: Path, make_reward: Callable[..., Any], tmp_path: Path
) -> None:
    python = {"path": str(tmp_path / "rewards.py"), "serve": {"source": str(model)}}
    scorer = {"name": "grades", "kind": "python", "python": python}
    score = await score_of(make_reward([scorer], function(ASYNC, model)), served)
    assert score.outcome == "scored", score
    assert score.value in [digit / 10 for digit in range(10)]
    assert score.extra["asked"] == score.extra["own"]


async def test_a_blocking_function_asks_the_router_from_its_process(
    served: str, model: Path, make_reward: Callable[..., Any], tmp_path: Path
) -> None:
    python = {"path": str(tmp_path / "rewards.py"), "serve": {"source": str(model)}}
    scorer = {"name": "grades", "kind": "python", "python": python}
    score = await score_of(make_reward([scorer], function(BLOCKING, model)), served)
    assert score.outcome == "scored", score


async def test_a_judge_asks_the_model_that_the_job_serves(
    served: str, model: Path, make_reward: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "judge.j2").write_text("{{ response }}")
    judge = {
        "serve": {"source": str(model)},
        "promptTemplate": {"path": str(tmp_path / "judge.j2")},
        "parse": {"regex": r"(\d)"},
        "arguments": {**DIGITS, "stop_token_ids": list(range(10)), "include_stop_str_in_output": True},
    }
    score = await score_of(make_reward([{"name": "grades", "kind": "judge", "judge": judge}]), served)
    assert score.outcome == "scored", score
    assert score.extra["completion_tokens"] == 1


async def test_a_function_without_the_parameters_refuses_a_served_model(
    model: Path, make_reward: Callable[..., Any], tmp_path: Path
) -> None:
    python = {"path": str(tmp_path / "rewards.py"), "serve": {"source": str(model)}}
    reward = make_reward([{"name": "grades", "kind": "python", "python": python}], "def compute_score(sample): pass")
    context = BuildContext(reward, "reward-0", model_servers={"grades": ["http://127.0.0.1:9"]})
    with pytest.raises(RefusedError, match=r"neither reward_router_address nor reward_model_tokenizer: add the"):
        await build_pipeline(reward, "reward-0", context)
