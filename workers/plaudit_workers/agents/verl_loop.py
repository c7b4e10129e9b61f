"""Run agent loops in verl's form (``AgentLoopBase``): ``run(sampling_params, **row)`` holds a whole conversation.

The loop tokenises itself and calls ``server_manager.generate(prompt_ids=…)``, which asks the rollout's engine. What it
returns is compared with what the engine saw: tokens that it marks as the policy's must be those that were sampled, each
behind the prompt that it was sampled from.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from plaudit_wire.messages import Prompt
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.environment import AttributeDict, columns_of
from plaudit_workers.agents.messages import EnvironmentClass, FinishedSample, Trajectory, prompt_messages, prompt_tokens

SampledTurn = tuple[list[int], FinishedSample]
"""The prompt of a turn, and what was sampled."""


class VerlAgentLoop:
    """Run an agent loop, one instance a sample, as verl's workers do.

    Args:
        source: ``arguments`` are further keyword arguments of the class, as in verl's ``agent_loop_config_path``.
    """

    def __init__(self, found: Callable[..., Any], source: EnvironmentClass) -> None:
        from transformers import AutoConfig

        from plaudit_job.spec.algorithm import ModelSpec
        from plaudit_workers.tokenizer import load_tokenizer

        self._class = found
        self._source = source
        self._model = ModelSpec.model_validate(source.model)
        self._tokenizer = load_tokenizer(self._model)
        model = self._model
        config = AutoConfig.from_pretrained(
            model.source, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        self._model_type = str(config.model_type)

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        """Run the loop on one prompt; raise ``ValueError`` if it marks tokens that were not sampled there."""
        server = _ServerManager(prompt, generate)
        data = AttributeDict(apply_chat_template_kwargs=dict(self._model.chat_template_arguments))
        loop = self._class(
            trainer_config=SimpleNamespace(config=self._config(prompt, data)),
            server_manager=server,
            tokenizer=self._tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=SimpleNamespace(config=data),
            hf_model_type=self._model_type,
            **self._source.arguments,
        )
        output = await loop.run(dict(server.sampling), **_row(prompt))
        return _trajectory(prompt, output, server.turns)

    def _config(self, prompt: Prompt, data: AttributeDict) -> AttributeDict:
        """Return the part of verl's configuration that agent loops read, with verl's defaults."""
        multi_turn = {
            "max_assistant_turns": self._source.max_turns,
            "max_user_turns": None,
            "max_parallel_calls": 1,
            "max_tool_response_length": 256,
            "tool_response_truncate_side": "middle",
            "format": "hermes",
        }
        rollout = {
            "prompt_length": 1 << 20,  # the engine's model length limits prompts
            "response_length": prompt.sampling.max_tokens,
            "multi_turn": multi_turn,
            "full_determinism": False,
        }
        return AttributeDict({"actor_rollout_ref": {"rollout": rollout}, "data": data})


class _ServerManager:
    """Stand in for ``server_manager`` of verl's agent loops, with its ``generate``."""

    def __init__(self, prompt: Prompt, generate: Any) -> None:
        sampling = prompt.sampling
        self.sampling: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        self.turns: list[SampledTurn] = []
        self._max_tokens = sampling.max_tokens
        self._generate = generate

    async def generate(
        self, request_id: str = "", *, prompt_ids: Sequence[int], sampling_params: dict[str, Any], **_: Any
    ) -> SimpleNamespace:
        """Sample a turn; raise ``ValueError`` if another distribution is asked for than the run's."""
        wanted = {**sampling_params}
        limit = wanted.pop("max_tokens", None) or wanted.pop("max_new_tokens", None) or self._max_tokens
        if changed := {k: v for k, v in wanted.items() if v is not None and v != self.sampling.get(k)}:
            raise ValueError(
                f"an agent loop cannot change the sampling of a run ({changed}); see spec.rollout.sampling"
            )
        ids = [int(token) for token in prompt_ids]
        first = len(self.turns[0][0]) if self.turns else len(ids)
        left = self._max_tokens - max(0, len(ids) - first)
        turn: FinishedSample = await self._generate(ids, max(1, min(int(limit), left)))
        self.turns.append((ids, turn))
        return SimpleNamespace(
            token_ids=list(turn.response_ids),
            log_probs=list(turn.logprobs),
            routed_experts=None,
            stop_reason="completed",
            num_preempted=turn.num_preempted,
            extra_fields={},
        )


