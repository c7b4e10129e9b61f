"""A stored sample as the conversation that it was: messages, tool calls and results, with the times of each turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_metrics.sources.samples.texts import CutText, TextBudget
from plaudit_wire.records import CallOutcome, CallRecord, TurnRecord
from plaudit_wire.sample import AgentReward

Row = Mapping[str, Any]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that the policy made; its result is a later message with the role ``tool``."""

    tool: str
    arguments: CutText
    outcome: CallOutcome | None = None
    started_s: float | None = None
    """Seconds from the start of the sample."""
    call_s: float | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. Times and reward are those of the policy's turn, where they were recorded."""

    role: str
    content: CutText
    reasoning: CutText | None = None
    name: str = ""
    """Of the tool that returned a result."""
    calls: list[ToolCall] = []
    tokens: int | None = None
    started_s: float | None = None
    generate_s: float | None = None
    reward: float | None = None


class StoredAgentRewards(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of ``agent_json``: the rewards of tools and environment, or the reason that there are none."""

    tool_rewards: list[float] = []
    turn_rewards: list[float] = []
    agent_reward: AgentReward | None = None
    environment: dict[str, Any] | None = None
    failure: AgentReward | None = None


def prompt_messages(row: Row, budget: TextBudget) -> list[Message]:
    """Return the messages before the policy's first turn; the prompt's text where the data holds no messages."""
    messages = msgspec.json.decode(row.get("messages_json") or "[]")
    if not messages:
        return [Message("prompt", budget.cut(row["prompt"] or ""))]
    return [_message(message, None, None, budget) for message in messages]


def completion_messages(row: Row, budget: TextBudget) -> list[Message]:
    """Return the messages from the policy's first turn on; empty for a sample that was never generated."""
    completion = msgspec.json.decode(row.get("completion_json") or "[]")
    if not completion:
        text = row.get("response")
        return [] if text is None else [Message("assistant", budget.cut(text), tokens=row.get("response_tokens"))]
    turns = iter(msgspec.json.decode(row.get("turns_json") or "[]", type=list[TurnRecord]))
    rewards = iter(agent_of(row).turn_rewards)
    messages = []
    for message in completion:
        of_policy = message.get("role") == "assistant"
        turn, reward = (next(turns, None), next(rewards, None)) if of_policy else (None, None)
        messages.append(_message(message, turn, reward, budget))
    return messages


def agent_of(row: Row) -> StoredAgentRewards:
    """Return the rewards of a sample's tools and environment."""
    return msgspec.json.decode(row.get("agent_json") or "{}", type=StoredAgentRewards)


def _message(message: dict[str, Any], turn: TurnRecord | None, reward: float | None, budget: TextBudget) -> Message:
    calls = message.get("tool_calls") or []
    records: list[CallRecord | None] = [*turn.calls] if turn else []
    records += [None] * (len(calls) - len(records))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Message(
        role=str(message.get("role", "")),
        content=budget.cut(_text(message.get("content"))),
        reasoning=budget.cut(_text(reasoning)) if reasoning else None,
        name=str(message.get("name") or ""),
        calls=[_call(call, record, budget) for call, record in zip(calls, records, strict=False)],
        tokens=turn.tokens if turn else None,
        started_s=turn.started_s if turn else None,
        generate_s=turn.generate_s if turn else None,
        reward=reward,
    )


def _call(call: Any, record: CallRecord | None, budget: TextBudget) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else {"name": "", "arguments": call}
    return ToolCall(
        tool=str(function.get("name", "")),
        arguments=budget.cut(_text(function.get("arguments"))),
        outcome=record.outcome if record else None,
        started_s=record.started_s if record else None,
        call_s=record.call_s if record else None,
    )


def _text(content: Any) -> str:
    """Return a message's content as text: parts of other kinds than text as JSON."""
    if content is None:
        return ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
