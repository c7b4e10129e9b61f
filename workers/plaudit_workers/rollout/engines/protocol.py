"""The protocol between a rollout worker and an inference engine: ``VllmEngine``, ``ScriptedEngine``, or a third.

An engine runs many samples at once: every agent awaits ``generate``. Weights are switched while samples run, and each
finished sample names the policy version that sampled each of its tokens.

| struct | written by | read by |
| --- | --- | --- |
| ``SampleRequest`` | an agent's call of ``generate`` | engine |
| ``FinishedSample`` | engine | agent |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from plaudit_wire.messages import PolicyVersion, Sampling

FinishReason = Literal["stop", "length"]
"""``stop``: the policy ended the response itself. ``length``: it was cut at ``max_tokens`` or the model's length."""

WeightSwitch = Literal["continue", "recompute", "drain"]
"""How running samples are treated when the weights change (``rollout.inFlight``).

``continue``: they keep the key-value cache of the old weights. ``recompute``: their cache is computed again under the
new weights. ``drain``: they finish under the old weights first; new samples wait for that.
"""

VersionSpan = tuple[int, int, int]
"""(first token, incarnation, number), as in ``Body.version_spans``."""


class EngineFailedError(Exception):
    """The engine broke; the process has to be restarted."""


class WeightsUnreadableError(Exception):
    """The weights could not be loaded. The engine holds no version and generates nothing until a load succeeds."""


class RequestRefusedError(Exception):
    """The engine can never generate this request, for example because the prompt exceeds the model's length."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to generate."""

    prompt_ids: Sequence[int]
    """[num_prompt_tokens] token ids."""
    sampling: Sampling
    seed: int
    """The same seed under the same weights gives the same response."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """One response, ``T`` tokens long (the end-of-sequence token included)."""

    response_ids: list[int]
    """[T] token ids."""
    logprobs: list[float]
    """[T] natural log-probabilities under the distribution sampled from (temperature, top_p, top_k applied)."""
    version_spans: list[VersionSpan]
    """The policy version that sampled each range of tokens; begins with token 0 when ``T`` > 0."""
    finish_reason: FinishReason
    generate_s: float
    """Seconds from the call of ``generate`` to the last token."""
    engine_queue_s: float = 0.0
    """The part of ``generate_s`` before the engine first scheduled the request."""
    num_preempted: int = -1
    """Preemptions by the engine; -1 if the engine does not report them."""


@runtime_checkable
class Engine(Protocol):
    """Generates samples. All methods are called on one event loop, and none blocks it."""

    async def start(self) -> None:
        """Prepare the engine to load weights.

        Raises:
            RefusedError: the model or the engine's arguments cannot work.
        """
        ...

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Generate one response. Waits for the first ``load_weights``; cancelling the call cancels the request.

        Raises:
            RequestRefusedError: the engine can never generate this request.
            EngineFailedError: the engine broke.
        """
        ...

    async def load_weights(self, path: Path, version: PolicyVersion, switch: WeightSwitch = "continue") -> None:
        """Switch to the weights in folder ``path``, which are ``version``; return when they are loaded.

        Running samples are treated as ``switch`` says; samples that have not begun get the new weights.

        Raises:
            WeightsUnreadableError: the files vanished or are not this model's weights.
            EngineFailedError: the engine broke.
        """
        ...

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """Compute the log-probability of each token after the first under the loaded weights at temperature 1.

        Args:
            ids: [L] token ids.

        Returns:
            [L - 1] natural log-probabilities, or None if the engine has no model.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of [T] token ids, without special tokens."""
        ...

    async def close(self) -> None:
        """Stop the engine and free its resources. Calls of ``generate`` have to be cancelled before."""
        ...
