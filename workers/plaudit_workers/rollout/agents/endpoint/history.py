"""Find the turn that a request continues, by comparing its messages with those of earlier turns.

Clients send a conversation back in their own form: without empty fields, with trimmed text, with arguments of calls
formatted anew. Two messages are the same if their keys are; the tokens are always those of the earlier turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plaudit_workers.agent_processes.trajectory import FinishedSample

History = tuple[str, ...]
"""The keys of messages, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Hold one response of the policy and the request that it answers."""

    number: int
    """Of the request in its sample."""
    tools: str
    """Key of the request's tools: another list of tools is another prompt."""
    history: History
    """The request's messages."""
    messages: list[dict[str, Any]]
    """The same as chat messages."""
    answer: dict[str, Any]
    """The policy's message."""
    prompt_ids: list[int]
    """Everything before the response, earlier turns included."""
    finished: FinishedSample
    parent: Turn | None
    """The turn that it continues; None: its prompt was rendered from its messages alone."""

    @property
    def ids(self) -> list[int]:
        """Return prompt and response together."""
        return self.prompt_ids + self.finished.response_ids

    @property
    def num_root_tokens(self) -> int:
        """Return the tokens of the prompt with which its conversation began."""
        return len(self.prompt_ids) if self.parent is None else self.parent.num_root_tokens


def message_key(message: dict[str, Any]) -> str:
    """Return a text that is the same for two forms of a message."""
    calls = [
        [call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)]
        for call in message.get("tool_calls") or []
    ]
    return json.dumps([message["role"], message["content"].strip(), calls, message.get("tool_call_id")])


def history_of(messages: Sequence[dict[str, Any]]) -> History:
    """Return the keys of messages."""
    return tuple(message_key(message) for message in messages)


def tools_key(tools: Sequence[dict[str, Any]]) -> str:
    """Return the key of a list of tools."""
    return json.dumps(list(tools), sort_keys=True)


def continued_turn(turns: Sequence[Turn], tools: str, history: History) -> Turn | None:
    """Return the turn whose history and answer are the longest beginning of ``history``; the newest among several."""
    found: Turn | None = None
    for turn in turns:
        length = len(turn.history)
        if (
            turn.tools == tools
            and length + 1 < len(history)
            and (found is None or length >= len(found.history))
            and history[:length] == turn.history
            and history[length] == message_key(turn.answer)
        ):
            found = turn
    return found


def repeated_turn(turns: Sequence[Turn], tools: str, history: History) -> Turn | None:
    """Return a turn that answered the same messages."""
    return next((turn for turn in turns if turn.tools == tools and turn.history == history), None)
