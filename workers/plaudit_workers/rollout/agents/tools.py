"""``agent.kind: tools``: generate → run the tool calls → append their results → generate, until the policy stops.

The conversation lives here, beside the engine; the tools run in the sample's own process (``tool_process``). Token ids
are only ever appended (``chat.suffix``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from plaudit_wire.messages import Prompt
from plaudit_wire.records import CallRecord
from plaudit_wire.sample import AgentReward
from plaudit_workers.agent_processes.messages import Tool
from plaudit_workers.agent_processes.processes import AgentProcesses
from plaudit_workers.job.spec.rollout import AgentSpec
from plaudit_workers.rollout.agents.agent import AgentError, Generate, Trajectory
from plaudit_workers.rollout.agents.chat.suffix import ChatSuffix, tool_call, tool_message
from plaudit_workers.rollout.agents.chat.tool_calls import ParsedCall, ParsedTurn, ToolCallParser
from plaudit_workers.rollout.agents.tool_process import CallEnd, ToolProcess
from plaudit_workers.tokenizer import ChatTemplate

_ONE_CALL = "only the first call of a turn is run"
"""With a chat template that has no place for more."""
_CHARACTERS_OF_A_TOKEN = 8
"""Of a longer result, this many characters for each token that may stay are read."""


@dataclass(frozen=True)
class ToolLimits:
    """Hold the limits of one sample; see ``spec.rollout.agent``."""

    turns: int = 8
    turn_tokens: int | None = None
    calls_per_turn: int = 8
    calls: int = 64
    result_tokens: int = 1024
    truncate: Literal["left", "middle", "right"] = "middle"
    seconds: float = 1800.0
    fail_on_tool_failure: bool = False

    @classmethod
    def from_spec(cls, agent: AgentSpec) -> ToolLimits:
        """Read the limits of a job."""
        return cls(
            turns=agent.max_turns,
            turn_tokens=agent.max_turn_tokens,
            calls_per_turn=agent.max_calls_per_turn,
            calls=agent.max_calls,
            result_tokens=agent.max_tool_response_tokens,
            truncate=agent.truncate_tool_response,
            seconds=agent.timeout_seconds,
            # A new process would not have the state of the environment.
            fail_on_tool_failure=agent.on_tool_failure == "fail" or agent.kind == "environment",
        )


class ToolAgent:
    """Hold conversations with tools, which ``processes`` have loaded."""

    def __init__(
        self,
        template: ChatTemplate,
        parser: ToolCallParser,
        processes: AgentProcesses,
        tools: Sequence[Tool],
        limits: ToolLimits = ToolLimits(),
    ) -> None:
        self.template = template
        self.parser = parser
        self.suffix = ChatSuffix(template)
        self.processes = processes
        self.tools = {tool.name: tool for tool in tools}
        self.limits = limits

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Hold one conversation."""
        written: Any = prompt.extra_info.get("tools_kwargs") or {}
        create = {name: (of_tool or {}).get("create_kwargs") or {} for name, of_tool in dict(written).items()}
        async with ToolProcess(self.processes, self.tools, create) as process:
            conversation = self.conversation(prompt, generate, process)
            try:
                async with asyncio.timeout(self.limits.seconds):
                    await conversation.hold()
            except TimeoutError:
                reason = f"the conversation took longer than {self.limits.seconds:g} s"
                if not conversation.trajectory.response_ids:
                    raise AgentError(reason, "timeout") from None
                conversation.trajectory.failure = AgentReward("timeout", reason=reason)
            return conversation.trajectory

    def conversation(self, prompt: Prompt, generate: Generate, process: ToolProcess) -> Conversation:
        """Return a conversation that ``hold`` leads."""
        return Conversation(self, prompt, generate, process)


