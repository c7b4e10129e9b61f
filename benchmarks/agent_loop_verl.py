"""The conversations of ``agent_loop`` in verl's tool agent loop, in an interpreter that has verl (seen with 0.9.1).

verl's own ``AgentLoopManager`` starts its workers as Ray actors and splits the batch among them; each conversation is a
``ToolAgentLoop``. Only the engine is replaced: a client in each worker that waits as long as the scripted engine of
``agent_loop`` and returns the same turns. That leaves out verl's hop to an engine's actor, in verl's favour. The tools
are functions registered by verl's ``function_tool``: one that blocks, which verl runs in a thread, and an async one.

Called by ``agent_loop.py --verl PYTHON`` as ``PYTHON -c "import agent_loop_verl; agent_loop_verl.main()" …``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import verl
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

KINDS = ("blocking", "async")
RESPONSE_TOKENS = 4096
START_ATTEMPTS = 5
TOOLS = '''
import asyncio, os, random, time

from verl.tools.function_tool import function_tool


@function_tool
def wait_blocking(low: float, high: float) -> tuple:
    """Block for a random time.

    Args:
        low: fewest seconds
        high: most seconds
    """
    seconds = random.Random(os.urandom(8)).uniform(low, high)
    time.sleep(seconds)
    return str(seconds), seconds


@function_tool
async def wait_async(low: float, high: float) -> tuple:
    """Wait for a random time.

    Args:
        low: fewest seconds
        high: most seconds
    """
    seconds = random.Random(os.urandom(8)).uniform(low, high)
    await asyncio.sleep(seconds)
    return str(seconds), seconds
'''


class ScriptedClient(LLMServerClient):
    """The policy: the first prompt of a conversation names the tool that it calls in each turn but the last.

    Args:
        config: of verl's trainer.
        turns: the token ids of each turn, by kind of tool.
        turn_s: seconds of a turn.
    """

    def __init__(self, config: Any, turns: dict[str, list[list[int]]], turn_s: float) -> None:
        super().__init__(config)
        self._turns = turns
        self._turn_s = turn_s
        self._left: dict[str, list[list[int]]] = {}
        self._tokenizer: Any = None

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        """Return the next turn of a conversation."""
        if request_id not in self._left:
            self._left[request_id] = list(self._turns[self._kind(prompt_ids)])
        await asyncio.sleep(self._turn_s)
        ids = self._left[request_id].pop(0)
        return TokenOutput(token_ids=list(ids), log_probs=[-1.0] * len(ids), stop_reason="completed", num_preempted=0)

    def _kind(self, prompt_ids: list[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self.config.actor_rollout_ref.model.path)
        text = self._tokenizer.decode(prompt_ids)
        return next(kind for kind in KINDS if marker(kind) in text)


def marker(kind: str) -> str:
    """Return the user's message of a conversation."""
    return f"Use the {kind} tool."


def configuration(model: str, folder: Path, workers: int) -> Any:
    """Return the configuration of verl's PPO trainer with the tools, whose file is written into the folder."""
    (folder / "tools.py").write_text(TOOLS)
    # A family for which verl tokenises by the chat template alone: the model's own asks for Qwen's special tokens.
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    config.actor_rollout_ref.model.path = model
    config.actor_rollout_ref.model.hf_config_path = str(folder)
    config.actor_rollout_ref.model.override_config = {"attn_implementation": "eager"}
    rollout = config.actor_rollout_ref.rollout
    rollout.name = "vllm"
    rollout.prompt_length, rollout.response_length = 1024, RESPONSE_TOKENS
    rollout.calculate_log_probs = True
    rollout.multi_turn.enable = True
    rollout.multi_turn.format = "hermes"
    rollout.multi_turn.function_tool_path = str(folder / "tools.py")
    rollout.agent.num_workers = workers
    rollout.agent.default_agent_loop = "tool_agent"
    return config


def batch(kind: str, count: int) -> DataProto:
    """Return conversations as verl's dataset hands them over."""
    prompts = np.empty(count, dtype=object)
    prompts[:] = [[{"role": "user", "content": marker(kind)}] for _ in range(count)]
    return DataProto.from_dict(non_tensors={"raw_prompt": prompts, "index": np.arange(count)})


def measure(manager: AgentLoopManager, kind: str, count: int, num_calls: int, turn_s: float) -> dict[str, Any]:
    """Hold ``count`` conversations at once."""
    began = time.perf_counter()
    output = manager.generate_sequences(batch(kind, count))
    wall_s = time.perf_counter() - began
    slept = output.non_tensor_batch["tool_rewards"]
    assert [len(own) for own in slept] == [num_calls] * count, slept
    bound_s = max(sum(own) for own in slept) + (num_calls + 1) * turn_s
    return {"kind": kind, "samples": count, "wall_s": wall_s, "bound_s": bound_s, "ratio": wall_s / bound_s}


def start_ray(workers: int) -> None:
    """Start Ray; a busy machine may need more than the 30 s that Ray gives its own processes."""
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, configure_logging=False)
            return
        except Exception:
            ray.shutdown()
            if attempt == START_ATTEMPTS - 1:
                raise


def main() -> None:
    """Run both kinds of tools and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--low", type=float, required=True)
    parser.add_argument("--high", type=float, required=True)
    parser.add_argument("--turn", type=float, required=True)
    given = parser.parse_args()
    start_ray(given.workers)
    tokenizer = AutoTokenizer.from_pretrained(given.model)

    def turns(kind: str) -> list[list[int]]:
        call = json.dumps({"name": f"wait_{kind}", "arguments": {"low": given.low, "high": given.high}})
        texts = [f"<tool_call>\n{call}\n</tool_call>"] * given.calls + ["Done."]
        return [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]

    with tempfile.TemporaryDirectory() as folder:
        config = configuration(given.model, Path(folder), given.workers)
        client = ScriptedClient(config, {kind: turns(kind) for kind in KINDS}, given.turn)
        began = time.perf_counter()
        manager = AgentLoopManager.create(config, client)
        ray.get([worker.__ray_ready__.remote() for worker in manager.agent_loop_workers])
        start_s = time.perf_counter() - began
        manager.generate_sequences(batch("async", given.workers))  # one conversation warms each worker
        rows = [measure(manager, kind, given.samples, given.calls, given.turn) for kind in KINDS]
    found = {"version": verl.__version__, "workers": given.workers, "start_s": start_s, "rows": rows}
    given.out.write_text(json.dumps(found))
    ray.shutdown()
