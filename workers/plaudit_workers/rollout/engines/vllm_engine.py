"""``engine.kind: vllm``: the asyncio face of a vLLM engine that one thread of this process drives.

Works on a GPU (tensor parallelism included) and, with vLLM's CPU build, without one; also inside an actor whose event
loop is not on the main thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.rollout.engines.outbox import Outbox
from plaudit_workers.rollout.engines.protocol import (
    EngineFailedError,
    EngineStats,
    FinishedSample,
    InFlight,
    Outcome,
    SampleRequest,
)
from plaudit_workers.rollout.engines.resolve_future import settle
from plaudit_workers.rollout.engines.vllm_arguments import (
    VllmSettings,
    engine_arguments,
    has_gpu,
    is_untied,
    prepare_environment,
)

if TYPE_CHECKING:
    from plaudit_workers.rollout.engines.vllm_loop import VllmLoop


class VllmEngine:
    """An ``Engine`` on vLLM.

    Args:
        settings: model and sizes.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._outbox = Outbox()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._vllm: VllmLoop | None = None
        self._tokenizer: Any = None
        self._error: EngineFailedError | None = None
        self._awaited: set[Future[Any]] = set()
        self._unfinished: set[str] = set()
        self._num_finished = 0
        self._num_response_tokens = 0

    @classmethod
    def from_job(cls, job: RLJob) -> VllmEngine:
        """The engine that ``spec.model`` and ``spec.rollout`` describe."""
        return cls(VllmSettings.from_job(job))

    async def start(self) -> None:
        """Builds the engine in its thread; its weights are random until the first ``load_weights``."""
        self._loop = asyncio.get_running_loop()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(started)

    def submit(self, request: SampleRequest) -> None:
        """Hands one request to the thread."""
        vllm, submitted = self._started(), time.monotonic()
        self._unfinished.add(request.id)
        vllm.call(lambda: vllm.submit(request, submitted))

    def cancel(self, ids: Sequence[str]) -> None:
        """Forgets these requests."""
        vllm = self._started()
        self._unfinished.difference_update(ids)
        vllm.call(lambda: vllm.cancel(ids))

    def finished(self) -> AsyncIterator[list[Outcome]]:
        """Yields what ended, a step's worth or more at a time."""
        return self._outbox.read()

    async def load_weights(self, path: Path, version: PolicyVersion, in_flight: InFlight = "continue") -> None:
        """Switches the weights between two steps."""
        vllm = self._started()
        await self._answer(lambda done: vllm.load(path, version, in_flight, done))

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """Log-probabilities of ``ids[1:]`` under the held weights, computed beside what runs."""
        vllm = self._started()
        logprobs: list[float] = await self._answer(lambda done: vllm.probe(ids, done))
        return logprobs

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def stats(self) -> EngineStats:
        """Counts since the start."""
        return EngineStats(len(self._unfinished), self._num_finished, self._num_response_tokens)

    async def close(self) -> None:
        """Ends the thread after the step that it is in."""
        if self._vllm is not None:
            self._vllm.call(self._vllm.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._outbox.close()

    def _started(self) -> VllmLoop:
        if self._error is not None:
            raise self._error
        if self._vllm is None:
            raise EngineFailedError("the engine is not started")
        return self._vllm

    async def _answer(self, ask: Callable[[Future[Any]], None]) -> Any:
        done: Future[Any] = Future()
        self._awaited.add(done)
        try:
            self._started().call(lambda: ask(done))
            return await asyncio.wrap_future(done)
        finally:
            self._awaited.discard(done)

    def _run(self, started: Future[None]) -> None:
        try:
            self._vllm, self._tokenizer = self._build()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._vllm.run()
        except Exception as error:
            self._post(partial(self._fail, error))
        finally:
            self._vllm.shut_down()

    def _build(self) -> tuple[VllmLoop, Any]:
        prepare_environment(self._settings.source)
        import torch
        from vllm.v1.engine.llm_engine import LLMEngine

        from plaudit_workers.rollout.engines.vllm_loop import VllmLoop

        if not has_gpu():
            # The variable is too late where something else has imported torch before.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        arguments = engine_arguments(self._settings)
        engine = LLMEngine.from_engine_args(arguments)
        # Each finished request keeps its times; vLLM's own Prometheus series would cost 5 % of a small model's speed.
        engine.logger_manager = None
        return VllmLoop(engine, self._report, untied=is_untied(arguments)), engine.get_tokenizer()

    def _report(self, outcomes: list[Outcome]) -> None:
        self._post(partial(self._take_in, outcomes))

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _take_in(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._unfinished.discard(outcome.id)
            if isinstance(outcome, FinishedSample):
                self._num_finished += 1
                self._num_response_tokens += len(outcome.response_ids)
        self._outbox.put(outcomes)

    def _fail(self, error: Exception) -> None:
        self._error = EngineFailedError(f"vLLM failed: {error!r}")
        self._outbox.fail(self._error)
        for done in self._awaited:
            settle(done, error=self._error)
