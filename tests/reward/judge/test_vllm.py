"""A judge behind vLLM's own API server, with the tiny model of the first example."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_job.processes import server_environment
from plaudit_job.spec.rewards import RewardModelSpec
from plaudit_reward.endpoint.access import EndpointRefusedError, EndpointUsage
from plaudit_reward.endpoint.budget import Limiter, LocalBudget, RateLimits
from plaudit_reward.endpoint.judge import JudgeClient, JudgeScorer, PromptTemplate, RegexParser, TokenEstimate
from plaudit_reward.scorer import Attempt
from plaudit_wire.errors import DataError
from reward_samples import make_sample

PREPARE = Path(__file__).parents[3] / "examples" / "01-copy-digits" / "prepare.py"
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
READY_WITHIN_S = 400.0


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's base URL."""
    folder = tmp_path_factory.mktemp("judge")
    runpy.run_path(str(PREPARE))["prepare"](folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--served-model-name", "digits", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "128", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
    command += ["--api-key", "hush"]
    # What a reward model's vLLM is started with on a CPU suits a judge's too.
    quiet = server_environment(RewardModelSpec(source=str(folder / "model"), engine="vllm"), with_gpu=False)
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **quiet}, stdout=log, stderr=log)
    try:
        _await_health(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=60)


def _await_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)


async def test_vllms_answers_are_scored_and_its_refusals_reported(vllm: str, tmp_path: Path) -> None:
    usage = EndpointUsage()
    (tmp_path / "judge.j2").write_text("{{ response }}")

    async def opened(key: str, **arguments: Any) -> JudgeScorer:
        scorer = JudgeScorer(
            "digits",
            PromptTemplate(str(tmp_path / "judge.j2")),
            JudgeClient(vllm, "digits", usage, api_key=key, arguments=arguments),
            RegexParser(r"(\d)"),
            Limiter(LocalBudget(RateLimits(tokens=10_000)), "digits"),
            TokenEstimate(arguments),
        )
        await scorer.open()
        return scorer

    # A random model: made to write digits, and to end behind the first.
    ends = {"stop_token_ids": list(range(10)), "include_stop_str_in_output": True}
    digits = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "logit_bias": {"10": -100, "11": -100}}
    judge = await opened("hush", **digits, **ends)
    score = await judge.score(make_sample("271828"), Attempt(60.0))
    assert score.outcome == "scored", score
    assert score.extra["completion_tokens"] == 1
    assert usage.tokens["completion"] == 1
    with pytest.raises(DataError, match=r"responded 400: .*maximum context length"):
        await judge.score(make_sample("1" * 500), Attempt(60.0))
    await judge.close()
    stranger = await opened("wrong")
    with pytest.raises(EndpointRefusedError, match=r"responded 401: Unauthorized \(check apiKeySecret\)"):
        await stranger.score(make_sample("1"), Attempt(60.0))
    assert stranger.circuit_open
    await stranger.close()
