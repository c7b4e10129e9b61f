"""``kind: model``: send a sample to one of the scorer's reward model servers and return the logit as its value.

200 carries the value. A 4xx is about this sample (too long, no chat template) and is never retried. What else a server
may respond is the pool's (``served.pool``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_reward.served.pool import ServerPool
from plaudit_wire.errors import CallTimeoutError, DataError, InfrastructureError, ScoreTimeoutError
from plaudit_wire.sample import Sample

InputForm = Literal["chat", "text"]


class _Result(msgspec.Struct):
    probs: list[float | None]
    """None is what JSON has for NaN."""


class _Answer(msgspec.Struct):
    data: list[_Result]


_decode = msgspec.json.Decoder(_Answer).decode


class ModelScorer:
    """Score by a reward model with one output, behind vLLM's ``/classify`` or Plaudit's own.

    Args:
        pool: the model's servers; opened and closed here.
        form: ``chat``: the messages and the response, rendered by the reward model's chat template; ``text``: prompt
            and response, concatenated.
        traceparent: returns the trace context of a sample, sent as a header. None where nothing is traced.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        form: InputForm = "chat",
        max_concurrent: int = 256,
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self.name = pool.name
        self._pool = pool
        self._form = form
        self._max_concurrent = max_concurrent
        self._traceparent = traceparent
        self._in_work = 0

    async def open(self) -> None:
        """Start to look for servers. Raises as ``ServerPool.open``."""
        await self._pool.open()

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample; ask further servers while those asked are full or shutting down."""
        self._in_work += 1
        try:
            headers = {"traceparent": self._traceparent(sample)} if self._traceparent else None
            body = request_body(sample, self._form)
            url, response = await self._pool.post("/classify", body, attempt, headers=headers)
        except CallTimeoutError as error:
            raise ScoreTimeoutError(str(error)) from None  # a forward pass that took so long once is not repeated
        finally:
            self._in_work -= 1
        if response.status != 200:
            raise DataError(f"{url} refused the sample: {self._pool.explained(response)}")
        return _score_of(url, response.body)

    def room(self) -> int:
        """Return how many more samples could begin; none while no server is healthy, so that their time stays whole."""
        return max(0, self._max_concurrent - self._in_work) if self._pool.any_healthy else 0

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self._pool.close()


def request_body(sample: Sample, form: InputForm) -> bytes:
    """Return the body of the request for a sample's raw logit.

    A prompt without messages becomes one message of the user.
    """
    if form == "text":
        return msgspec.json.encode({"input": sample.prompt + sample.response, "use_activation": False})
    prompt: list[dict[str, Any]] = sample.messages or [{"role": "user", "content": sample.prompt}]
    messages = [*prompt, {"role": "assistant", "content": sample.response}]
    return msgspec.json.encode({"messages": messages, "use_activation": False})


def _score_of(url: str, body: bytes) -> Score:
    try:
        (result,) = _decode(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InfrastructureError(f"{url}: the response is not a classification of one input: {error}") from error
    if len(result.probs) != 1:
        raise DataError(
            f"{url}: the model has {len(result.probs)} labels; a reward model has one (num_labels: 1). Name another "
            "source"
        )
    (logit,) = result.probs
    return Score.scored(math.nan if logit is None else logit)
