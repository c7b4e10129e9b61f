"""Continue the conversations of one sample token by token, and capture what the policy sampled.

A request of OpenAI's Chat Completions API is parsed, and its messages are compared with those of earlier turns. The
next prompt of a continued conversation = the ids of the turn before + the tokens that the chat template writes for the
new messages. A request that continues no earlier turn is rendered anew, as a prompt without loss.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

from transformers import PreTrainedTokenizerBase

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt, Sampling
from plaudit_wire.plain import PlainDataError, plain
from plaudit_wire.printable import shown
from plaudit_workers.agents.messages import FinishedSample, Trajectory
from plaudit_workers.rollout.agents.agent import Generate
from plaudit_workers.rollout.agents.chat import ChatSuffix, decoded_turn, tool_call
from plaudit_workers.rollout.agents.tool_calls import ToolCallParser, opens_reasoning
from plaudit_workers.rollout.engine import Chat, EngineFailedError, RequestRefusedError
from plaudit_workers.tokenizer import ChatTemplate

logger = get_logger(__name__)
Given = ParamSpec("Given")
Result = TypeVar("Result")
History = tuple[str, ...]
"""The keys of messages, in order."""
_MOST_KEPT = 64
"""Chat formats."""
_MOST_REFUSED = 16
"""Requests beyond a limit after which the program is killed."""
_LARGE_BYTES = 64 << 10
_BODIES_AT_ONCE_BYTES = 16 << 20
"""Of one sample's requests in work: the rollout holds a body, and several times as much of what was read from it."""
_TOO_LONG = "context_length_exceeded"
_USED = ("messages", "model", "tools", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options")
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "extra_body")
_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "modalities": ["text"],
    "response_format": {"type": "text"},
}
"""Values that ask for nothing in particular."""
_REFUSED = {
    "n": "gives one choice a request: make several requests",
    "logit_bias": "changes the policy's distribution, which training could not reproduce",
    "frequency_penalty": "changes the policy's distribution, which training could not reproduce",
    "presence_penalty": "changes the policy's distribution, which training could not reproduce",
    "functions": "is the older form of 'tools', which this server reads",
    "function_call": "is the older form of 'tool_choice', which this server reads",
    "modalities": "can only be text",
    "audio": "can only be text",
}


class LimitIgnoredError(Exception):
    """Report that a program goes on asking after its sample reached a limit."""


@dataclass(frozen=True)
class Completion:
    """Hold the answer to one request."""

    number: int
    message: dict[str, Any]
    """In OpenAI's form."""
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int


