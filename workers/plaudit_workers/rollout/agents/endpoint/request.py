"""Read a request of OpenAI's Chat Completions API.

A parameter is used, replaced by the job's own value and recorded by name, or refused. Replaced are those that most
programs set by default and that only change the distribution sampled from: training needs the job's. Refused are those
without which the program would misread the answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from plaudit_wire.messages import Sampling

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
    model: str = ""
    calls_allowed: bool = True
    """False: ``tool_choice`` is ``none``."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    replaced: tuple[str, ...] = ()
    """Names of parameters in whose place the job's values are used."""


def parse_request(body: bytes, sampling: Sampling) -> ChatRequest:
    """Parse a request's body, which is JSON.

    Raises:
        RequestError: it is malformed, or asks for something that is refused.
    """
    document = _document(body)
    for name, why in _REFUSED.items():
        if document.get(name) and document[name] != _DEFAULTS.get(name):
            raise RequestError(f"{name} is {document[name]!r:.80}; a policy in training {why}", name)
    messages, tools = document.get("messages"), document.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise RequestError("tools must be a list of {type: function, function: {name: …}}", "tools")
    stop = document.get("stop") or []
    limits = [document[name] for name in ("max_completion_tokens", "max_tokens") if document.get(name) is not None]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise RequestError("max_tokens must be a positive integer", "max_tokens")
    return ChatRequest(
        messages=[_message(message, place) for place, message in enumerate(messages)],
        tools=tools,
        model=str(document.get("model") or ""),
        calls_allowed=document.get("tool_choice") != "none",
        stop=(stop,) if isinstance(stop, str) else tuple(str(text) for text in stop),
        max_tokens=min(limits, default=None),
        stream=bool(document.get("stream")),
        include_usage=bool((document.get("stream_options") or {}).get("include_usage")),
        replaced=tuple(sorted(_replaced(document, sampling))),
    )


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError("the body is not a JSON object")
    return document


def _replaced(document: dict[str, Any], sampling: Sampling) -> list[str]:
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, **_DEFAULTS}
    known = {*_USED, *_WITHOUT_EFFECT, *_REFUSED}
    asked = {name: value for name, value in document.items() if name not in known and value is not None}
    if asked.get("tool_choice") == "none":
        del asked["tool_choice"]
    return [name for name, value in asked.items() if name not in own or value != own[name]]


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("name"))


def _message(message: Any, place: int) -> dict[str, Any]:
    """Return a message as chat templates render it: text content, arguments of calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{place}] is no object with a role", "messages")
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"), place)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if message.get("tool_calls"):
        try:
            read["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        except (TypeError, KeyError) as error:
            raise RequestError(f"messages[{place}].tool_calls: no {error}", "messages") from error
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


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": arguments},
    }
