"""Continue the conversations of one sample token by token, and capture what the policy sampled.

The next prompt of a continued conversation = the ids of the turn before + the tokens that the chat template writes for
the new messages. A request that continues no earlier turn is rendered anew, as a prompt without loss.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.trajectory import FinishedSample, Trajectory
from plaudit_workers.rollout.agents.agent import Generate
from plaudit_workers.rollout.agents.chat.suffix import call_id
from plaudit_workers.rollout.agents.endpoint.branches import trajectory_of
from plaudit_workers.rollout.agents.endpoint.chat_format import ChatFormat, ChatFormats
from plaudit_workers.rollout.agents.endpoint.history import (
    History,
    Turn,
    continued_turn,
    history_of,
    repeated_turn,
    tools_key,
)
from plaudit_workers.rollout.agents.endpoint.request import ChatRequest, RequestError
from plaudit_workers.rollout.engines.protocol import EngineFailedError, RequestRefusedError

_TOO_LONG = "context_length_exceeded"
_MOST_REFUSED = 16
"""Requests beyond a limit after which the program is killed."""


class LimitIgnoredError(Exception):
    """Report that a program goes on asking after its sample reached a limit."""


@dataclass(frozen=True)
class Completion:
    """Hold the answer to one request."""

    number: int
    message: dict[str, Any]
    """In OpenAI's form."""
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int


class EndpointSession:
    """Hold the conversations of one sample, of at most ``max_turns`` requests."""

    def __init__(self, prompt: Prompt, generate: Generate, chat_formats: ChatFormats, max_turns: int) -> None:
        self.sampling = prompt.sampling
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the engine breaks, or when the program ignores its limits."""
        self.replaced: set[str] = set()
        """Names of parameters in whose place the job's values were used."""
        self.at_limit = False
        """A request was refused because the sample had no turn or no token left."""
        self._generate = generate
        self._chat_formats = chat_formats
        self._max_turns = max_turns
        self._turns: dict[int, Turn] = {}
        self._num_requests = 0
        self._num_refused = 0
        self._num_calls = 0
        self._generations: set[asyncio.Task[FinishedSample]] = set()

    async def complete(self, request: ChatRequest) -> Completion:
        """Generate the next turn.

        Raises:
            RequestError: the template cannot render the messages, or a limit is reached.
            asyncio.CancelledError: the caller went away, or the sample ended.
        """
        chat_format, tools, history = (
            self._chat_formats.of(request.tools),
            tools_key(request.tools),
            history_of(request.messages),
        )
        prompt_ids, parent = self._prompt(chat_format, request, tools, history)
        limit = self._room(prompt_ids, parent)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        self.replaced.update(request.replaced)
        finished = await self._generated(prompt_ids, min(limit, request.max_tokens or limit), request.stop)
        answer, message = self._read(chat_format, request, finished)
        self._turns[number] = Turn(number, tools, history, request.messages, answer, prompt_ids, finished, parent)
        reason = "tool_calls" if message.get("tool_calls") else finished.finish_reason
        return Completion(number, message, reason, len(prompt_ids), len(finished.response_ids))

    def close(self) -> None:
        """End all requests that are being answered."""
        for generation in self._generations:
            generation.cancel()
        if self.failed.done():
            self.failed.exception()  # it was read, or is not needed any more
        self.failed.cancel()

    def trajectory(self) -> Trajectory | None:
        """Return what was captured; None without a finished turn."""
        if not self._turns:
            return None
        trajectory = trajectory_of([turn for _, turn in sorted(self._turns.items())])
        trajectory.replaced_parameters = sorted(self.replaced)
        if self.at_limit:
            trajectory.finish_reason = "length"
        return trajectory

    def _prompt(
        self, chat_format: ChatFormat, request: ChatRequest, tools: str, history: History
    ) -> tuple[list[int], Turn | None]:
        """Return the tokens to continue, and the turn that they continue."""
        turns = list(self._turns.values())
        repeated = repeated_turn(turns, tools, history)
        if repeated is not None:
            return repeated.prompt_ids, repeated.parent
        parent = continued_turn(turns, tools, history)
        if parent is not None:
            new = request.messages[len(parent.history) + 1 :]
            try:
                return parent.ids + _suffix(chat_format, parent, new), parent
            except ValueError:
                pass  # the template cannot continue with these messages: render the whole conversation
        try:
            return chat_format.template.encode(chat_format.template.render(request.messages, generate=True)), None
        except (TemplateError, TypeError, KeyError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error

    def _room(self, prompt_ids: list[int], parent: Turn | None) -> int:
        """Return the most tokens of the next turn.

        Raises:
            RequestError: no turn or no token is left.
        """
        if self._num_requests >= self._max_turns:
            raise self._limit(
                f"this sample has had its {self._max_turns} turns (spec.rollout.agent.maxTurns)", "max_turns"
            )
        used = len(prompt_ids) - parent.num_root_tokens if parent is not None else 0
        if used >= self.sampling.max_tokens:
            raise self._limit(
                f"the conversation has {used} tokens after its first prompt; spec.rollout.sampling.maxTokens allows "
                f"{self.sampling.max_tokens}",
                _TOO_LONG,
            )
        return self.sampling.max_tokens - used

    def _limit(self, message: str, code: str) -> RequestError:
        """Note that the sample has no turn left; end it if its program does not stop asking."""
        self.at_limit = True
        self._num_refused += 1
        if self._num_refused > _MOST_REFUSED and not self.failed.done():
            self.failed.set_exception(LimitIgnoredError(message))
        return RequestError(message, "messages", code)

    async def _generated(self, ids: list[int], limit: int, stop: tuple[str, ...]) -> FinishedSample:
        generation = asyncio.ensure_future(self._generate(ids, limit, stop))
        self._generations.add(generation)
        generation.add_done_callback(self._generations.discard)
        try:
            return await generation
        except RequestRefusedError as error:
            raise self._limit(str(error), _TOO_LONG) from error
        except EngineFailedError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            generation.cancel()

    def _read(
        self, chat_format: ChatFormat, request: ChatRequest, finished: FinishedSample
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the policy's message as templates render it, and in OpenAI's form."""
        text = self._chat_formats.text(finished.response_ids, request.stop)
        parsed = chat_format.parser.parse(text) if chat_format.parser is not None and request.calls_allowed else None
        if parsed is None or not parsed.calls or any(call.problem for call in parsed.calls):
            return {"role": "assistant", "content": text}, {"role": "assistant", "content": text}
        calls = [
            {
                "id": call_id(self._num_calls + place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(parsed.calls)
        ]
        self._num_calls += len(calls)
        written = [
            {**call, "function": {"name": parsed_call.name, "arguments": json.dumps(parsed_call.arguments)}}
            for call, parsed_call in zip(calls, parsed.calls, strict=True)
        ]
        return (
            {"role": "assistant", "content": parsed.content, "tool_calls": calls},
            {"role": "assistant", "content": parsed.content or None, "tool_calls": written},
        )


def _suffix(chat_format: ChatFormat, parent: Turn, messages: list[dict[str, Any]]) -> list[int]:
    last = parent.finished.response_ids[-1]
    calls = parent.answer.get("tool_calls")
    if calls:
        return chat_format.suffix.after_calls(calls, messages, last)
    return chat_format.suffix.after_answer(messages, last)
