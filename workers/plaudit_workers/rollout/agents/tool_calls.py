"""Read the tool calls of the policy's turns, in the formats of the model families.

What is no valid call stays text, also beside valid ones, and so do calls in reasoning.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.plain import PlainDataError, plain, plain_text

if TYPE_CHECKING:
    from plaudit_workers.tokenizer import ChatTemplate

logger = get_logger(__name__)
_USER = {"role": "user", "content": "a"}
_FIELD = "spec.rollout.agent.toolParser"


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
        opened: the chat template opens a thought for the policy (``opens_reasoning``).
    """

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[dict[str, Any]], *, opened: bool = False) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._opened = opened
        self._read = _READERS.get(name, _vllm_reader)(name, tokenizer, tools)
        try:
            self._read("")
        except NotImplementedError:
            raise RefusedError(
                f"{_FIELD}: vLLM's parser {name!r} works only inside vLLM's server; choose another, such as hermes"
            ) from None
        except Exception as error:  # parsers raise several kinds
            logger.debug("the tool parser raised on an empty text", parser=name, error=repr(error))

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> ToolCallParser:
        """Return the same parser for other tools."""
        return ToolCallParser(self._name, self._tokenizer, tools, opened=self._opened)

    def parse(self, text: str) -> ParsedTurn:
        """Split a turn into its text and its calls; what is no valid call, or stands in reasoning, stays text."""
        try:
            reasoning, rest = self._split(text)
            turn = self._read(rest)
            if not reasoning:
                return turn
            return ParsedTurn(reasoning + turn.content, turn.calls) if turn.calls else ParsedTurn(text, [])
        except Exception as error:  # the policy may write anything, and parsers raise several kinds
            logger.debug("the tool parser raised", parser=self._name, error=repr(error))
            return ParsedTurn(text, [])

    def _split(self, text: str) -> tuple[str, str]:
        if self._name in ("openai", "hf"):
            return "", text
        calls = [place for place, _ in _hermes_calls(text)] if self._name in _HERMES else []
        return _without_reasoning(text, opened=self._opened, calls=calls)


_Reader = Callable[[str], ParsedTurn]
_Found = tuple[range, ParsedCall]
"""A call, and its place in the text."""
_Find = Callable[[str, Set[str]], Iterator[_Found]]
_HERMES = ("hermes", "qwen3_json")


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


_MESSAGE = re.compile(
    r"(?P<header>[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>(?P<content>.*?)"
    r"(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+?)(?=\s|<|$)")
_HIDDEN = "<|channel|>analysis"


def _harmony_turn(text: str) -> ParsedTurn:
    """Read a turn of gpt-oss, which is written in OpenAI's Harmony format.

    A turn consists of messages, each in a channel; one with a recipient calls a tool::

        <|channel|>analysis<|message|>I should look.<|end|>
        <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a"}<|call|>

    A user reads all messages without a recipient but those of the channel ``analysis``. Text in another format has no
    calls and stays as it is. vLLM's own parser of this name works only inside its server, with an encoding that is
    downloaded.
    """
    content, calls = [], []
    for message in _MESSAGE.finditer(text):
        if recipient := _RECIPIENT.search(message["header"]):
            calls.append(_parsed(recipient[1], message["content"]))
        elif _HIDDEN not in message["header"]:
            content.append(message["content"])
    if not calls and not content and "<|message|>" not in text:
        return ParsedTurn(text, [])
    return ParsedTurn("\n".join(content), calls)


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


def _parsed(name: str, arguments: str) -> ParsedCall:
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        return ParsedCall(plain_text(name), {}, f"the arguments are not JSON: {error}")
    return _call(name, {} if value is None else value)


def _call(name: str, arguments: Any) -> ParsedCall:
    """Return a call; one whose arguments cannot travel to a tool and be stored has a problem instead of them."""
    name = plain_text(name)
    if not isinstance(arguments, dict):
        return ParsedCall(name, {}, "the arguments are not a JSON object")
    try:
        return ParsedCall(name, plain(arguments, "arguments"))
    except PlainDataError as error:
        return ParsedCall(name, {}, str(error))


_OPENS = r"<think>|<thinking>|<thought>|<reasoning>|<seed:think>|<\|START_THINKING\|>|\[THINK\]|◁think▷"
_CLOSES = r"</think>|</thinking>|</thought>|</reasoning>|</seed:think>|<\|END_THINKING\|>|\[/THINK\]|◁/think▷"
_REASONING_TAG = re.compile(rf"(?<![\"'`\\])(?:(?P<opens>{_OPENS})|{_CLOSES})")
"""Not directly behind a quote: there it is part of a call's arguments, or a sentence is about the tag."""


