"""Define a loaded tool. Made by the modules beside this one, called in the processes of samples."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from plaudit_workers.agent_processes.messages import Tool


class ToolAnswer(NamedTuple):
    """Hold the result of one call."""

    text: str
    """The text that the model sees."""
    reward: float | None = None
    done: bool = False
    """The environment ended the episode."""


class LoadedTool(Protocol):
    """Call a tool that is loaded."""

    description: Tool

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Call it; whatever it raises is reported to the model.

        Args:
            create_arguments: of ``create`` of verl's tools, from the data row; others ignore them.
        """
        ...
