"""Collect the turns and tool calls of a step's conversations sample by sample, with figures at the end.

verl's keys count as verl does: ``num_turns`` has one for the prompt, one for each turn of the policy and one for each
turn of tool results; ``tool_call_counts`` has the calls of a sample. Steps without conversations have none of the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plaudit_wire.records import SampleRecord, TurnRecord

MOST_TOOLS = 64
"""Tools whose calls are figures of a step; a model may invent any number of names, which count as unknown."""
_UNKNOWN = "unknown"


@dataclass
class ToolCalls:
    """Hold the calls of one tool."""

    call_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    """``call_s`` of the calls that were not refused."""
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class TurnColumns:
    """Hold the conversations of a step; arrays of shape [number of conversations]."""

    num_turns: NDArray[np.int64]
    num_calls: NDArray[np.int64]
    tools: dict[str, ToolCalls]
    """By the tool's name."""


class TurnCollector:
    """Collect the conversations of a step."""

    def __init__(self) -> None:
        self._num_turns: list[int] = []
        self._num_calls: list[int] = []
        self._tools: dict[str, ToolCalls] = {}

    def add(self, turns: Sequence[TurnRecord]) -> None:
        """Add one conversation."""
        answered = sum(bool(turn.calls) for turn in turns[:-1])
        self._num_turns.append(1 + len(turns) + answered)
        self._num_calls.append(sum(len(turn.calls) for turn in turns))
        for call in (call for turn in turns for call in turn.calls):
            tool = self._tools.setdefault(tool_name(call.tool, self._tools), ToolCalls())
            tool.call_s.append(call.call_s)
            if call.outcome != "refused":
                tool.run_s.append(call.call_s)
            tool.outcomes[call.outcome] += 1

    def columns(self) -> TurnColumns:
        """Return all conversations that were added so far."""
        return TurnColumns(
            np.array(self._num_turns, dtype=np.int64), np.array(self._num_calls, dtype=np.int64), dict(self._tools)
        )


def tool_name(name: str, known: Collection[str]) -> str:
    """Return the name under which a call is counted; rollouts leave the names empty that the policy invented."""
    return name if name in known or (name and len(known) < MOST_TOOLS) else _UNKNOWN


def turns_began(sample: SampleRecord) -> float:
    """Return when a sample's first turn began, seconds since the epoch; its last turn or call ended at publication."""
    turns = sample.generation.turns if sample.generation else []
    ends = [turn.started_s + turn.generate_s for turn in turns]
    ends += [call.started_s + call.call_s for turn in turns for call in turn.calls]
    published = sample.stamps.published or sample.stamps.committed or sample.stamps.admitted
    return published - max(ends, default=0.0)


def turn_statistics(columns: TurnColumns) -> dict[str, float]:
    """Compute verl's ``num_turns/…`` and ``tool_call_counts/…``, each with ``min``, ``max`` and ``mean``."""
    if len(columns.num_turns) == 0:
        return {}
    statistics: dict[str, float] = {}
    for name, values in (("num_turns", columns.num_turns), ("tool_call_counts", columns.num_calls)):
        statistics |= {
            f"{name}/min": float(values.min()),
            f"{name}/max": float(values.max()),
            f"{name}/mean": float(values.mean()),
        }
    return statistics