def opens_reasoning(template: ChatTemplate) -> bool:
    """Return True if the chat template opens a thought for the policy, so that its turns begin inside of one."""
    try:
        tags = list(_REASONING_TAG.finditer(template.render([_USER], generate=True)))
    except Exception:  # a template is a program; one that cannot render this is refused elsewhere
        return False
    return bool(tags) and tags[-1]["opens"] is not None


def _without_reasoning(text: str, *, opened: bool, calls: Sequence[range] = ()) -> tuple[str, str]:
    """Split a turn into its reasoning and the rest. A thought that is not closed goes on to the end.

    Args:
        opened: the turn begins inside a thought. So does one whose first tag closes a thought.
        calls: places of calls, in order, in which a tag is part of an argument.
    """
    begins = [place.start for place in calls]
    tags = []
    for tag in _REASONING_TAG.finditer(text):
        before = bisect_right(begins, tag.start())
        if not before or tag.start() not in calls[before - 1]:
            tags.append(tag)
    begin: int | None = 0 if opened or (tags and not tags[0]["opens"]) else None
    reasoning, rest, end = [], [], 0
    for tag in tags:
        if tag["opens"] and begin is None:
            rest.append(text[end : tag.start()])
            begin = tag.start()
        elif not tag["opens"] and begin is not None:
            end = tag.end()
            reasoning.append(text[begin:end])
            begin = None
    (rest if begin is None else reasoning).append(text[end if begin is None else begin :])
    return "".join(reasoning), "".join(rest)


_BEGIN, _END = "<tool_call>", "</tool_call>"
_JSON = json.JSONDecoder()
_PART_CHARACTERS = 4096
_LONGEST_WORD = 16
"""More than the characters of one escape or constant, which may be cut by the end of a part."""
_BRACE = re.compile("[{}]")
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = re.compile(
    r"(?:\[TOOL_CALLS\]\s*)+(?:(?=[\[{])|(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{|\[TOOL_CALLS\]|\Z))"
)
"""A list, or since the eleventh version of its tokenizer the name of a call and its arguments."""
_XLAM = re.compile(r"(?:\A|```(?:json)?|\[TOOL_CALLS\]|<tool_call>)\s*(?=\[)")
_PHI4 = re.compile(r"functools\s*(?=\[)")
_LIST_ENDS = re.compile(r"\s*\](?:\s*(?:```|</tool_call>))?")


