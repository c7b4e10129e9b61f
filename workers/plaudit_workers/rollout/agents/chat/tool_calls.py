"""Parse the policy's text into tool calls with vLLM's parsers, by name (``hermes``, ``llama3_json``, …)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_workers.errors import RefusedError

logger = get_logger(__name__)

_MOST_LEVELS = 64
_TOO_DEEP = f"the arguments are nested more than {_MOST_LEVELS} levels deep"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that the policy wrote."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """The reason that it cannot be run, such as arguments that are no JSON object."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the policy."""

    content: str
    """Its text without the calls."""
    calls: list[ParsedCall]


class ToolCallParser:
    """A parser of vLLM.

    Args:
        name: of the parser, as for vLLM's ``--tool-call-parser``.
        tokenizer: the policy's.
        tools: descriptions in OpenAI's format.

    Raises:
        RefusedError: there is no such parser, or it does not suit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        try:
            found = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(ToolParserManager.list_registered())
            raise RefusedError(f"spec.rollout.agent.toolParser: vLLM has no parser {name!r}; it has {known}") from error
        params = [ChatCompletionToolsParam(**tool) for tool in tools]
        try:
            self._parser = found(tokenizer, params)
        except Exception as error:  # parsers look for their tokens and raise several kinds
            raise RefusedError(
                f"spec.rollout.agent.toolParser: {name!r} does not suit the model's tokenizer: {error}"
            ) from error
        self._request = ChatCompletionRequest(
            model="", messages=[{"role": "user", "content": ""}], tools=params or None
        )

    def parse(self, text: str) -> ParsedTurn:
        """Split a turn into its text and its calls; text that is no valid call stays text."""
        try:
            extracted = self._parser.extract_tool_calls(text, self._request)
        except Exception as error:  # the policy may write anything, and parsers raise several kinds
            logger.debug("the tool parser raised", parser=type(self._parser).__name__, error=repr(error))
            return ParsedTurn(text, [])
        if not extracted.tools_called:
            return ParsedTurn(text, [])
        calls = [_parsed(call.function.name, call.function.arguments) for call in extracted.tool_calls]
        return ParsedTurn(extracted.content or "", calls)


def _parsed(name: str, arguments: str) -> ParsedCall:
    name = name.encode(errors="replace").decode()
    try:
        value = json.loads(arguments) if arguments else {}
    except RecursionError:
        return ParsedCall(name, {}, _TOO_DEEP)
    except ValueError as error:
        return ParsedCall(name, {}, f"the arguments are not JSON: {error}")
    if not isinstance(value, dict):
        return ParsedCall(name, {}, "the arguments are not a JSON object")
    problem = _problem(value)
    return ParsedCall(name, {} if problem else value, problem)


def _problem(arguments: dict[str, Any]) -> str:
    """Return why the arguments cannot travel to a tool and be stored with the sample; empty if they can."""
    if _depth(arguments) > _MOST_LEVELS:
        return _TOO_DEEP
    try:
        msgspec.msgpack.encode(arguments)
    except OverflowError:
        return "the arguments hold an integer of more than 64 bits"
    except UnicodeEncodeError:
        return "the arguments hold half of a surrogate pair"
    return ""


def _depth(value: Any) -> int:
    """Return how deeply objects and lists are nested."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]
    return depth
