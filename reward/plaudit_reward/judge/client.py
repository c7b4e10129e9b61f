"""Asks an OpenAI-compatible endpoint: one request, one answer or one typed error. The pipeline retries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit_reward.endpoint.failures import failure_of
from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.errors import DataError, InfrastructureError
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.proxy import proxy_for
from plaudit_reward.http.response import error_message, excerpt


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


_decode = msgspec.json.Decoder(_Completion).decode
_REMEDIES = {
    401: "check apiKeySecret",
    403: "check apiKeySecret and the key's permissions",
    404: "check baseUrl (up to and with /v1) and model",
}


@dataclass(frozen=True)
class JudgeAnswer:
    """The text that a judge wrote, and its cost."""

    text: str
    prompt_tokens: int | None = None
    """None where the endpoint reports no usage."""
    completion_tokens: int | None = None


class JudgeClient:
    """Connections to one endpoint.

    Args:
        base_url: up to and with ``/v1``.
        model: the model's name there.
        usage: counts requests and tokens.
        api_key: sent as a bearer token; empty: none.
        arguments: further members of each request (``temperature``, ``max_tokens``).
        max_connections: requests at a time; the rest wait, which counts as part of their call.

    Raises:
        ConfigurationError: an HTTP header cannot carry ``api_key``, or the process may not open so many connections.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        usage: EndpointUsage,
        *,
        api_key: str = "",
        arguments: Mapping[str, Any] | None = None,
        max_connections: int = 256,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._url = f"{self.base_url}/chat/completions"
        self._body = {"model": model, **(arguments or {})}
        self._usage = usage
        self._api_key = api_key
        self._http = HttpClient(
            max_connections=max_connections,
            bearer_token=api_key,
            key_field="judge.apiKeySecret",
            proxy=proxy_for(self._url),
        )

    async def ask(
        self,
        prompt: str,
        limit_s: float,
        on_sent: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> JudgeAnswer:
        """Send one prompt and return the answer.

        Args:
            prompt: the user's message.
            limit_s: seconds until the whole answer has arrived.
            on_sent: called when the request has been written to its connection.
            headers: of this request only.

        Raises:
            CallTimeoutError: no whole answer within ``limit_s``.
            InfrastructureError: the endpoint is unreachable, busy, broken or refuses all requests (see ``failures``).
            DataError: it refuses this prompt, or its answer is empty.
        """
        body = msgspec.json.encode({**self._body, "messages": [{"role": "user", "content": prompt}]})
        request = self._http.post(self._url, body, limit_s, headers=headers, on_sent=on_sent)
        response = await self._usage.counted(request)
        if response.status != 200:
            message = error_message(response.body, self._api_key)
            raise failure_of(self.base_url, response.status, response.headers, message, _REMEDIES)
        return self._answer(response.body)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    def _answer(self, body: bytes) -> JudgeAnswer:
        try:
            completion = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InfrastructureError(
                f"{self.base_url}: the response is not a chat completion: {error}: {excerpt(body, self._api_key)}"
            ) from error
        if not completion.choices:
            raise InfrastructureError(f"{self.base_url}: the response is not a chat completion: it has no choices")
        tokens = completion.usage
        if tokens is not None:
            self._usage.count_tokens(tokens.prompt_tokens, tokens.completion_tokens)
        choice = completion.choices[0]
        if not choice.message.content:
            raise DataError(
                f"the judge's answer is empty (finish_reason {choice.finish_reason}). A reasoning model may need more "
                "max_tokens in judge.arguments"
            )
        if tokens is None:
            return JudgeAnswer(choice.message.content)
        return JudgeAnswer(choice.message.content, tokens.prompt_tokens, tokens.completion_tokens)