def _own_reader(find: _Find, name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    """Read the calls that ``find`` yields, with their places; it gets the text and the names of the tools.

    What is no valid call stays text, also beside valid ones: vLLM's parsers of these names drop all calls for a broken
    one, or end a list at the first bracket of its arguments.
    """
    known = {tool["function"]["name"] for tool in tools}
    return lambda text: _turn_of(text, find(text, known))


def _turn_of(text: str, found: Iterable[_Found]) -> ParsedTurn:
    """Return a turn with these calls at their places; the rest, without what separates calls, is its content."""
    content, calls, end = [], [], 0
    for place, call in found:
        content.append(text[end : place.start])
        calls.append(call)
        end = place.stop
    content.append(text[end:])
    return (
        ParsedTurn("".join(part for part in content if part.strip(";, \n")), calls) if calls else ParsedTurn(text, [])
    )


def _llama_calls(text: str, known: Set[str]) -> Iterator[_Found]:
    """Yield calls as Llama 3 and 4 write them: JSON objects with ``name`` and ``parameters``, or ``arguments``.

    Without arguments the name must be that of a tool.
    """
    start = text.find("{")
    while start >= 0:
        value, stop = _value_at(text, start)
        if call := _object_call(value, known):
            begin = start - len(_PYTHON_TAG) if text.endswith(_PYTHON_TAG, 0, start) else start
            yield range(begin, stop), call
        start = text.find("{", stop)


def _object_call(value: Any, known: Set[str]) -> ParsedCall | None:
    """Return the call that a JSON object is; None if it has no name, or no arguments and not the name of a tool."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("parameters", value.get("arguments"))
    if arguments is None:
        return _call(name, {}) if name in known else None
    return _parsed(name, arguments) if isinstance(arguments, str) else _call(name, arguments)


def _marked_calls(opening: re.Pattern[str], text: str, known: Set[str]) -> Iterator[_Found]:
    """Yield calls as Mistral, xLAM and Phi 4 write them: a list of the objects of ``_llama_calls`` behind a mark.

    The place of the first of a list holds the mark before it.

    Args:
        opening: the mark; a group ``name`` is that of a call whose arguments follow alone.
    """
    start = 0
    while found := opening.search(text, start):
        begin, start = found.start(), found.end()
        if name := found.groupdict().get("name"):
            items = [_named_item(name, text, start)]
        else:
            items = list(_listed_items(text, start))
        for place, value in items:
            if call := _object_call(value, known):
                yield range(begin, place.stop) if place == items[0][0] else place, call
            start = place.stop


def _named_item(name: str, text: str, start: int) -> tuple[range, Any]:
    """Return the place of a call's arguments, and the call; arguments may be absent, broken ones make it None."""
    value, stop = _value_at(text, start)
    broken = value is None and stop > start
    return range(start, stop), None if broken else {"name": name, "arguments": value}


def _listed_items(text: str, start: int) -> Iterator[tuple[range, Any]]:
    """Yield the places and the values of a list, None for a broken one; the last place holds the end of the list."""
    start += text.startswith("[", start)
    while start < len(text):
        begin = _after_space(text, start, ",")
        value, stop = _value_at(text, begin)
        if stop == begin:
            return
        closing = _LIST_ENDS.match(text, stop)
        start = closing.end() if closing else stop
        yield range(begin, start), value
        if closing:
            return


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``start``, and the place behind it; raise ``ValueError``.

    An error of Python's reader counts all lines before its place: 30,000 broken calls in a turn held the rollout for
    seconds. So a part of the text is read first, in which what is broken is mostly seen.
    """
    part = text[start : start + _PART_CHARACTERS]
    try:
        value, stop = _JSON.raw_decode(part)
    except json.JSONDecodeError as error:
        may_go_on = error.msg.startswith("Unterminated") or error.pos > len(part) - _LONGEST_WORD
        if len(part) < _PART_CHARACTERS or not may_go_on:
            raise
    else:
        if stop < _PART_CHARACTERS:
            return value, start + stop
    return _JSON.raw_decode(text, start)


def _value_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``start``, None if it is broken, and the place behind it."""
    try:
        return _decoded(text, start)
    except (ValueError, RecursionError):
        return None, _end_of_braces(text, start) if text.startswith("{", start) else start


def _end_of_braces(text: str, start: int) -> int:
    """Return the place behind the braces that begin at ``start``; the end if they are not closed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.end()
    return len(text)


def _hermes_calls(text: str, _: Set[str] = frozenset()) -> Iterator[_Found]:
    """Yield calls as Hermes and Qwen write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    Arguments may be absent.
    """
    start = text.find(_BEGIN)
    while start >= 0:
        begin = _after_space(text, start + len(_BEGIN))
        try:
            value, stop = _decoded(text, begin)
        except (ValueError, RecursionError):
            value, stop = None, begin
        end = _after_space(text, stop)
        closed = text.startswith(_END, end)
        name = value.get("name") if isinstance(value, dict) else None
        if isinstance(name, str) and name and (closed or end == len(text)):
            arguments = value.get("arguments")
            stop = end + len(_END) if closed else end
            yield range(start, stop), _call(name, {} if arguments is None else arguments)
        start = text.find(_BEGIN, stop)


def _after_space(text: str, place: int, signs: str = "") -> int:
    while (sign := text[place : place + 1]).isspace() or (sign and sign in signs):
        place += 1
    return place


_READERS: dict[str, Callable[[str, Any, Sequence[dict[str, Any]]], _Reader]] = {
    **dict.fromkeys(_HERMES, partial(_own_reader, _hermes_calls)),
    **dict.fromkeys(("llama3_json", "llama4_json"), partial(_own_reader, _llama_calls)),
    "mistral": partial(_own_reader, partial(_marked_calls, _MISTRAL)),
    "xlam": partial(_own_reader, partial(_marked_calls, _XLAM)),
    "phi4_mini_json": partial(_own_reader, partial(_marked_calls, _PHI4)),
    "openai": lambda *_: _harmony_turn,
    "hf": _response_template_reader,
}
"""Names that vLLM knows too. ``openai`` and ``hf`` it reads only in its server; they know reasoning themselves."""
