"""Describe the tools of a sample's own machine to the model: ``{sandbox: bash}``, ``session`` and ``files``.

They run in the machine, and not in a sample's process (``rollout.agents.machine_tools``).
"""

from __future__ import annotations

from typing import Any, Final

from plaudit_job.spec.rollout import AgentSpec
from plaudit_workers.agents.messages import Tool


def _schema(name: str, description: str, required: dict[str, str], **optional: str) -> dict[str, Any]:
    """Return a tool in OpenAI's format; optional parameters are integers."""
    texts = {key: {"type": "string", "description": meaning} for key, meaning in required.items()}
    numbers = {key: {"type": "integer", "description": meaning} for key, meaning in optional.items()}
    parameters = {"type": "object", "properties": texts | numbers, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_PATH = {"path": "Path of the file; a relative one begins in the working folder"}
SANDBOX_TOOLS: Final[dict[str, list[dict[str, Any]]]] = {
    "bash": [
        _schema(
            "bash",
            "Run a command in the shell of your machine and read its output. Files and the working folder stay for the "
            "next call; variables and processes in the background do not.",
            {"command": "The command"},
        )
    ],
    "session": [
        _schema(
            "bash",
            "Run a command in the shell of your machine and read its output. Files, the working folder, variables, "
            "functions and processes in the background stay for the next call.",
            {"command": "The command"},
        )
    ],
    "files": [
        _schema(
            "read_file",
            "Read a file of your machine.",
            _PATH,
            first_line="Number of the first line to read, from 1",
            num_lines="Number of lines to read",
        ),
        _schema(
            "write_file",
            "Write a file of your machine, in place of what it held.",
            _PATH | {"content": "The whole new content"},
        ),
        _schema(
            "edit_file",
            "Replace a text that a file of your machine holds exactly once.",
            _PATH | {"old": "The text to replace", "new": "The text to put in its place"},
        ),
    ],
}
"""The tools of each value of ``ToolSpec.sandbox``, in OpenAI's format."""


def sandbox_tools(agent: AgentSpec) -> list[Tool]:
    """Return the tools of the samples' machines that an agent may call, in the job's order."""
    return [
        Tool.of(schema, tool.timeout_seconds)
        for tool in agent.tools
        for schema in SANDBOX_TOOLS.get(tool.sandbox, [])
        if agent.kind in ("tools", "environment")
    ]
