"""``agent.kind: environment``: the policy acts in a user's environment until it ends the episode.

The environment runs in the sample's process (``tool_process``); the conversation lives here, beside the engine, as for
tools. The policy acts by tool calls (TRL, OpenEnv, NeMo Gym) or by the text of its turns (SkyRL). verl's agent loops,
which hold the conversation themselves, run as ``custom`` agents do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from plaudit_wire.messages import Prompt
from plaudit_wire.records import CallOutcome, CallRecord
from plaudit_wire.sample import AgentReward
from plaudit_workers.agent_processes.messages import EnvironmentReply
from plaudit_workers.rollout.agents.agent import AgentError, Generate
from plaudit_workers.rollout.agents.chat.tool_calls import ParsedCall
from plaudit_workers.rollout.agents.tool_process import CallEnd, ToolProcess
from plaudit_workers.rollout.agents.tools import Conversation, ToolAgent

_CALLS: dict[str, CallOutcome] = {"ok": "ok", "data_error": "error", "timeout": "timeout", "infra_error": "killed"}
_RESETS_AFTER_DEATH = 2


class EnvironmentAgent(ToolAgent):
    """Run episodes.

    Args:
        reads_text: each turn of the policy is an action; otherwise it acts by tool calls.
        step_limit_s: seconds of one call of the environment.
    """

    def __init__(self, *agent: Any, reads_text: bool, step_limit_s: float) -> None:
        super().__init__(*agent)
        self.reads_text = reads_text
        self.step_limit_s = step_limit_s

    def conversation(self, prompt: Prompt, generate: Generate, process: ToolProcess) -> Conversation:
        """Return an episode."""
        return _Episode(self, prompt, generate, process)


class _Episode(Conversation):
    """Hold one sample in progress."""

    def __init__(self, agent: EnvironmentAgent, prompt: Prompt, generate: Generate, process: ToolProcess) -> None:
        super().__init__(agent, prompt, generate, process)
        self._environment = agent
        self._prompt = prompt

    async def hold(self) -> None:
        """Reset the environment, act until the episode ends, ask for the reward."""
        reset = await self._reset()
        if reset.outcome != "ok":
            outcome = "data_error" if reset.outcome == "skipped" else reset.outcome
            raise AgentError(f"the environment cannot be reset: {reset.reason}", outcome)
        if reset.messages is not None:
            self._begin(reset.messages)
        await (self._act() if self._environment.reads_text else super().hold())
        if self.trajectory.failure is None:
            await self._finish()

    async def _reset(self) -> EnvironmentReply:
        """Reset the environment, in a new process where the last one died; a server is asked again in the process."""
        limit_s = self._environment.step_limit_s
        reply = await self._process.ask("reset", limit_s, prompt=self._prompt)
        for _ in range(_RESETS_AFTER_DEATH):
            if reply.outcome != "infra_error" or not self._process.died:
                break
            reply = await self._process.ask("reset", limit_s, prompt=self._prompt)
        return reply

    def _begin(self, messages: list[dict[str, Any]]) -> None:
        """Replace the prompt by the one that the environment wrote."""
        template = self._agent.template
        self._prompt_ids = template.encode(template.render(messages, generate=True))
        self.trajectory.prompt_ids, self.trajectory.prompt_messages = list(self._prompt_ids), messages

    async def _act(self) -> None:
        """Pass each turn's text to the environment."""
        trajectory, decode = self.trajectory, self._agent.template.tokenizer.decode
        while True:
            action = str(decode(await self._sample(), skip_special_tokens=True))
            trajectory.messages.append({"role": "assistant", "content": action})
            reply = await self._step(action)
            if reply.outcome != "ok":
                outcome = "data_error" if reply.outcome == "skipped" else reply.outcome
                trajectory.failure = AgentReward(outcome, reason=reply.reason)
                return
            self._add_reward(reply.reward)
            messages = reply.messages or []
            trajectory.messages += messages
            if reply.done or not messages or len(trajectory.turns) >= self._agent.limits.turns:
                return
            if not self._observe(self._agent.suffix.after_answer(messages, trajectory.response_ids[-1])):
                return

    async def _step(self, action: str) -> EnvironmentReply:
        began = time.monotonic()
        reply = await self._process.ask("step", self._environment.step_limit_s, action=action)
        seconds = time.monotonic() - began
        self.trajectory.add_calls([CallRecord("step", _CALLS[reply.outcome], began - self._started, seconds)])
        return reply

    def _note(self, calls: Sequence[ParsedCall], ends: Sequence[CallEnd]) -> None:
        super()._note(calls, ends)
        self.trajectory.turn_rewards.append(sum(end.reward for end in ends if end.reward is not None))

    def _add_reward(self, reward: float | None) -> None:
        """Add the reward of the newest turn; earlier turns without one have 0, so that each keeps its position."""
        if reward is not None:
            without = len(self.trajectory.turns) - 1 - len(self.trajectory.turn_rewards)
            self.trajectory.turn_rewards += [0.0] * without + [reward]
            self.trajectory.reward = AgentReward("scored", sum(self.trajectory.turn_rewards))

    async def _finish(self) -> None:
        """End the episode; its reward, where it has one, replaces the sum of the steps' rewards."""
        completion = self.trajectory.messages
        reply = await self._process.ask("finish", self._environment.step_limit_s, completion=completion)
        self.trajectory.environment = reply.attributes
        if reply.outcome != "ok":
            self.trajectory.reward = AgentReward(reply.outcome, reason=reply.reason)
        elif reply.reward is not None:
            self.trajectory.reward = AgentReward("scored", reply.reward)
