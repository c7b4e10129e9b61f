"""The seam between a rollout worker and whatever generates: ``VllmEngine``, ``ScriptedEngine``, or a third.

An engine runs many samples at once. The worker submits them one by one and reads finished ones as they come; weights
are switched while samples run, and each finished sample says which policy version sampled each of its tokens.

| struct | written by | read by |
| --- | --- | --- |
| ``SampleRequest`` | an agent's call of ``generate`` | engine |
| ``FinishedSample``, ``RefusedSample`` | engine | the agent, through ``generation.Generation`` |
| ``EngineStats`` | engine | worker, benchmarks |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from plaudit_wire.messages import PolicyVersion, Sampling

FinishReason = Literal["stop", "length"]
"""``stop``: the policy ended the response itself. ``length``: it was cut at ``max_tokens`` or the model's length."""

InFlight = Literal["continue", "recompute", "drain"]
"""What happens to running samples when the weights change.

``continue``: they go on with the key-value cache of the old weights. ``recompute``: their cache is computed again
under the new weights. ``drain``: they end under the old weights first; new ones wait for that.
"""

VersionSpan = tuple[int, int, int]
"""(first token, incarnation, number), as in ``Body.version_spans``."""


class EngineFailedError(Exception):
    """The engine broke and cannot go on; the process has to be started again."""


class WeightsUnreadableError(Exception):
    """The weights could not be loaded. The engine holds no version now and generates nothing until a load succeeds."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to generate."""

    id: str
    """Unique among all that runs in the engine."""
    prompt_ids: Sequence[int]
    """[num_prompt_tokens] token ids."""
    sampling: Sampling
    seed: int
    """The same seed under the same weights gives the same response."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """One response, ``T`` tokens long (the end-of-sequence token included)."""

    id: str
    response_ids: list[int]
    """[T] token ids."""
    logprobs: list[float]
    """[T] natural log-probabilities under the distribution sampled from (temperature, top_p, top_k applied)."""
    version_spans: list[VersionSpan]
    """Which policy version sampled which tokens; begins with token 0 when ``T`` > 0."""
    finish_reason: FinishReason
    generate_s: float
    """Seconds from ``submit`` to the last token."""
    engine_queue_s: float = 0.0
    """The part of ``generate_s`` before the engine scheduled it first."""
    num_preempted: int = -1
    """Preemptions by the engine; -1 when it does not say."""


@dataclass(frozen=True, slots=True)
class RefusedSample:
    """The engine cannot generate this request, now or later (the prompt is longer than the model's length)."""

    id: str
    reason: str


Outcome = FinishedSample | RefusedSample


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine has done and is doing."""

    num_unfinished: int
    """Submitted and neither finished, refused nor cancelled."""
    num_finished: int
    num_response_tokens: int
    """Tokens of all finished samples."""


@runtime_checkable
class Engine(Protocol):
    """Generates samples. All methods are called on one event loop and none blocks it."""

    async def start(self) -> None:
        """Gets ready to take weights.

        Raises:
            RefusedError: the model or the engine's arguments cannot work.
        """
        ...

    def submit(self, request: SampleRequest) -> None:
        """Takes one request; its end comes through ``finished``. Before the first ``load_weights`` it waits."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Forgets these requests; nothing more is heard of them. Unknown ids are ignored."""
        ...

    def finished(self) -> AsyncIterator[list[Outcome]]:
        """Yields what has finished since the last time, at least one at a time. One reader only.

        Raises:
            EngineFailedError: the engine broke.
        """
        ...

    async def load_weights(self, path: Path, version: PolicyVersion, in_flight: InFlight = "continue") -> None:
        """Switches to the weights in folder ``path``, which are ``version``; returns when they are held.

        Samples that run go on or end first, as ``in_flight`` says; those that have not begun get the new weights.

        Raises:
            WeightsUnreadableError: the files vanished or are not this model's weights.
            EngineFailedError: the engine broke.
        """
        ...

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """Log-probabilities of each token after the first under the held weights at temperature 1.

        Args:
            ids: [L] token ids.

        Returns:
            [L - 1] natural log-probabilities, or None if the engine has no model to ask.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of [T] token ids, special tokens left out."""
        ...

    def stats(self) -> EngineStats:
        """Counts since the start."""
        ...

    async def close(self) -> None:
        """Stops and frees everything; unfinished samples are lost."""
        ...