class EndpointSession:
    """Hold the conversations of one sample, of at most ``max_turns`` requests."""

    def __init__(self, prompt: Prompt, generate: Generate, chat_formats: ChatFormats, max_turns: int) -> None:
        self.sampling = prompt.sampling
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the engine breaks, or when the program ignores its limits."""
        self.replaced: set[str] = set()
        """Names of parameters in whose place the job's values were used."""
        self.at_limit = False
        """A request was refused because the sample had no turn or no token left."""
        self.refusal = ""
        """The answer to the newest request that was refused; empty for none."""
        self._generate = generate
        self._chat_formats = chat_formats
        self._max_turns = max_turns
        self._turns: dict[int, Turn] = {}
        self._num_requests = 0
        self._num_refused = 0
        self._num_calls = 0
        self._generations: set[asyncio.Task[FinishedSample]] = set()
        self._body_bytes = 0
        self._answered = asyncio.Event()
        self._closed = False

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold room for a body from its reading to its answer; wait while those of other requests take it."""
        while self._body_bytes + num_bytes > _BODIES_AT_ONCE_BYTES:
            self._answered.clear()
            await self._answered.wait()
        self._body_bytes += num_bytes
        try:
            yield
        finally:
            self._body_bytes -= num_bytes
            self._answered.set()

    async def read(self, body: bytes) -> ChatRequest:
        """Parse a request as ``parse_request`` does, without holding up other samples."""
        return await self._chat_formats.apart(len(body), parse_request, body, self.sampling)

    async def complete(self, request: ChatRequest) -> Completion:
        """Generate the next turn; raise ``RequestError`` if its messages cannot be rendered, or at a limit."""
        chat_format, tools = self._format(request.tools), _tools_key(request.tools)
        history = request.history
        prompt = chat_format, request, tools, history
        prompt_ids, parent = await self._chat_formats.apart(request.num_bytes, self._prompt, *prompt)
        limit = self._room(prompt_ids, parent)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        self.replaced.update(request.replaced)
        finished = await self._generated(prompt_ids, min(limit, request.max_tokens or limit), request)
        answer, message = self._read(chat_format, request, finished)
        self._turns[number] = Turn(number, tools, history, request.messages, answer, prompt_ids, finished, parent)
        reason = "tool_calls" if message.get("tool_calls") else finished.finish_reason
        return Completion(number, message, reason, len(prompt_ids), len(finished.response_ids))

    @property
    def num_turns(self) -> int:
        """Return the number of finished turns."""
        return len(self._turns)

    def close(self) -> None:
        """End all requests that are being answered, and answer no further one."""
        self._closed = True
        for generation in self._generations:
            generation.cancel()
        if self.failed.done():
            self.failed.exception()  # it was read, or is not needed any more
        self.failed.cancel()

    def trajectory(self) -> Trajectory | None:
        """Return what was captured; None without a finished turn."""
        if not self._turns:
            return None
        trajectory = _trajectory_of([turn for _, turn in sorted(self._turns.items())])
        trajectory.replaced_parameters = sorted(self.replaced)
        if self.at_limit:
            trajectory.finish_reason = "length"
        return trajectory

    def _format(self, tools: list[dict[str, Any]]) -> ChatFormat:
        try:
            return self._chat_formats.of(tools)
        except Exception as error:  # templates and parsers raise several kinds
            raise RequestError(f"the model's tool parser refuses these tools: {error}", "tools") from error

    def _prompt(
        self, chat_format: ChatFormat, request: ChatRequest, tools: str, history: History
    ) -> tuple[list[int], Turn | None]:
        """Return the tokens to continue, and the turn that they continue."""
        turns = list(self._turns.values())
        for turn in turns:
            if turn.tools == tools and turn.history == history:  # the same request again
                return turn.prompt_ids, turn.parent
        parent = _continued_turn(turns, tools, history)
        if parent is not None:
            new = request.messages[len(parent.history) + 1 :]
            try:
                return parent.ids + _suffix(chat_format, parent, new), parent
            except Exception as error:  # the template cannot continue with these messages: render all of them
                logger.debug("the template cannot continue a conversation", error=repr(error))
        try:
            return chat_format.template.encode(chat_format.template.render(request.messages, generate=True)), None
        except Exception as error:  # a template is a program: it raises several kinds
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error

    def _room(self, prompt_ids: list[int], parent: Turn | None) -> int:
        """Return the most tokens of the next turn."""
        if self._num_requests >= self._max_turns:
            raise self._limit(
                f"this sample has had its {self._max_turns} turns (spec.rollout.agent.maxTurns)", "max_turns"
            )
        used = len(prompt_ids) - parent.num_root_tokens if parent is not None else 0
        if used >= self.sampling.max_tokens:
            raise self._limit(
                f"the conversation has {used} tokens after its first prompt; spec.rollout.sampling.maxTokens allows "
                f"{self.sampling.max_tokens}",
                _TOO_LONG,
            )
        return self.sampling.max_tokens - used

    def _limit(self, message: str, code: str) -> RequestError:
        """Note that the sample has no turn left; end it if its program does not stop asking."""
        self.at_limit = True
        self._num_refused += 1
        if self._num_refused > _MOST_REFUSED and not self.failed.done():
            self.failed.set_exception(LimitIgnoredError(message))
        return RequestError(message, "messages", code)

    async def _generated(self, ids: list[int], limit: int, request: ChatRequest) -> FinishedSample:
        if self._closed:  # while the request was read
            raise RequestError("the sample has ended")
        chat = Chat(request.messages, request.tools if request.calls_allowed else ())
        generation = asyncio.ensure_future(self._generate(ids, limit, request.stop, chat))
        self._generations.add(generation)
        generation.add_done_callback(self._generations.discard)
        try:
            return await generation
        except RequestRefusedError as error:
            raise (self._limit(str(error), _TOO_LONG) if error.too_long else RequestError(str(error))) from error
        except EngineFailedError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            generation.cancel()

    def _read(
        self, chat_format: ChatFormat, request: ChatRequest, finished: FinishedSample
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the policy's message as templates render it, and in OpenAI's form."""
        text = self._chat_formats.text(finished.response_ids, request.stop)
        parsed = chat_format.parser.parse(text) if chat_format.parser is not None and request.calls_allowed else None
        valid = [call for call in parsed.calls if not call.problem] if parsed is not None else []
        if parsed is None or not valid:
            return {"role": "assistant", "content": text}, {"role": "assistant", "content": text}
        numbered = list(enumerate(valid, self._num_calls))
        self._num_calls += len(numbered)
        calls = [tool_call(call.name, call.arguments, number) for number, call in numbered]
        written = [tool_call(call.name, json.dumps(call.arguments), number) for number, call in numbered]
        return (
            {"role": "assistant", "content": parsed.content, "tool_calls": calls},
            {"role": "assistant", "content": parsed.content or None, "tool_calls": written},
        )