class Conversation:
    """Hold one sample in progress."""

    def __init__(self, agent: ToolAgent, prompt: Prompt, generate: Generate, process: ToolProcess) -> None:
        self.trajectory = Trajectory()
        self._agent = agent
        self._prompt_ids: list[int] = np.frombuffer(prompt.prompt_ids, "<i4").tolist()
        self._max_tokens = prompt.sampling.max_tokens
        self._generate = generate
        self._process = process
        self._num_calls = 0
        self._started = time.monotonic()

    async def hold(self) -> None:
        """Take turns until the policy calls no tool, or a limit is reached."""
        limits, trajectory = self._agent.limits, self.trajectory
        while True:
            turn = await self._turn()
            if not turn.calls or trajectory.finish_reason == "length" or len(trajectory.turns) >= limits.turns:
                return
            ends = await self._run(turn.calls)
            self._note(turn.calls, ends)
            results = self._results(turn.calls, ends)
            done = trajectory.failure is not None or any(end.done for end in ends)
            if done or not self._continue(turn.calls, results):
                return

    async def _sample(self) -> list[int]:
        """Let the policy write one turn; return its ids."""
        left = self._max_tokens - len(self.trajectory.response_ids)
        limit = min(left, self._agent.limits.turn_tokens or left)
        finished = await self._generate(self._prompt_ids + self.trajectory.response_ids, limit)
        self.trajectory.add_turn(finished)
        return finished.response_ids

    async def _turn(self) -> ParsedTurn:
        """Let the policy write one turn, and parse it."""
        turn = self._agent.parser.parse(self._text(await self._sample()))
        message: dict[str, Any] = {"role": "assistant", "content": turn.content}
        if turn.calls:
            message["tool_calls"] = self._written_calls(turn.calls)
        self.trajectory.messages.append(message)
        return turn

    def _text(self, ids: list[int]) -> str:
        """Decode a turn with its special tokens, which parsers look for, but without the end of the turn."""
        tokenizer = self._agent.template.tokenizer
        ended = bool(ids) and ids[-1] in tokenizer.all_special_ids
        return str(tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))

    def _written_calls(self, calls: Sequence[ParsedCall]) -> list[dict[str, Any]]:
        written = calls[: self._num_shown(calls)]
        return [tool_call(call.name, call.arguments, self._num_calls + place) for place, call in enumerate(written)]

    def _num_shown(self, calls: Sequence[ParsedCall]) -> int:
        """Return how many calls of a turn the template has a place for."""
        return len(calls) if len(calls) < 2 or self._agent.suffix.renders_parallel_calls else 1

    async def _run(self, calls: Sequence[ParsedCall]) -> list[CallEnd]:
        """Run the calls that may run; refuse the others with a message for the model."""
        shown = self._num_shown(calls)
        problems = [self._problem(call, place) if place < shown else _ONE_CALL for place, call in enumerate(calls)]
        run = iter(await self._process.call([c for c, problem in zip(calls, problems, strict=True) if not problem]))
        return [CallEnd("refused", f"Error: {problem}") if problem else next(run) for problem in problems]

    def _problem(self, call: ParsedCall, place: int) -> str:
        limits = self._agent.limits
        if call.name not in self._agent.tools:
            return f"there is no tool {call.name!r}; the tools are {', '.join(self._agent.tools)}"
        if place >= limits.calls_per_turn:
            return f"only {limits.calls_per_turn} calls are run in one turn"
        if self._num_calls + place >= limits.calls:
            return f"only {limits.calls} calls are run in one conversation"
        return call.problem

    def _note(self, calls: Sequence[ParsedCall], ends: Sequence[CallEnd]) -> None:
        """Record the calls, their rewards, and a failure that ends the sample."""
        now_s = time.monotonic() - self._started
        self.trajectory.add_calls(
            [
                CallRecord(
                    call.name if call.name in self._agent.tools else "",
                    end.outcome,
                    now_s - end.call_s,
                    end.call_s,
                    end.wait_s,
                )
                for call, end in zip(calls, ends, strict=True)
            ]
        )
        self.trajectory.tool_rewards += [end.reward for end in ends if end.reward is not None]
        if self.trajectory.tool_rewards:
            self.trajectory.reward = AgentReward("scored", sum(self.trajectory.tool_rewards))
        failed = next((end for end in ends if end.failed), None)
        if failed is not None and self._agent.limits.fail_on_tool_failure:
            outcome: Literal["timeout", "infra_error"] = "timeout" if failed.outcome == "timeout" else "infra_error"
            self.trajectory.failure = AgentReward(outcome, reason=failed.text)

    def _results(self, calls: Sequence[ParsedCall], ends: Sequence[CallEnd]) -> list[dict[str, Any]]:
        """Add the results to the messages; return them."""
        shown = self._num_shown(calls)
        texts = [self._cut(end.text) for end in ends[:shown]]
        if shown < len(calls):
            texts[-1] += f"\nError: {_ONE_CALL}"
        results = [
            tool_message(call.name, text, self._num_calls + place)
            for place, (call, text) in enumerate(zip(calls, texts, strict=False))
        ]
        self.trajectory.messages += results
        return results

    def _continue(self, calls: Sequence[ParsedCall], results: Sequence[dict[str, Any]]) -> bool:
        """Append the results' tokens; return False where no token is left for another turn."""
        written = self._written_calls(calls)
        self._num_calls += len(calls)
        return self._observe(self._agent.suffix.after_calls(written, results, self.trajectory.response_ids[-1]))

    def _observe(self, suffix: Sequence[int]) -> bool:
        """Append tokens that the policy did not choose; return False where no token is left for another turn."""
        if len(self.trajectory.response_ids) + len(suffix) >= self._max_tokens:
            self.trajectory.finish_reason = "length"
            return False
        self.trajectory.add_observation(suffix)
        return True

    def _cut(self, text: str) -> str:
        """Cut a long result to its limit of tokens."""
        limits, template = self._agent.limits, self._agent.template
        kept, decode = limits.result_tokens, template.tokenizer.decode
        if len(text) <= kept:
            return text  # a token has at least one character
        # Only the parts that can stay are tokenised: a megabyte would hold up the event loop.
        longest = kept * _CHARACTERS_OF_A_TOKEN
        if len(text) <= longest and len(template.encode(text)) <= kept:
            return text
        if limits.truncate == "left":
            return f"(truncated)...{decode(template.encode(text[-longest:])[-kept:])}"
        if limits.truncate == "right":
            return f"{decode(template.encode(text[:longest])[:kept])}...(truncated)"
        half = kept // 2
        first, last = template.encode(text[: longest // 2])[:half], template.encode(text[-(longest // 2) :])
        return f"{decode(first)}...(truncated)...{decode(last[len(last) - half :])}"
