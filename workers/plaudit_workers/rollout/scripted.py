"""Draw responses from a script instead of a policy: an engine without a model. For tests and for load generation.

A sample's tokens, log-probabilities, length and latency depend only on the request's seed, so runs are repeatable.
Policy versions are treated as in a real engine: a switch in the middle of a response appears in its version spans.
``engine.kind: scripted`` selects it; it is never a default.

``engine.arguments`` (camelCase in YAML)::

    latencySeconds: {kind: uniform, low: 0.2, high: 2.0}      # constant · uniform · exponential · lognormal
    responseTokens: {kind: constant, value: 64}
    vocabularySize: 16
    loadSeconds: 0.02
    turns: ['<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>', 'It is 4.']
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import EngineStatus
from plaudit_workers.agents.messages import FinishedSample, VersionSpan
from plaudit_workers.rollout.engine import SampleRequest, WeightSwitch


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Always draw ``value``."""

    value: float


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Draw uniformly between ``low`` and ``high``."""

    low: float
    high: float


class Exponential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="exponential"):
    """Draw from the exponential distribution with this ``mean``."""

    mean: float


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Draw log-normally: half below ``median``; ``sigma`` is the logarithm's standard deviation (1 has a long tail)."""

    median: float
    sigma: float


Distribution = Constant | Uniform | Exponential | LogNormal


def _draw(distribution: Distribution, random: np.random.Generator) -> float:
    if isinstance(distribution, Constant):
        return distribution.value
    if isinstance(distribution, Uniform):
        return float(random.uniform(distribution.low, distribution.high))
    if isinstance(distribution, Exponential):
        return float(random.exponential(distribution.mean))
    return float(distribution.median * math.exp(distribution.sigma * random.standard_normal()))


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Hold the fields of ``engine.arguments``."""

    latency_seconds: Distribution = Constant(0.05)
    """Seconds from a sample's start to its last token."""
    response_tokens: Distribution = Constant(16)
    """Length before ``max_tokens`` cuts it; rounded, at least 1."""
    vocabulary_size: int = 16
    load_seconds: float = 0.0
    """Seconds that a switch of weights takes; running samples continue meanwhile."""
    turns: list[str] = []
    """Texts to play instead of random tokens: the n-th turn of a sample gets the n-th text, later turns the last one.
    With the model's tokenizer, so that tool calls can be played."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Script:
        """Read ``engine.arguments``; refuse unknown names and wrong types."""
        try:
            return msgspec.convert(dict(arguments), cls)
        except msgspec.ValidationError as error:
            raise RefusedError(f"spec.rollout.engine.arguments of the scripted engine: {error}") from error


class ScriptedEngine:
    """Play a script; see the module's docstring.

    Args:
        max_concurrent_samples: others wait, first come first served.
        tokenizer: needed for a script with ``turns``.
    """

    def __init__(self, script: Script, *, max_concurrent_samples: int = 256, tokenizer: Any = None) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._places = asyncio.Semaphore(max_concurrent_samples)
        self._running: set[_Running] = set()
        self._num_submitted = 0
        """Requests that have not ended, waiting ones included."""
        self._version: PolicyVersion | None = None
        self._open = asyncio.Event()
        """Weights are loaded and no switch waits for running samples: new samples may begin."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Do nothing: there is nothing to prepare."""

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Draw a response and return it after its latency; wait while all places are taken or no weights are loaded."""
        self._num_submitted += 1
        try:
            return await self._play(request, submitted=time.monotonic())
        finally:
            self._num_submitted -= 1

    async def _play(self, request: SampleRequest, submitted: float) -> FinishedSample:
        async with self._places:
            while not self._open.is_set():
                await self._open.wait()
            running = self._begin(request, submitted)
            try:
                await asyncio.sleep(running.latency_s)
            finally:
                self._running.discard(running)
                if not self._running:
                    self._idle.set()
        return _finished(running, time.monotonic())

    async def load_weights(self, path: Path, version: PolicyVersion, switch: WeightSwitch = "continue") -> None:
        """Hold ``version`` after ``load_seconds``; the folder is not read, and ``recompute`` costs nothing."""
        await asyncio.sleep(self._script.load_seconds)
        if switch == "drain":
            await self.sleep()
        self._version = version
        now = time.monotonic()
        for running in self._running:
            _begin_span(running, now, version)
        self._open.set()

    async def sleep(self, switch: WeightSwitch = "continue") -> None:
        """Begin no samples until weights are loaded; running ones, which a script cannot interrupt, finish first."""
        self._open.clear()
        while self._running:
            await self._idle.wait()

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """Return None: there is no model."""
        return None

    def decode(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """Return the ids as text: in the tokenizer's, or as numbers without one."""
        if self._tokenizer is not None:
            from plaudit_workers.tokenizer import text_of

            return text_of(self._tokenizer, ids, whole=whole)
        return " ".join(map(str, ids))

    def status(self) -> EngineStatus:
        """Return the running and the waiting requests; there is no cache."""
        return EngineStatus(len(self._running), self._num_submitted - len(self._running))

    async def close(self) -> None:
        """Do nothing: whoever awaits a sample cancels it."""

    def _begin(self, request: SampleRequest, submitted: float) -> _Running:
        assert self._version is not None
        random = np.random.default_rng(request.seed & (2**63 - 1))
        num_tokens = max(1, round(_draw(self._script.response_tokens, random)))
        latency_s = max(0.0, _draw(self._script.latency_seconds, random))
        response_ids: list[int] = random.integers(0, self._script.vocabulary_size, num_tokens).tolist()
        if self._script.turns:
            text = self._script.turns[min(request.turn, len(self._script.turns) - 1)]
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            response_ids = [*ids, self._tokenizer.eos_token_id]
        logprobs = np.log(random.uniform(0.05, 1.0, len(response_ids)))
        running = _Running(
            request=request,
            submitted=submitted,
            started=time.monotonic(),
            latency_s=latency_s,
            response_ids=response_ids,
            logprobs=logprobs.tolist(),
            spans=[(0, self._version.incarnation, self._version.number)],
        )
        self._running.add(running)
        self._idle.clear()
        return running


@dataclass(slots=True, eq=False)
class _Running:
    request: SampleRequest
    submitted: float
    started: float
    latency_s: float
    logprobs: list[float]
    response_ids: list[int]
    spans: list[VersionSpan]


def _begin_span(running: _Running, now: float, version: PolicyVersion) -> None:
    share = (now - running.started) / running.latency_s if running.latency_s else 1.0
    num_tokens = len(running.response_ids)
    first = min(int(share * num_tokens), num_tokens - 1)
    if running.spans[-1][0] == first:
        running.spans.pop()
    running.spans.append((first, version.incarnation, version.number))


def _finished(running: _Running, now: float) -> FinishedSample:
    limit = running.request.sampling.max_tokens
    return FinishedSample(
        response_ids=running.response_ids[:limit],
        logprobs=running.logprobs[:limit],
        version_spans=[span for span in running.spans if span[0] < limit],
        finish_reason="length" if len(running.response_ids) > limit else "stop",
        generate_s=now - running.submitted,
        engine_queue_s=running.started - running.submitted,
        num_preempted=0,
    )


class ScriptedPart:
    """Compute nothing for the scripted engine: a follower only stays."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def start(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return after ``close``."""
        self._closed.wait()

    def close(self) -> None:
        """End ``wait``."""
        self._closed.set()
