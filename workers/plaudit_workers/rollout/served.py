"""Ask a server that speaks OpenAI's API for the policy's turns: a policy without weights, for ``plaudit try --url``.

The server answers with text and calls; ``TurnWriter`` writes them as the job's chat template does, so the job's own
tool parser, limits and scorers read what the policy in training would have written. An agent that keeps no messages
(``custom``, verl's loops) asks with token ids: they go as text to the Completions API.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, cast

from jinja2 import TemplateError

from plaudit_reward.http import HttpClient, NoResponseError, Response, error_message, excerpt, proxy_for, retry_after_s
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import CallTimeoutError, ConfigurationError, RefusedError
from plaudit_wire.messages import Sampling
from plaudit_wire.plain import PlainDataError, plain
from plaudit_wire.printable import shown
from plaudit_workers.agents.messages import FinishedSample
from plaudit_workers.rollout.agents.tool_calls import opens_reasoning
from plaudit_workers.rollout.engine import Chat, EngineFailedError, RequestRefusedError, SampleRequest
from plaudit_workers.tokenizer import ChatTemplate, engine_ends, text_of

ATTEMPTS = 4
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 20.0
_USER = {"role": "user", "content": "a"}
_MARKER = "zq7mark"
_MARKED = {"role": "assistant", "content": _MARKER}
_TOO_LONG = re.compile(r"context.?(length|window|size)|too long|maximum.{0,20}tokens", re.IGNORECASE)
"""What OpenAI, vLLM, SGLang, llama.cpp and Anthropic say of a conversation without room for a turn."""
_REFUSED = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}
"""A status that is about one request; every other failure is about the server."""
_OLD_LIMIT, _NEW_LIMIT = "max_tokens", "max_completion_tokens"


class TurnWriter:
    """Write messages of the assistant as a chat template does, without the token that ends the turn."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._opens_reasoning = opens_reasoning(template)
        self._ends = engine_ends(template.tokenizer)

    def text(self, message: str | Mapping[str, Any]) -> str:
        """Return a message as the policy would have written it; text stays as it is.

        Raises:
            ValueError: it is no message, or the template has no place for its calls.
        """
        if isinstance(message, str):
            return message
        calls = [_template_call(call) for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(f"content is {shown(content)}; give text")
        text = self._called(content, calls) if calls else content
        if self._opens_reasoning and "</think>" not in text:
            return f"{message.get('reasoning_content') or ''}\n</think>\n\n{text}"
        return text

    def _called(self, content: str, calls: Sequence[dict[str, Any]]) -> str:
        """Return what the template writes for a turn with calls."""
        message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        try:
            opened = self._template.render([_USER], generate=True)
            before = self._template.render([_USER, _MARKED], generate=False).partition(_MARKER)[0]
            whole = self._template.render([_USER, message], generate=False)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template does not render this turn's calls ({error})") from error
        start = next((len(each) for each in (opened, before, before.rstrip()) if whole.startswith(each)), 0)
        text = whole[start:]
        if not all(call["function"]["name"] in text for call in calls):
            raise ValueError(
                "the chat template does not write calls of tools. Name a template that does with model.chatTemplate"
            )
        ids = self._template.encode(text)
        last = next((place for place in reversed(range(len(ids))) if ids[place] in self._ends), len(ids))
        return str(self._template.tokenizer.decode(ids[:last], skip_special_tokens=False))


def _template_call(call: Any) -> dict[str, Any]:
    """Return a call of OpenAI's form as templates render it: its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call is no {function: {name: …, arguments: …}}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else the policy reads that they are no JSON
            arguments = json.loads(arguments)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


class ServedPolicy:
    """Ask a server for each turn.

    Args:
        url: the API's base, such as ``http://localhost:8000/v1``.
        template: the job's.
        key: sent as a bearer token; empty: none.
        limit_s: seconds of one request.
    """

    def __init__(
        self, url: str, model: str, template: ChatTemplate, *, key: str, key_field: str, limit_s: float
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._writer = TurnWriter(template)
        self._tokenizer: Any = template.tokenizer
        self._key = key
        self._key_field = key_field
        self._limit_s = limit_s
        self._limit_name = _OLD_LIMIT
        try:
            self._http = HttpClient(
                max_connections=256, bearer_token=key, key_field=key_field, proxy=proxy_for(self._url)
            )
        except ConfigurationError as error:
            raise RefusedError(str(error)) from error

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Ask for one turn; raise ``RequestRefusedError`` if the server refuses it, ``EngineFailedError`` if it fails.

        Its log-probabilities are 0: nothing trains on them.
        """
        began_s = time.monotonic()
        if request.chat is None:
            prompt = self._tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
            text, finish_reason = await self._completed("/completions", {"prompt": prompt}, request.sampling)
        else:
            text, finish_reason = await self._completed("/chat/completions", _asked(request.chat), request.sampling)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if finish_reason != "length":
            ids.append(self._tokenizer.eos_token_id)
        most = request.sampling.max_tokens
        cut: Literal["stop", "length"] = "length" if finish_reason == "length" or len(ids) > most else "stop"
        ids = ids[:most] or [self._tokenizer.eos_token_id]
        return FinishedSample(ids, [0.0] * len(ids), [(0, 1, 0)], cut, time.monotonic() - began_s)

    def decode(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """Return the text, unless ``whole`` without special tokens and the token that ended it."""
        return text_of(self._tokenizer, ids, whole=whole)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _completed(self, route: str, asked: dict[str, Any], sampling: Sampling) -> tuple[str, str]:
        """Return the text of a turn and why it ended."""
        response = await self._sent(route, asked, sampling)
        try:
            choice = plain(json.loads(response.body))["choices"][0]
            written = self._writer.text(choice["message"] if "message" in choice else choice["text"])
            return written, str(choice.get("finish_reason") or "stop")
        except (KeyError, IndexError, TypeError, RecursionError, PlainDataError, json.JSONDecodeError) as error:
            raise EngineFailedError(
                f"{self._url}{route} answers with no completion: {excerpt(response.body, self._key)}"
            ) from error
        except ValueError as error:
            raise RequestRefusedError(f"the turn of {self._model}: {error}", too_long=False) from error

    async def _sent(self, route: str, asked: dict[str, Any], sampling: Sampling) -> Response:
        """Return a response of status 200; try again what may pass."""
        for failures in itertools.count(1):
            body = {"model": self._model, **asked, **_parameters(sampling), self._limit_name: sampling.max_tokens}
            pause_s = backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            try:
                response = await self._http.post(f"{self._url}{route}", json.dumps(body).encode(), self._limit_s)
            except (NoResponseError, CallTimeoutError) as error:
                problem, may_pass = str(error), True
            else:
                if response.status == HTTPStatus.OK:
                    return response
                if self._takes_new_limit(response):
                    continue
                problem, may_pass = self._problem(route, response), _may_pass(response.status)
                pause_s = min(retry_after_s(response.headers) or pause_s, _LONGEST_PAUSE_S)
            if failures >= ATTEMPTS or not may_pass:
                raise EngineFailedError(problem)
            await asyncio.sleep(pause_s)
        raise AssertionError

    def _takes_new_limit(self, response: Response) -> bool:
        """Return True if the server wants the newer name of the limit, as OpenAI's newer models do; use it from now."""
        if self._limit_name == _NEW_LIMIT or response.status != HTTPStatus.BAD_REQUEST:
            return False
        if _NEW_LIMIT not in error_message(response.body, self._key):
            return False
        self._limit_name = _NEW_LIMIT
        return True

    def _problem(self, route: str, response: Response) -> str:
        """Return what a response says with its remedy; raise ``RequestRefusedError`` if it is about this request."""
        message = error_message(response.body, self._key)
        if response.status in _REFUSED:
            too_long = response.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or bool(
                _TOO_LONG.search(response.body.decode(errors="replace"))
            )
            raise RequestRefusedError(f"{self._url}{route} refuses it: {message}", too_long=too_long)
        return f"{self._url}{route} answers with HTTP {response.status}: {message}{self._remedy(response)}"

    def _remedy(self, response: Response) -> str:
        if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f". {'Correct' if self._key else 'Set'} the key in {self._key_field}"
        return ". Correct --url, which ends with /v1 for most servers, or --model" if response.status == 404 else ""


def _may_pass(status: int) -> bool:
    """Return True for a status after which the same request may succeed."""
    return status >= 500 or status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


def _asked(chat: Chat) -> dict[str, Any]:
    """Return a conversation in OpenAI's form."""
    messages = [_message(message) for message in chat.messages]
    return {"messages": messages, **({"tools": list(chat.tools)} if chat.tools else {})}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    if not calls:
        return dict(message)
    written = [{**call, "function": {**call["function"], "arguments": _json(call)}} for call in calls]
    return {**message, "tool_calls": written}


def _json(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """Return the job's sampling; what is a server's default is left out, because some servers refuse it."""
    further = {
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k if sampling.top_k > 0 else None,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    return {"temperature": sampling.temperature, **{name: value for name, value in further.items() if value}}
