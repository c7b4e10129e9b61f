"""Continue a conversation token by token, and parse the tool calls of the policy's turns.

The next prompt = previous ids + sampled ids + the suffix of the new messages. Nothing that the policy sampled is
tokenised again. The suffix is everything that the chat template writes after an assistant turn: the rest of its
closing, a separator, the new messages, and the opening of the next assistant turn. It is found by rendering a short
conversation in which a marker stands where the assistant's own text ends::

    render([user, assistant(marker), *new messages])  =  … marker <closing> <separator> <new messages> <opening>

and cutting behind the closing that the policy wrote itself: its end-of-turn token. The separator that follows it in
the template (often a line end) stays part of the suffix. The idea is that of TRL's ``_get_tool_suffix_ids``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.plain import PlainDataError, plain, plain_text
from plaudit_workers.tokenizer import engine_ends, turn_ends

if TYPE_CHECKING:
    from plaudit_workers.tokenizer import ChatTemplate

logger = get_logger(__name__)
REWRITES = (
    "the chat template drops the reasoning of earlier turns; training keeps every sampled token, as the policy saw it. "
    "A server that renders the whole conversation anew shows the policy a different history"
)
_MARKER = "zq7mark"
_THOUGHT = "zq7thought"
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}
_FIELD = "spec.rollout.agent.toolParser"
CallMessage = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
"""Makes an assistant's message with these calls, the marker in the last one."""


