"""Run tools that are classes in verl's form, listed in a YAML file in verl's format.

``create`` → ``execute`` → ``release`` run around every call, as in verl's tool agent loop. A class is instantiated
once, before the processes of samples are forked: each sample works on its own copy of the instance.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import Tool, VerlTools
from plaudit_workers.agent_processes.sources.functions import finite, to_text
from plaudit_workers.agent_processes.sources.tool import ToolAnswer
from plaudit_workers.agent_processes.sources.user_code import run_user_code


class VerlTool:
    """Call an instance of a tool class, whose ``create``, ``execute`` and ``release`` are async or plain."""

    def __init__(self, instance: Any, description: Tool) -> None:
        self.description = description
        self._instance = instance

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Create, execute, release."""
        created = await run_user_code(self._instance.create, create_kwargs=create_arguments)
        instance_id = created[0] if isinstance(created, tuple) else created
        try:
            response, reward, _ = await run_user_code(self._instance.execute, instance_id, arguments)
        finally:
            await run_user_code(self._instance.release, instance_id)
        # verl's tools return 0.0 where they have no reward to give.
        return ToolAnswer(to_text(response), finite(reward) if reward else None)


def load_verl_tools(source: VerlTools) -> list[VerlTool]:
    """Instantiate the classes of a YAML file.

    Raises:
        ConfigurationError: the file or a class cannot be used.
    """
    folder = str(Path(source.path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a class may be in a file beside the YAML file
    try:
        content = YAML(typ="safe").load(Path(source.path).read_text(encoding="utf-8"))
        entries = list(content["tools"])
    except (OSError, YAMLError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{source.path} is not a tool configuration in verl's format (tools: [{{class_name: …, config: …, "
            f"tool_schema: …}}]): {type(error).__name__}: {error}"
        ) from error
    return [_load(entry, source) for entry in entries]


def _load(entry: dict[str, Any], source: VerlTools) -> VerlTool:
    module, _, name = str(entry.get("class_name", "")).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        written = entry.get("tool_schema")
        instance = found(config=entry.get("config") or {}, tool_schema=_verls(written) if written else None)
        schema = written or instance.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        return VerlTool(instance, Tool(schema["function"]["name"], schema, source.timeout_s))
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(
            f"{source.path}: tool {entry.get('class_name')!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _verls(schema: dict[str, Any]) -> Any:
    """Return the schema as verl passes it to the class; the plain dictionary where verl is not installed."""
    try:
        from verl.tools.schemas import OpenAIFunctionToolSchema
    except ImportError:
        return schema
    return OpenAIFunctionToolSchema.model_validate(schema)
