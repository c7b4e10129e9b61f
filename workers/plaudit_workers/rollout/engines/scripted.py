"""An engine without a model: responses are drawn from a script instead of a policy. For tests and for load generation.

Everything it says of a sample (tokens, log-probabilities, length, latency) follows from the request's seed alone, so
runs can be repeated; policy versions are honoured as a real engine would: a switch in the middle of a response shows
in its version spans. ``engine.kind: scripted`` selects it; it is never a default.

``engine.arguments`` (camelCase in YAML)::

    latencySeconds: {kind: uniform, low: 0.2, high: 2.0}      # constant · uniform · exponential · lognormal
    responseTokens: {kind: constant, value: 64}
    vocabularySize: 16
    loadSeconds: 0.02
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.rollout.engines.outbox import Outbox
from plaudit_workers.rollout.engines.protocol import (
    EngineStats,
    FinishedSample,
    InFlight,
    Outcome,
    SampleRequest,
    VersionSpan,
)
from plaudit_workers.rollout.engines.script import Script


@dataclass(slots=True)
class _Running:
    request: SampleRequest
    submitted: float
    started: float
    latency_s: float
    num_tokens: int
    logprobs: list[float]
    response_ids: list[int]
    spans: list[VersionSpan] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class ScriptedEngine:
    """Plays a script; see the module's text.

    Args:
        script: distributions and sizes.
        max_concurrent_samples: how many run at once; the rest waits, first come first served.
    """

    def __init__(self, script: Script, *, max_concurrent_samples: int = 256) -> None:
        self._script = script
        self._max_concurrent_samples = max_concurrent_samples
        self._waiting: deque[tuple[SampleRequest, float]] = deque()
        self._running: dict[str, _Running] = {}
        self._version: PolicyVersion | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox = Outbox()
        self._num_finished = 0
        self._num_response_tokens = 0

    async def start(self) -> None:
        """Nothing to prepare."""

    def submit(self, request: SampleRequest) -> None:
        """Starts the sample, or queues it while all places are taken or no weights are held."""
        self._waiting.append((request, time.monotonic()))
        self._start_waiting()

    def cancel(self, ids: Sequence[str]) -> None:
        """Forgets these requests."""
        unwanted = set(ids)
        self._waiting = deque(item for item in self._waiting if item[0].id not in unwanted)
        for sample_id in unwanted & self._running.keys():
            timer = self._running.pop(sample_id).timer
            if timer is not None:
                timer.cancel()
        self._freed()

    def finished(self) -> AsyncIterator[list[Outcome]]:
        """Yields finished samples in batches."""
        return self._outbox.read()

    async def load_weights(self, path: Path, version: PolicyVersion, in_flight: InFlight = "continue") -> None:
        """Takes ``load_seconds`` and holds ``version`` then; the folder is not read, ``recompute`` costs nothing."""
        await asyncio.sleep(self._script.load_seconds)
        if in_flight == "drain":
            self._draining = True
            await self._idle.wait()
            self._draining = False
        self._version = version
        now = time.monotonic()
        for running in self._running.values():
            _begin_span(running, now, version)
        self._start_waiting()

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """None: there is no model."""
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """The ids themselves, as words."""
        return " ".join(map(str, ids))

    def stats(self) -> EngineStats:
        """Counts since the start."""
        return EngineStats(len(self._waiting) + len(self._running), self._num_finished, self._num_response_tokens)

    async def close(self) -> None:
        """Stops all timers."""
        self.cancel([*self._running, *(request.id for request, _ in self._waiting)])
        self._outbox.close()

    def _start_waiting(self) -> None:
        while (
            self._waiting
            and self._version is not None
            and not self._draining
            and len(self._running) < self._max_concurrent_samples
        ):
            request, submitted = self._waiting.popleft()
            running = self._draw(request, submitted)
            running.spans.append((0, self._version.incarnation, self._version.number))
            running.timer = asyncio.get_running_loop().call_later(running.latency_s, self._finish, request.id)
            self._running[request.id] = running
            self._idle.clear()

    def _draw(self, request: SampleRequest, submitted: float) -> _Running:
        random = np.random.default_rng(request.seed & (2**63 - 1))
        num_tokens = max(1, round(self._script.response_tokens.draw(random)))
        latency_s = max(0.0, self._script.latency_seconds.draw(random))
        response_ids = random.integers(0, self._script.vocabulary_size, num_tokens)
        logprobs = np.log(random.uniform(0.05, 1.0, num_tokens))
        return _Running(
            request=request,
            submitted=submitted,
            started=time.monotonic(),
            latency_s=latency_s,
            num_tokens=num_tokens,
            response_ids=response_ids.tolist(),
            logprobs=logprobs.tolist(),
        )

    def _finish(self, sample_id: str) -> None:
        running = self._running.pop(sample_id)
        finished = _finished(running, time.monotonic())
        self._num_finished += 1
        self._num_response_tokens += len(finished.response_ids)
        self._outbox.put([finished])
        self._freed()

    def _freed(self) -> None:
        self._start_waiting()
        if not self._running:
            self._idle.set()


def _begin_span(running: _Running, now: float, version: PolicyVersion) -> None:
    share = (now - running.started) / running.latency_s if running.latency_s else 1.0
    first = min(int(share * running.num_tokens), running.num_tokens - 1)
    if running.spans[-1][0] == first:
        running.spans.pop()
    running.spans.append((first, version.incarnation, version.number))


def _finished(running: _Running, now: float) -> FinishedSample:
    limit = running.request.sampling.max_tokens
    cut = running.num_tokens > limit
    return FinishedSample(
        id=running.request.id,
        response_ids=running.response_ids[:limit],
        logprobs=running.logprobs[:limit],
        version_spans=[span for span in running.spans if span[0] < limit],
        finish_reason="length" if cut else "stop",
        generate_s=now - running.submitted,
        engine_queue_s=running.started - running.submitted,
        num_preempted=0,
    )