def _suffix(chat_format: ChatFormat, parent: Turn, messages: list[dict[str, Any]]) -> list[int]:
    last = parent.finished.response_ids[-1]
    calls = parent.answer.get("tool_calls")
    if calls:
        return chat_format.suffix.after_calls(calls, messages, last)
    return chat_format.suffix.after_answer(messages, last)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Hold one response of the policy and the request that it answers."""

    number: int
    """Of the request in its sample."""
    tools: str
    """Key of the request's tools: another list of tools is another prompt."""
    history: History
    """The request's messages."""
    messages: list[dict[str, Any]]
    """The same as chat messages."""
    answer: dict[str, Any]
    """The policy's message."""
    prompt_ids: list[int]
    """Everything before the response, earlier turns included."""
    finished: FinishedSample
    parent: Turn | None
    """The turn that it continues; None: its prompt was rendered from its messages alone."""

    @property
    def ids(self) -> list[int]:
        """Return prompt and response together."""
        return self.prompt_ids + self.finished.response_ids

    @property
    def num_root_tokens(self) -> int:
        """Return the tokens of the prompt with which its conversation began."""
        return len(self.prompt_ids) if self.parent is None else self.parent.num_root_tokens


def _message_key(message: dict[str, Any]) -> str:
    """Return a text that is the same for two forms of a message.

    Clients send a conversation back in their own form: without empty fields, with trimmed text, with arguments of calls
    formatted anew. The tokens are always those of the earlier turn.
    """
    calls = [
        [call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)]
        for call in message.get("tool_calls") or []
    ]
    return json.dumps([message["role"], message["content"].strip(), calls, message.get("tool_call_id")])