def _trajectory(prompt: Prompt, output: Any, turns: Sequence[SampledTurn]) -> Trajectory:
    prompt_ids = [int(token) for token in output.prompt_ids]
    trajectory = _joined(prompt_ids, [int(t) for t in output.response_ids], list(output.response_mask), turns)
    if prompt_ids != prompt_tokens(prompt):
        trajectory.prompt_ids = prompt_ids
    extra = getattr(output, "extra_fields", None) or {}
    trajectory.turn_rewards = [float(score) for score in extra.get("turn_scores") or []]
    trajectory.tool_rewards = [float(reward) for reward in extra.get("tool_rewards") or [] if reward is not None]
    if (reward := getattr(output, "reward_score", None)) is not None:
        trajectory.reward = AgentReward("scored", float(reward))
    return trajectory


def _joined(
    prompt_ids: list[int], response_ids: list[int], mask: Sequence[int], turns: Sequence[SampledTurn]
) -> Trajectory:
    """Join the turns to a trajectory with their log-probabilities and versions.

    Args:
        prompt_ids: [P] as the loop returned them.
        response_ids: [T] likewise; a turn may be cut.
        mask: [T] 1 for tokens of the policy.
        turns: what was sampled; turns that the loop discarded are ignored.
    """
    trajectory, position = Trajectory(), 0
    while position < len(response_ids):
        if not mask[position]:
            end = next((place for place in range(position, len(mask)) if mask[place]), len(response_ids))
            trajectory.add_observation(response_ids[position:end])
            position = end
            continue
        before = prompt_ids + response_ids[:position]
        rest = response_ids[position:], mask[position:]
        counts = [(_num_kept(turn.response_ids, *rest), turn) for prompt, turn in turns if prompt == before]
        count, turn = max(counts, key=lambda each: each[0], default=(0, None))
        if turn is None or not count:
            raise ValueError(
                f"response_mask is 1 at token {position} of the response, but the policy did not sample this token "
                "from the tokens before it: mark only what server_manager.generate returned, unchanged and in place"
            )
        trajectory.add_turn(_cut(turn, count))
        position += count
    return trajectory


def _num_kept(sampled: Sequence[int], kept: Sequence[int], mask: Sequence[int]) -> int:
    """Return how many tokens of a turn stand at the beginning of what is left, marked as the policy's."""
    places = zip(sampled, kept, mask, strict=False)
    return sum(1 for _ in takewhile(lambda place: place[0] == place[1] and place[2], places))


def _cut(turn: FinishedSample, count: int) -> FinishedSample:
    if count == len(turn.response_ids):
        return turn
    spans = [span for span in turn.version_spans if span[0] < count]
    ids, logprobs = turn.response_ids[:count], turn.logprobs[:count]
    return replace(turn, response_ids=ids, logprobs=logprobs, version_spans=spans, finish_reason="length")


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return the columns that verl passes to ``run``."""
    info = prompt.extra_info
    return {
        **{name: value for name, value in columns_of(prompt).items() if name not in ("prompt", "solution", "answer")},
        "raw_prompt": prompt_messages(prompt),
        "reward_model": {"ground_truth": prompt.ground_truth},
        "tools_kwargs": info.get("tools_kwargs") or {},
        "interaction_kwargs": info.get("interaction_kwargs") or {},
        "index": info.get("index", 0),
        "uid": uuid.uuid5(uuid.NAMESPACE_OID, prompt.group).hex,
    }
