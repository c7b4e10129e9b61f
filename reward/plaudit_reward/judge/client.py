"""Ask an OpenAI-compatible endpoint: one request, one answer or one typed error. The pipeline retries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit_reward.endpoint.failures import failure_of
from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.proxy import proxy_for
from plaudit_reward.http.response import Response, error_message, excerpt
from plaudit_reward.scorer import Attempt
from plaudit_reward.served.pool import ServerPool, ServerResponseError
from plaudit_wire.errors import DataError, InfrastructureError


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


_ROUTE = "/chat/completions"
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
    """Send prompts to one endpoint, or to the servers of a model that the job serves.

    Args:
        base_url: up to and with ``/v1``; with ``pool`` a name of the servers, for logs and errors.
        api_key: sent as a bearer token; empty: none.
        arguments: further members of each request (``temperature``, ``max_tokens``).
        max_connections: requests at a time; the rest wait, which counts as part of their call.
        pool: the servers, opened and closed here; None: ``base_url`` is asked.

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
        pool: ServerPool | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._url = f"{self.base_url}{_ROUTE}"
        self._body = {"model": model, **(arguments or {})}
        self._usage = usage
        self._api_key = api_key
        self._pool = pool
        self._http = HttpClient(
            max_connections=max_connections,
            bearer_token=api_key,
            key_field="judge.apiKeySecret",
            proxy=None if pool else proxy_for(self._url),
        )

    async def open(self) -> None:
        """Start to look for the job's own servers, if it serves the judge. Raises ``ConfigurationError``."""
        if self._pool is not None:
            await self._pool.open()

    @property
    def reachable(self) -> bool:
        """Return False while the job serves the judge and none of its servers is healthy."""
        return self._pool is None or self._pool.any_healthy

    async def ask(
        self,
        prompt: str,
        limit_s: float,
        on_sent: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> JudgeAnswer:
        """Send one prompt and return the answer.

        Args:
            limit_s: seconds until the whole answer has arrived.
            on_sent: called when the request has been written to its connection.

        Raises:
            CallTimeoutError: no whole answer within ``limit_s``.
            InfrastructureError: the endpoint is unreachable, busy, broken or refuses all requests (see ``failures``).
            DataError: it refuses this prompt, or its answer is empty.
        """
        body = msgspec.json.encode({**self._body, "messages": [{"role": "user", "content": prompt}]})
        response = await self._usage.counted(self._send(body, limit_s, on_sent, headers))
        if response.status != 200:
            message = error_message(response.body, self._api_key)
            raise failure_of(self.base_url, response.status, response.headers, message, _REMEDIES)
        return self._answer(response.body)

    async def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            await self._pool.close()
        await self._http.close()

    async def _send(
        self, body: bytes, limit_s: float, on_sent: Callable[[], None] | None, headers: Mapping[str, str] | None
    ) -> Response:
        if self._pool is None:
            return await self._http.post(self._url, body, limit_s, headers=headers, on_sent=on_sent)
        try:
            _, response = await self._pool.post(
                f"/v1{_ROUTE}", body, Attempt(limit_s), headers=headers, on_sent=on_sent
            )
        except ServerResponseError as error:
            self._usage.count_request(str(error.status))
            raise
        return response

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
