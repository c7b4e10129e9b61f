"""Run Python functions as tools: their signature and docstring describe them, as transformers and TRL read them.

A function that verl's ``@function_tool`` decorated carries its own schema. A result is shown to the model as text: a
string as it is, everything else as JSON. ``(text, reward)`` and ``(text, reward, metrics)`` also give a reward, as in
verl.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from typing import Any

from plaudit_reward.functions.user_file import import_user_file
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import FunctionTool, Tool
from plaudit_workers.agent_processes.sources.tool import ToolAnswer
from plaudit_workers.agent_processes.sources.user_code import run_user_code


class PythonTool:
    """Call a function, plain or async, as a tool."""

    def __init__(self, function: Callable[..., Any], description: Tool) -> None:
        self.description = description
        self._function = function

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Call the function: an async one on the event loop, a plain one in a thread."""
        return to_answer(await run_user_code(self._function, **arguments))


def load_function(source: FunctionTool) -> PythonTool:
    """Import the file and describe the function.

    Raises:
        ConfigurationError: the file or the function is missing, or its signature or docstring does not describe it.
    """
    module = import_user_file(source.path, "tool file")
    try:
        found = operator.attrgetter(source.function)(module)
    except AttributeError:
        found = None
    function = getattr(found, "fn", found)  # verl's @function_tool wraps it
    if not callable(function):
        names = sorted(name for name, item in vars(module).items() if callable(item) and not name.startswith("_"))
        raise ConfigurationError(
            f"{source.path} has no function {source.function!r}; it defines {', '.join(names) or 'none'}"
        )
    schema = _schema_of(found, function, source)
    return PythonTool(function, Tool(schema["function"]["name"], schema, source.timeout_s))


def _schema_of(found: Any, function: Callable[..., Any], source: FunctionTool) -> dict[str, Any]:
    own = getattr(found, "tool_schema", None)
    if own is not None:
        schema: dict[str, Any] = own if isinstance(own, dict) else own.model_dump(exclude_unset=True, exclude_none=True)
        return schema
    return describe(function, source.function, f"in {source.path}")


def describe(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """Return a function's description in OpenAI's format, made of its type hints and docstring.

    Raises:
        ConfigurationError: type hints or docstring do not describe it.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # transformers raises several kinds, for the docstring and for the type hints
        raise ConfigurationError(
            f"{name} {where} cannot be described to the model: {error} Give every parameter a type "
            "hint and a line under 'Args:' in a Google-style docstring"
        ) from error


def to_answer(result: Any) -> ToolAnswer:
    """Turn what a function returned into text and, where it gave one, a reward.

    Raises:
        ValueError: the reward is not finite.
    """
    if isinstance(result, tuple) and len(result) in (2, 3) and _is_number(result[1]):
        return ToolAnswer(to_text(result[0]), finite(result[1]))
    return ToolAnswer(to_text(result))


def to_text(result: Any) -> str:
    """Turn a result into the text that the model sees."""
    if isinstance(result, str):
        return result
    if hasattr(result, "text") and not isinstance(result, type):  # verl's ToolResponse
        return str(result.text or "")
    return json.dumps(result, ensure_ascii=False, default=str)


def finite(reward: float) -> float:
    """Return a tool's reward as a plain number.

    Raises:
        ValueError: it is not finite.
    """
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the tool returned the reward {number}, which is not finite")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