def _tools_key(tools: Sequence[dict[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True)


def _continued_turn(turns: Sequence[Turn], tools: str, history: History) -> Turn | None:
    """Return the turn whose history and answer are the longest beginning of ``history``; the newest among several."""
    found: Turn | None = None
    for turn in turns:
        length = len(turn.history)
        if (
            turn.tools == tools
            and length + 1 < len(history)
            and (found is None or length >= len(found.history))
            and history[:length] == turn.history
            and history[length] == _message_key(turn.answer)
        ):
            found = turn
    return found


def _trajectory_of(turns: Sequence[Turn]) -> Trajectory:
    """Return the token sequence with the newest turn; the others are its ``branches``. There is at least one turn.

    There is a sequence for each conversation that was not continued further. A turn that continues the last turn of a
    sequence is appended to it. Every other turn begins a sequence of its own, whose prompt holds all tokens before it:
    a token that the policy sampled is in the loss of exactly one sequence.
    """
    branches: list[Trajectory] = []
    ends: dict[int, Trajectory] = {}
    """Number of the last turn of a sequence → the sequence."""
    places: list[tuple[Trajectory, int]] = []
    """The sequence of each turn and the index of its first token there."""
    for turn in turns:
        branch = ends.pop(turn.parent.number, None) if turn.parent is not None else None
        if branch is None:
            branch = Trajectory(prompt_ids=turn.prompt_ids, prompt_messages=turn.messages)
            branches.append(branch)
        else:
            branch.add_observation(turn.prompt_ids[len(branch.prompt_ids) + len(branch.response_ids) :])
            branch.messages += turn.messages[len(branch.prompt_messages) + len(branch.messages) :]
        places.append((branch, len(branch.response_ids)))
        branch.add_turn(turn.finished)
        branch.messages.append(turn.answer)
        ends[turn.number] = branch
    newest = ends[turns[-1].number]
    newest.branches = [branch for branch in branches if branch is not newest]
    # The first token of each turn is counted over all responses, one after the other.
    sequences = [newest, *newest.branches]
    offsets = accumulate((len(sequence.response_ids) for sequence in sequences), initial=0)
    offset_of = {id(sequence): offset for sequence, offset in zip(sequences, offsets, strict=False)}
    newest.turns = [offset_of[id(sequence)] + first for sequence, first in places]
    return newest


@dataclass(frozen=True)
class ChatFormat:
    """Render and parse conversations with the same tools."""

    template: ChatTemplate
    suffix: ChatSuffix
    parser: ToolCallParser | None
    """None: there are no tools."""


class ChatFormats:
    """Keep the chat formats of recent requests, which bring their own tools.

    Args:
        arguments: ``model.chatTemplateArguments``.
        parser: name of vLLM's parser.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any], parser: str) -> None:
        self.tokenizer = tokenizer
        self._arguments = arguments
        self._parser = parser
        self._kept: OrderedDict[str, ChatFormat] = OrderedDict()
        self._large = asyncio.Lock()

    def of(self, tools: Sequence[dict[str, Any]]) -> ChatFormat:
        """Return the chat format of a list of tools."""
        key = _tools_key(tools)
        found = self._kept.pop(key, None)
        if found is None:
            template = ChatTemplate(self.tokenizer, tools, self._arguments)
            opened = bool(tools) and opens_reasoning(template)
            parser = ToolCallParser(self._parser, self.tokenizer, tools, opened=opened) if tools else None
            found = ChatFormat(template, ChatSuffix(template), parser)
        self._kept[key] = found
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    async def apart(
        self, num_bytes: int, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Read or tokenise a large request in a thread, one at a time.

        A megabyte takes seconds, in which no lease of the rollout could be renewed.
        """
        if num_bytes < _LARGE_BYTES:
            return function(*args, **kwargs)
        async with self._large:
            return await asyncio.to_thread(function, *args, **kwargs)

    def text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decode a turn as ``decoded_turn`` does, without its stop text."""
        text = decoded_turn(self.tokenizer, ids)
        places = [place for place in map(text.find, stop) if place >= 0]
        return text[: min(places, default=len(text))]


class RequestError(Exception):
    """Answer a request with status 400.

    Args:
        code: an error code of OpenAI's API; clients check for ``context_length_exceeded``.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """Hold one request."""

    messages: list[dict[str, Any]]
    """In the form that chat templates render."""
    tools: list[dict[str, Any]]
    history: History = ()
    """Keys of the messages."""
    model: str = ""
    calls_allowed: bool = True
    """False: ``tool_choice`` is ``none``."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    replaced: tuple[str, ...] = ()
    """Names of parameters in whose place the job's values are used."""
    num_bytes: int = 0
    """Of its body."""


def parse_request(body: bytes, sampling: Sampling) -> ChatRequest:
    """Parse a request's body; raise ``RequestError`` if it is malformed, or asks for something that is refused.

    A parameter is used, replaced by the job's own value and recorded by name, or refused. Replaced are those that most
    programs set by default and that only change the distribution sampled from: training needs the job's. Refused are
    those without which the program would misread the answer.
    """
    document = _document(body)
    for name, why in _REFUSED.items():
        if document.get(name) and document[name] != _DEFAULTS.get(name):
            raise RequestError(f"{name} is {shown(document[name])}; a policy in training {why}", name)
    messages, tools = document.get("messages"), document.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise RequestError("tools must be a list of {type: function, function: {name: …, parameters: {…}}}", "tools")
    options = document.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is {shown(options)}; give an object", "stream_options")
    read = [_message(message, place) for place, message in enumerate(messages)]
    return ChatRequest(
        messages=read,
        tools=tools,
        history=tuple(map(_message_key, read)),
        model=str(document.get("model") or ""),
        calls_allowed=document.get("tool_choice") != "none",
        stop=_stop(document.get("stop")),
        max_tokens=_max_tokens(document),
        stream=bool(document.get("stream")),
        include_usage=bool(options.get("include_usage")),
        replaced=tuple(sorted(_replaced(document, sampling))),
        num_bytes=len(body),
    )


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError("the body is not a JSON object")
    return _plain(document)


def _plain(value: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return a part of a request as plain data: what is wrong inside it is refused by its name."""
    try:
        checked: dict[str, Any] = plain(value, where)
    except PlainDataError as error:
        raise RequestError(str(error), re.split(r"[.\[]", error.where)[0] or None) from error
    return checked


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"stop is {shown(stop)}; give a text that is not empty, or a list of such texts", "stop")
    return tuple(texts)


def _max_tokens(document: dict[str, Any]) -> int | None:
    limits = [document[name] for name in ("max_completion_tokens", "max_tokens") if document.get(name) is not None]
    if not all(type(limit) is int and limit > 0 for limit in limits):
        raise RequestError("max_tokens must be a positive integer", "max_tokens")
    return min(limits, default=None)


def _replaced(document: dict[str, Any], sampling: Sampling) -> list[str]:
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, **_DEFAULTS}
    known = {*_USED, *_WITHOUT_EFFECT, *_REFUSED}
    asked = {name: value for name, value in document.items() if name not in known and value is not None}
    if asked.get("tool_choice") == "none":
        del asked["tool_choice"]
    return [name for name, value in asked.items() if name not in own or value != own[name]]


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("parameters") or {}, dict):
        return False
    return isinstance(function.get("name"), str) and bool(function["name"])


def _message(message: Any, place: int) -> dict[str, Any]:
    """Return a message as chat templates render it: text content, arguments of calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{place}] is no object with a role", "messages")
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"), place)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(f"messages[{place}].tool_calls is {shown(calls)}; give a list of calls", "messages")
    if calls:
        read["tool_calls"] = [
            _call(call, f"messages[{place}].tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return read


def _text(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else [None]
    if any(not isinstance(text, str) for text in texts):
        raise RequestError(f"messages[{place}].content: only text can be read", "messages")
    return "".join(text for text in texts if text)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is {shown(call)}; give {{function: {{name: …, arguments: …}}}}", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    named = {"name": function["name"], "arguments": _plain(arguments, f"{where}.function.arguments")}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}
