"""Parse the policy's text into tool calls, by the name of a parser (``hermes``, ``llama3_json``, …)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.rollout.agents.chat import harmony

logger = get_logger(__name__)

_MOST_LEVELS = 64
_TOO_DEEP = f"the arguments are nested more than {_MOST_LEVELS} levels deep"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """Hold a tool call that the policy wrote."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """The reason that it cannot be run, such as arguments that are no JSON object."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Hold a turn of the policy."""

    content: str
    """Its text without the calls."""
    calls: list[ParsedCall]


class ToolCallParser:
    """Parse tool calls as one of vLLM's parsers, gpt-oss's format, or the tokenizer's own description of its responses.

    Args:
        name: as for vLLM's ``--tool-call-parser``.
        tools: descriptions in OpenAI's format.

    Raises:
        RefusedError: there is no such parser, or it does not suit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        self._name = name
        self._read = _READERS.get(name, _vllm_reader)(name, tokenizer, tools)
        try:
            self._read("")
        except NotImplementedError:
            raise RefusedError(
                f"{_FIELD}: vLLM's parser {name!r} works only inside vLLM's server; choose another, such as hermes"
            ) from None
        except Exception as error:  # parsers raise several kinds
            logger.debug("the tool parser raised on an empty text", parser=name, error=repr(error))

    def parse(self, text: str) -> ParsedTurn:
        """Split a turn into its text and its calls; text that is no valid call stays text."""
        try:
            return self._read(text)
        except Exception as error:  # the policy may write anything, and parsers raise several kinds
            logger.debug("the tool parser raised", parser=self._name, error=repr(error))
            return ParsedTurn(text, [])


_Reader = Callable[[str], ParsedTurn]
_FIELD = "spec.rollout.agent.toolParser"


def _vllm_reader(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    # They log a traceback for every turn that is no valid call, which a policy in training may write each time.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        found = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(ToolParserManager.list_registered())
        raise RefusedError(f"{_FIELD}: vLLM has no parser {name!r}; it has {known}") from error
    params = [ChatCompletionToolsParam(**tool) for tool in tools]
    try:
        parser = found(tokenizer, params)
    except Exception as error:  # parsers look for their tokens and raise several kinds
        raise RefusedError(f"{_FIELD}: {name!r} does not suit the model's tokenizer: {error}") from error
    request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], tools=params or None)

    def read(text: str) -> ParsedTurn:
        extracted = parser.extract_tool_calls(text, request)
        if not extracted.tools_called:
            return ParsedTurn(text, [])
        calls = [_parsed(call.function.name, call.function.arguments) for call in extracted.tool_calls]
        return ParsedTurn(extracted.content or "", calls)

    return read


def _harmony_reader(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    def read(text: str) -> ParsedTurn:
        content, calls = harmony.parse_harmony(text)
        return ParsedTurn(content, [_parsed(*call) for call in calls])

    return read


def _response_template_reader(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    """Read turns with ``tokenizer.parse_response`` of transformers."""
    if getattr(tokenizer, "response_template", None) is None:
        raise RefusedError(
            f"{_FIELD}: {name!r} needs a response_template in the tokenizer's configuration. Name a parser of vLLM"
        )
    question = [{"role": "user", "content": "a"}]
    # The beginning of a turn that the chat template writes itself, such as <think>, is part of what is parsed.
    prefix = tokenizer.apply_chat_template(
        question, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )

    def read(text: str) -> ParsedTurn:
        message = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) or None)
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = [_parsed(str(function["name"]), json.dumps(function["arguments"])) for function in functions]
        return ParsedTurn(message.get("content") or "", calls) if calls else ParsedTurn(text, [])

    return read


_READERS: dict[str, Callable[[str, Any, Sequence[dict[str, Any]]], _Reader]] = {
    harmony.NAME: _harmony_reader,
    "hf": _response_template_reader,
}
"""Names that vLLM knows too, but reads only in its server."""


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
