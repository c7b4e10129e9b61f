"""Run users' Python functions as tools, and call users' code.

A function's signature and docstring describe it, as transformers and TRL read them; one that verl's ``@function_tool``
decorated carries its own schema. The model reads a text as it is and everything else as JSON. ``(text, reward)`` and
``(text, reward, metrics)`` also give a reward, as in verl.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import operator
import os
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from plaudit_reward.functions.function import import_user_file
from plaudit_sandbox.lifetime import end_if_forked
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.plain import error_text, plain, plain_text
from plaudit_workers.agents.messages import FunctionTool, Tool

MOST_CHARACTERS = 1 << 20
"""Longer texts are cut here; the agent's own limit is far below."""
Result = TypeVar("Result")


class ToolAnswer(NamedTuple):
    """Hold the result of one call."""

    text: str
    """The text that the model sees."""
    reward: float | None = None
    done: bool = False
    """The environment ended the episode."""


class LoadedTool(NamedTuple):
    """Hold a tool that the processes of samples call."""

    description: Tool
    call: Callable[[dict[str, Any], dict[str, Any]], Awaitable[ToolAnswer]]
    """Takes the call's arguments, and from the data row those of ``create`` of verl's tools, which others ignore.
    Whatever it raises is reported to the model."""


def load_function(source: FunctionTool) -> LoadedTool:
    """Import the file and describe the function."""
    module = import_user_file(source.path, "tool file")
    found = attribute_of(module, source.function)
    function = getattr(found, "fn", found)  # verl's @function_tool wraps it
    if not callable(function):
        names = sorted(name for name, item in vars(module).items() if callable(item) and not name.startswith("_"))
        raise ConfigurationError(
            f"{source.path} has no function {source.function!r}; it defines {', '.join(names) or 'none'}"
        )
    own = getattr(found, "tool_schema", None)
    schema = describe(function, source.function, f"in {source.path}") if own is None else plain_schema(own)

    async def call(arguments: dict[str, Any], _: dict[str, Any]) -> ToolAnswer:
        return to_answer(await run_user_code(function, **arguments))

    return LoadedTool(Tool.of(schema, source.timeout_s), call)


def attribute_of(module: ModuleType, name: str) -> Any:
    """Return what a module has under a dotted name; None if it has nothing."""
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None


def describe(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """Return a function's description in OpenAI's format, made of its type hints and docstring."""
    from transformers.utils import chat_template_utils

    # It would import torch (2 s, 450 MB) for hints of torch.Tensor, which a function has only if torch is imported.
    vars(chat_template_utils)["is_torch_available"] = lambda: "torch" in sys.modules
    try:
        return dict(chat_template_utils.get_json_schema(function))
    except Exception as error:  # transformers raises several kinds, for the docstring and for the type hints
        raise ConfigurationError(
            f"{name} {where} cannot be described to the model: {error} Give every parameter a type "
            "hint and a line under 'Args:' in a Google-style docstring"
        ) from error


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a tool in OpenAI's format."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def plain_schema(schema: Any) -> dict[str, Any]:
    """Return a schema of verl's, a dictionary or a pydantic model, as a dictionary."""
    return schema if isinstance(schema, dict) else dict(schema.model_dump(exclude_unset=True, exclude_none=True))


def to_answer(result: Any) -> ToolAnswer:
    """Turn what a function returned into text and, where it gave one, a reward, which must be finite."""
    if isinstance(result, tuple) and len(result) in (2, 3):
        reward = result[1]
        if isinstance(reward, int | float) and not isinstance(reward, bool):
            return ToolAnswer(to_text(result[0]), finite(reward))
    return ToolAnswer(to_text(result))


def to_text(result: Any) -> str:
    """Turn a result into the text that the model sees."""
    if isinstance(result, str):
        return result
    if hasattr(result, "text") and not isinstance(result, type):  # verl's ToolResponse
        return str(result.text or "")
    return json.dumps(result, ensure_ascii=False, default=str)


def finite(reward: float) -> float:
    """Return a tool's reward as a plain number; raise ``ValueError`` if it is not finite."""
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the tool returned the reward {number}, which is not finite")
    return number


async def run_user_code(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a plain function in a thread, an async one on the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)

    def called() -> tuple[Any, BaseException | None]:
        try:
            result = function(*arguments, **named)
            end_if_forked()
            return result, None
        except BaseException as error:  # the user's code: sys.exit and the like included
            end_if_forked(error)
            return None, error  # not raised: with a StopIteration, a future of asyncio would never end

    result, error = await asyncio.to_thread(called)
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result


def first_cause(error: BaseException) -> str:
    """Return the text of the first cause in a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ConfigurationError) else error_text(error, MOST_CHARACTERS)


def cut_text(text: str) -> str:
    """Return the beginning of a text, which may be of a subclass of the user's, as plain data."""
    return plain_text(str.__getitem__(text, slice(MOST_CHARACTERS)))


def in_fork(function: Callable[[], Result]) -> Result:
    """Return what a function returned in a fork, as plain data; raise ``ConfigurationError`` if it failed.

    A fork may open connections and threads: the template, which forks, must not have any.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        with contextlib.suppress(BaseException), os.fdopen(write_end, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(_outcome(function)))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    result, problem = msgspec.msgpack.decode(data) if data else (None, "its process ended")
    if problem:
        raise ConfigurationError(problem)
    return cast(Result, result)


def _outcome(function: Callable[[], Result]) -> tuple[Result | None, str]:
    try:
        return plain(function()), ""
    except ConfigurationError as error:
        return None, str(error)
    except BaseException as error:  # the user's code, or a client's group of exceptions
        return None, first_cause(error)
