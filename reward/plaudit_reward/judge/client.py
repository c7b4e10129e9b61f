"""Asks an OpenAI-compatible endpoint: one request, one answer or one typed failure. Retries are the pipeline's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from plaudit_reward.errors import CallTimeoutError, DataError, InfrastructureError
from plaudit_reward.judge.failures import failure_of
from plaudit_reward.judge.usage import Usage

_CONNECT_WITHIN_S = 10.0
_KEEP_ALIVE_S = 3.0
"""Below the 5 s after which uvicorn (vLLM's server) closes: a connection closed in the same moment costs an attempt."""
_MOST_BYTES = 4 << 20
_MOST_REASON_CHARACTERS = 300


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Tokens | None = None


@dataclass(frozen=True)
class Answer:
    """What the endpoint said."""

    text: str
    prompt_tokens: int | None = None
    """None when it did not say."""
    completion_tokens: int | None = None


class JudgeClient:
    """A connection pool to one endpoint.

    Args:
        base_url: up to and with ``/v1``.
        model: the model's name there.
        usage: where requests and tokens are counted.
        api_key: sent as a bearer token; empty = none.
        arguments: further members of each request (``temperature``, ``max_tokens``).
        max_connections: requests at a time; the rest wait, which counts as part of their call.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        usage: Usage,
        *,
        api_key: str = "",
        arguments: Mapping[str, Any] | None = None,
        max_connections: int = 256,
    ) -> None:
        self._path = base_url.rstrip("/") + "/chat/completions"
        self._body = {"model": model, **(arguments or {})}
        self._usage = usage
        self._api_key = api_key
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_WITHIN_S),
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=_KEEP_ALIVE_S),
        )

    async def ask(
        self,
        prompt: str,
        limit_s: float,
        sent: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends one prompt.

        Args:
            prompt: the user's message.
            limit_s: seconds within which the whole answer must have come.
            sent: called when the request has been written to its connection.
            headers: of this request alone.

        Raises:
            CallTimeoutError: no whole answer within ``limit_s``.
            InfrastructureError: the endpoint cannot be reached, is busy, broken or refuses (see ``failures``).
            DataError: it refuses this prompt, or answers with nothing.
        """
        messages = [{"role": "user", "content": prompt}]
        try:
            async with asyncio.timeout(limit_s):
                content = msgspec.json.encode({**self._body, "messages": messages})
                status, answered, body = await self._post(content, sent, headers)
        except TimeoutError:
            self._usage.count_request("timeout")
            raise CallTimeoutError(f"no answer within {limit_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            self._usage.count_request("unreachable")
            words = str(error) or "the connection was cut"
            raise InfrastructureError(f"the endpoint cannot be reached: {type(error).__name__}: {words}") from error
        self._usage.count_request(str(status))
        if status != 200:
            raise failure_of(status, answered, self._message(body))
        return self._answer(body)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def _post(
        self, content: bytes, sent: Callable[[], None], headers: Mapping[str, str] | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        async def trace(event: str, _: Any) -> None:
            if event.endswith(".send_request_body.complete"):
                sent()

        extensions = {"trace": trace}
        async with self._http.stream(
            "POST", self._path, content=content, headers=headers, extensions=extensions
        ) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    raise httpx.DecodingError(f"the answer is longer than {_MOST_BYTES} bytes")
            return response.status_code, response.headers, bytes(body)

    def _answer(self, body: bytes) -> Answer:
        try:
            completion = msgspec.json.decode(body, type=_Completion)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InfrastructureError(
                f"the endpoint's answer is no chat completion: {error}: {self._excerpt(body)}"
            ) from error
        if not completion.choices:
            raise InfrastructureError("the endpoint's answer is no chat completion: it has no choices")
        tokens = completion.usage
        if tokens is not None:
            self._usage.count_tokens(tokens.prompt_tokens, tokens.completion_tokens)
        choice = completion.choices[0]
        if not choice.message.content:
            raise DataError(
                f"the judge's answer is empty (finish_reason {choice.finish_reason}); a reasoning model may need more "
                "max_tokens in judge.arguments"
            )
        if tokens is None:
            return Answer(choice.message.content)
        return Answer(choice.message.content, tokens.prompt_tokens, tokens.completion_tokens)

    def _message(self, body: bytes) -> str:
        """The endpoint's own words: OpenAI's and vLLM's ``error.message``, FastAPI's ``detail``, or the text."""
        try:
            said = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._excerpt(body)
        if isinstance(said, dict):
            error = said.get("error", said)
            for holder in (error, said):
                for name in ("message", "detail"):
                    if isinstance(holder, dict) and isinstance(holder.get(name), str):
                        return self._clean(holder[name])
            if isinstance(error, str):
                return self._clean(error)
        return self._excerpt(body)

    def _excerpt(self, body: bytes) -> str:
        return self._clean(body.decode(errors="replace"))

    def _clean(self, words: str) -> str:
        """Words of the endpoint for a reason: short, and without the key that it may repeat."""
        if self._api_key:
            words = words.replace(self._api_key, "***")
        return " ".join(words.split())[:_MOST_REASON_CHARACTERS]
