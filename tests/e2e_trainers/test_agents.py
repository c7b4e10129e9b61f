"""Programs with real agent frameworks as agents (``agent.kind: endpoint``), over a scripted engine."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_environments import python

from builders import make_prompt
from plaudit_job.load import load_job
from plaudit_wire.messages import PolicyVersion, SampleBody, Sampling
from plaudit_wire.records import AgentReward
from plaudit_workers.rollout.prompt_work import SampleRun, sample_body
from plaudit_workers.rollout.worker import build_engine, open_agent

EXAMPLE = Path(__file__).parents[2] / "examples" / "10-agent"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
pytestmark = [
    pytest.mark.skipif(python("agents") is None, reason="make trainers-build makes the environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch warn when they are imported
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", "--folder", str(folder)])
        runpy.run_path(str(EXAMPLE / "prepare.py"), run_name="__main__")
    for file in (*EXAMPLE.glob("*.yaml"), *EXAMPLE.glob("*.py")):
        content = file.read_text().replace(".venv/bin/python", str(python("agents")))
        (folder / file.name).write_text(content)
    return folder


def held(job_file: Path) -> SampleBody:
    """One sample of a job, as its trainer reads it."""

    async def hold() -> SampleBody:
        job = load_job(job_file)
        prompt = make_prompt(
            n=1,
            seed=1,
            sampling=Sampling(max_tokens=job.spec.rollout.sampling.max_tokens),
            data_source="weather",
            prompt="",
            prompt_ids=b"",
            ground_truth="4 degrees",
            messages=[{"role": "user", "content": "How warm is it in Oslo?"}],
        )
        engine: Any = build_engine(job)
        await engine.load_weights(folder, PolicyVersion(1, 0))
        run = SampleRun(prompt, 0, engine, lambda change: None)
        async with open_agent(job) as agent:
            trajectory = await run.run(agent)
        return sample_body(prompt, 0, trajectory, run.record("rollout-0", trajectory, None), engine)

    return asyncio.run(hold())


def trained_texts(folder: Path, body: SampleBody) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    parts = [(np.frombuffer(p.response_ids, "<i4"), np.frombuffer(p.loss_mask, "u1")) for p in (body, *body.branches)]
    return [tokenizer.decode(ids[mask != 0]) for ids, mask in parts]


def test_a_program_of_the_openai_agents_sdk_is_one_token_exact_sequence(folder: Path) -> None:
    body = held(folder / "job.yaml")
    assert (body.sample.agent_reward, body.sample.failure) == (AgentReward("scored", 1.0), None)
    assert trained_texts(folder, body) == [f"{CALL}<eos>It is 4 degrees.<eos>"]
    assert body.sample.messages[0]["content"] == "Answer with the temperature only."
    assert [message["role"] for message in body.sample.completion] == ["assistant", "tool", "assistant"]
    assert body.sample.completion[1]["content"] == "4 degrees, rain"


def test_a_smolagents_program_rewrites_its_history_and_so_trains_in_branches(folder: Path) -> None:
    body = held(folder / "smolagents.yaml")
    assert (body.sample.agent_reward, body.sample.failure) == (AgentReward("scored", 1.0), None)
    last = '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is 4 degrees."}}</tool_call>'
    assert trained_texts(folder, body) == [f"{last}<eos>", f"{CALL}<eos>"]
    assert "4 degrees, rain" in body.sample.prompt
    assert body.generation.replaced_parameters == ["tool_choice"]