class ChatSuffix:
    """Compute suffixes for one chat template: the tokenizer's, with the job's tools."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        tokenizer = template.tokenizer
        self._ends = turn_ends(tokenizer)
        self._special = self._ends | frozenset(tokenizer.added_tokens_decoder)
        self._form = _FORMS[0]
        """The form of calls that the template rendered last, tried first."""

    def after_calls(self, calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]], last: int) -> list[int]:
        """Return the tokens between a turn that called tools and the next; raise ``ValueError`` if there are none.

        Args:
            results: the messages with role ``tool``, one for each call.
        """
        for form in sorted(_FORMS, key=lambda each: each != self._form):
            found = self._suffix(form(calls), results, last)
            if found is not None:
                self._form = form
                return found
        raise ValueError("the chat template does not render tool results")

    @functools.cached_property
    def renders_parallel_calls(self) -> bool:
        """Return True if the template has a place for several calls in one turn; gpt-oss's has none."""
        calls = [tool_call("tool", {}, number) for number in range(2)]
        results = [tool_message("tool", text, number) for number, text in enumerate(("a1b", "c2d"))]
        try:
            self.after_calls(calls, results, -1)
        except ValueError:
            return False
        return True

    def after_answer(self, messages: Sequence[dict[str, Any]], last: int) -> list[int]:
        """Return the tokens between a turn without calls and the next; raise ``ValueError`` if there are none."""
        found = self._suffix({"role": "assistant", "content": _MARKER}, messages, last)
        if found is None:
            raise ValueError("the chat template does not render messages after an assistant turn")
        return found

    def _suffix(self, assistant: dict[str, Any], messages: Sequence[dict[str, Any]], last: int) -> list[int] | None:
        try:
            ended = self._after_marker([_USER, assistant], generate=False)
            continued = self._after_marker([_USER, assistant, *messages], generate=True)
        except (TemplateError, TypeError):  # a template that wants other arguments or contents concatenates None
            return None
        if ended is None or continued is None or not _shown(messages, continued):
            return None
        ids = self._template.encode(continued)
        closing = self._closing(self._template.encode(ended), ids)
        if closing is None and not assistant["content"]:
            return None
        if closing is None:
            # Without an end-of-turn token the next message's opening ends the turn, as GLM's <|observation|>. Where the
            # template only writes another one in history, as gpt-oss <|end|> for <|return|>, it counts as written.
            ends_otherwise = (
                last in self._ends and self._template.encode(ended)[:1] == [last] and ids[0] in self._special
            )
            return ids[ids[:1] == [last] or ends_otherwise :]
        return ids[self._num_written(ids, closing, last) :]

    def _after_marker(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str | None:
        text = self._template.render(messages, generate=generate)
        _, marker, rest = text.partition(_MARKER)
        return rest if marker else None

    def _closing(self, ended: list[int], continued: list[int]) -> int | None:
        """Return the place of the template's end-of-turn token; None where it writes none."""
        places = [
            place
            for place, (own, other) in enumerate(zip(ended, continued, strict=False))
            if own == other and own in self._special
        ]
        return places[-1] if places else None

    def _num_written(self, continued: list[int], closing: int, last: int) -> int:
        """Return how many tokens of ``continued`` the policy has written itself."""
        if last in self._special and last in continued[: closing + 1]:
            return continued.index(last) + 1
        if last in self._ends:
            return closing + 1  # it ended with another token than the template writes, as Llama's eom for eot
        return closing  # it ended at a stop text: the suffix brings the end of the turn

    def check(self, tool_name: str, stop: Sequence[str] = ()) -> str:
        """Check that the template can continue a conversation; return remarks on it, or "".

        Args:
            tool_name: any tool of the job; empty: the policy's turns are answered by a user.
            stop: the job's stop texts.
        """
        try:
            if tool_name:
                self.after_calls([tool_call(tool_name, {}, 0)], [tool_message(tool_name, "a1b", 0)], -1)
            else:
                self.after_answer([{"role": "user", "content": "a1b"}], -1)
        except ValueError as error:
            raise RefusedError(
                f"model.chatTemplate: {error}, so rollout.agent cannot hold conversations with it. Name a template of "
                "the model that supports them"
            ) from error
        return self.remarks(stop)

    def remarks(self, stop: Sequence[str] = ()) -> str:
        """Return what a user should know of conversations with this template; empty if there is nothing."""
        return ". ".join(filter(None, [REWRITES if self.rewrites_history() else "", self._goes_on(stop)]))

    def _goes_on(self, stop: Sequence[str]) -> str:
        """Return a remark if the engine does not end a turn where the template ends it."""
        tokenizer = self._template.tokenizer
        messages = [_USER, {"role": "assistant", "content": _MARKER}]
        with contextlib.suppress(Exception):  # a template is a program; what it cannot render is refused elsewhere
            ended = self._template.encode(self._after_marker(messages, generate=False) or "")
            continued = self._template.encode(self._after_marker([*messages, _USER], generate=True) or "")
            closing = self._closing(ended, continued)
            end = tokenizer.decode([ended[closing]]) if closing is not None else ""
            if closing is not None and ended[closing] not in engine_ends(tokenizer) and end not in stop:
                return (
                    f"the chat template ends a turn with {end!r}, which is no end of a sequence for the model: the "
                    "policy writes on behind it. Name it in rollout.sampling.stop, or in eos_token_id of the model's "
                    "generation_config.json"
                )
        return ""

    def rewrites_history(self) -> bool:
        """Return True if the template drops the reasoning of earlier turns once another message follows.

        Some templates open a thought for the policy (``<think>``) and leave the opening out of the history.
        """
        with contextlib.suppress(TemplateError):
            opened = self._template.render([_USER], generate=True)
            if not self._template.render([_USER, _ANSWER, _USER], generate=True).startswith(opened):
                return True
        for thought in (
            {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nb"},
            {"role": "assistant", "content": "b", "reasoning_content": _THOUGHT},
        ):
            try:
                first = self._template.render([_USER, thought], generate=False)
                later = self._template.render([_USER, thought, _USER], generate=True)
            except TemplateError:
                continue
            if _THOUGHT in first and _THOUGHT not in later:
                return True
        return False


def tool_call(name: str, arguments: Any, number: int) -> dict[str, Any]:
    """Return a call as it stands in an assistant's message.

    Args:
        arguments: parsed; templates expect a dictionary.
        number: makes the id, in the nine letters and digits that Mistral's template wants.
    """
    return {"id": _call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(name: str, text: str, number: int) -> dict[str, Any]:
    """Return the message with a tool's result; see ``tool_call``."""
    return {"role": "tool", "name": name, "content": text, "tool_call_id": _call_id(number)}


def decoded_turn(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode a turn with its special tokens, which parsers look for, but without the end of the turn."""
    return str(tokenizer.decode(without_end(tokenizer, ids), skip_special_tokens=False))


def without_end(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return a turn's tokens without the one that ends it."""
    return list(ids[:-1] if ids and ids[-1] in turn_ends(tokenizer) else ids)


def _call_id(number: int) -> str:
    return f"call{number % 100_000:05d}"


def _with_calls(write: Callable[[Any], Any], content: str | None) -> CallMessage:
    def form(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        others = [_with_arguments(call, write(call["function"]["arguments"])) for call in calls[:-1]]
        marked = [*others, _with_arguments(calls[-1], write({"a": _MARKER}))]
        return {"role": "assistant", "content": content, "tool_calls": marked}

    return form


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _shown(messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Return True if the text contains the contents. Templates may strip or escape them: the longest word is enough."""

    def longest_word(content: str) -> str:
        return max("".join(c if c.isalnum() and c.isascii() else " " for c in content).split(), key=len, default="")

    return all(longest_word(str(message["content"])) in text for message in messages)


_FORMS: tuple[CallMessage, ...] = (
    _with_calls(dict, ""),
    _with_calls(json.dumps, ""),
    _with_calls(dict, None),
    _with_calls(json.dumps, None),
    # Templates that know no tool calls still render tool messages behind a plain assistant turn.
    lambda calls: {"role": "assistant", "content": _MARKER},
)
"""The forms that templates expect: arguments parsed or as JSON text, contents empty or None."""


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
        calls = [place for place, _ in _hermes_calls(text)] if _READERS.get(self._name) is _hermes_reader else []
        return _without_reasoning(text, opened=self._opened, calls=calls)


_Reader = Callable[[str], ParsedTurn]


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


def _harmony_reader(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    """Read the turns of gpt-oss, which are written in OpenAI's Harmony format.

    A turn consists of messages, each in a channel; one with a recipient calls a tool::

        <|channel|>analysis<|message|>I should look.<|end|>
        <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a"}<|call|>

    A user reads all messages without a recipient but those of the channel ``analysis``. Text in another format has no
    calls and stays as it is. vLLM's own parser of this name works only inside its server, with an encoding that is
    downloaded.
    """

    def read(text: str) -> ParsedTurn:
        content, calls = [], []
        for message in _MESSAGE.finditer(text):
            if recipient := _RECIPIENT.search(message["header"]):
                calls.append(_parsed(recipient[1], message["content"]))
            elif _HIDDEN not in message["header"]:
                content.append(message["content"])
        if not calls and not content and "<|message|>" not in text:
            return ParsedTurn(text, [])
        return ParsedTurn("\n".join(content), calls)

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


_OPENS = r"<think>|<thinking>|<seed:think>|<\|START_THINKING\|>|\[THINK\]|◁think▷"
_CLOSES = r"</think>|</thinking>|</seed:think>|<\|END_THINKING\|>|\[/THINK\]|◁/think▷"
_REASONING_TAG = re.compile(rf"(?<![\"'\\])(?:(?P<opens>{_OPENS})|{_CLOSES})")
"""Not directly behind a quote: there it is part of a call's arguments."""


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
        calls: places of calls, in which a tag is part of an argument.
    """
    tags = [tag for tag in _REASONING_TAG.finditer(text) if not any(tag.start() in place for place in calls)]
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
_BRACE = re.compile("[{}]")
_PYTHON_TAG = "<|python_tag|>"


def _hermes_reader(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    """Read calls as Hermes and Qwen write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    What is no valid call stays text, also beside valid ones: vLLM's parser of this name drops them all then. Arguments
    may be absent.
    """
    return lambda text: _turn_of(text, _hermes_calls(text))


def _llama_reader(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> _Reader:
    """Read calls as Llama 3 and 4 write them: JSON objects with ``name`` and ``parameters``, or ``arguments``.

    They stay text or are calls as in ``_hermes_reader``. Without arguments the name must be that of a tool.
    """
    known = {tool["function"]["name"] for tool in tools}
    return lambda text: _turn_of(text, _llama_calls(text, known))


def _turn_of(text: str, found: Iterable[tuple[range, ParsedCall]]) -> ParsedTurn:
    """Return a turn with these calls at their places; the rest, without what separates calls, is its content."""
    content, calls, end = [], [], 0
    for place, call in found:
        content.append(text[end : place.start])
        calls.append(call)
        end = place.stop
    content.append(text[end:])
    return ParsedTurn("".join(part for part in content if part.strip("; \n")), calls) if calls else ParsedTurn(text, [])


def _llama_calls(text: str, known: Set[str]) -> Iterator[tuple[range, ParsedCall]]:
    """Yield the calls and their places."""
    start = text.find("{")
    while start >= 0:
        try:
            value, stop = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, stop = {}, _end_of_braces(text, start)
        name = value.get("name")
        arguments = value.get("parameters", value.get("arguments"))
        if isinstance(name, str) and name and (arguments is not None or name in known):
            begin = start - len(_PYTHON_TAG) if text.endswith(_PYTHON_TAG, 0, start) else start
            yield range(begin, stop), _call(name, {} if arguments is None else arguments)
        start = text.find("{", stop)


def _end_of_braces(text: str, start: int) -> int:
    """Return the place behind the braces that begin at ``start``; the end if they are not closed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.end()
    return len(text)


def _hermes_calls(text: str) -> Iterator[tuple[range, ParsedCall]]:
    """Yield the valid calls and their places."""
    start = text.find(_BEGIN)
    while start >= 0:
        begin = _after_space(text, start + len(_BEGIN))
        try:
            value, stop = _JSON.raw_decode(text, begin)
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


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


_READERS: dict[str, Callable[[str, Any, Sequence[dict[str, Any]]], _Reader]] = {
    "hermes": _hermes_reader,
    "qwen3_json": _hermes_reader,
    "llama3_json": _llama_reader,
    "llama4_json": _llama_reader,
    "openai": _harmony_reader,
    "hf": _response_template_reader,
}
"""Names that vLLM knows too. ``openai`` and ``hf`` it reads only in its server; they know reasoning themselves."""
