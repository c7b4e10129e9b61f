"""``engine.kind: vllm``: the asyncio interface of a vLLM engine that one thread of this process drives.

Works on a GPU (tensor parallelism included) and, with vLLM's CPU build, without one; also inside an actor whose event
loop is not on the main thread. Requests go to the thread (``vllm_loop``) each with a future. No heavy imports: vLLM is
imported when the engine starts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import EngineStatus
from plaudit_workers.agents.messages import FinishedSample
from plaudit_workers.images import ImageCache, ImageError, ImageStore, decode_image
from plaudit_workers.rollout.engine import EngineFailedError, RequestRefusedError, SampleRequest, WeightSwitch
from plaudit_workers.rollout.vllm_arguments import (
    VllmSettings,
    engine_arguments,
    is_cpu_build,
    is_untied,
    prepare_environment,
    refuse_hidden_gpus,
)
from plaudit_workers.timeline import imports

if TYPE_CHECKING:
    from PIL.Image import Image

    from plaudit_workers.rollout.vllm_loop import VllmLoop

_NEWEST = 100
_IMAGE_BYTES = 256 << 20
"""Decoded images that are held: the samples of a group have the same."""
FutureResult = tuple[asyncio.Future[Any], Any]
"""A future and its result; an exception is raised to whoever awaits it."""


class VllmEngine:
    """Run an ``Engine`` on vLLM; ``run_folder`` holds the images of prompts."""

    def __init__(self, settings: VllmSettings, run_folder: Path = Path()) -> None:
        self._settings = settings
        store = ImageStore(run_folder)
        self._images = ImageCache(
            lambda digest: decode_image(store.read(digest)), lambda image: 3 * image.width * image.height, _IMAGE_BYTES
        )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._vllm: VllmLoop | None = None
        self._tokenizer: Any = None
        self._stats = VllmStats()
        self._error: EngineFailedError | None = None
        self._awaited: set[asyncio.Future[Any]] = set()
        self._request_ids = map(str, itertools.count())

    async def start(self) -> None:
        """Build the engine in its thread; it samples nothing before the first ``load_weights``."""
        self._loop = asyncio.get_running_loop()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(started)

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Generate one response; see ``Engine.generate``."""
        vllm, request_id, submitted = self._started(), next(self._request_ids), time.monotonic()
        images = await self._decoded(request.images)
        try:
            finished: FinishedSample = await self._answer(
                lambda vllm, future: vllm.submit(Generation(request_id, request, submitted, future, images=images))
            )
        except asyncio.CancelledError:
            vllm.call(partial(vllm.cancel, request_id))
            raise
        return finished

    async def load_weights(self, path: Path, version: PolicyVersion, switch: WeightSwitch = "continue") -> None:
        """Switch the weights between two steps."""
        await self._answer(lambda vllm, future: vllm.switch(WeightLoad(path, version, switch, future)))

    async def sleep(self, switch: WeightSwitch = "continue") -> None:
        """Free the GPUs between two steps; vLLM's CPU build stops generating, but keeps its memory."""
        await self._answer(lambda vllm, future: vllm.switch(Sleep(switch, future)))

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        """Compute the log-probabilities of ``ids[1:]`` under the loaded weights, beside the running samples."""
        logprobs: list[float] = await self._answer(lambda vllm, future: vllm.probe(ids, future))
        return logprobs

    def decode(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """Return the text, unless ``whole`` without special tokens and the token that ended it."""
        from plaudit_workers.tokenizer import text_of

        return text_of(self._tokenizer, ids, whole=whole)

    def status(self) -> EngineStatus | None:
        """Return the engine's figures as of its newest step, and the requests that wait now."""
        status, queued = self._stats.status, self._vllm.num_queued if self._vllm else 0
        return status and msgspec.structs.replace(status, waiting=status.waiting + queued)

    async def close(self) -> None:
        """Stop the thread after its current step."""
        if self._vllm is not None:
            self._vllm.call(self._vllm.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def _decoded(self, digests: Sequence[str]) -> Sequence[Image]:
        """Return a request's images, decoded beside the engine's thread."""
        if not digests:
            return ()
        try:
            return await asyncio.to_thread(lambda: [self._images.get(digest) for digest in digests])
        except ImageError as error:
            raise RequestRefusedError(f"an image of the prompt: {error}") from error

    def _started(self) -> VllmLoop:
        if self._error is not None:
            raise self._error
        if self._vllm is None:
            raise EngineFailedError("the engine is not started")
        return self._vllm

    async def _answer(self, command: Callable[[VllmLoop, asyncio.Future[Any]], None]) -> Any:
        """Run ``command`` in the engine's thread and await the future that it is given."""
        vllm, future = self._started(), asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        try:
            vllm.call(lambda: command(vllm, future))
            return await future
        finally:
            self._awaited.discard(future)

    def _run(self, started: Future[None]) -> None:
        try:
            self._vllm, self._tokenizer = self._build()
        except BaseException as error:
            with suppress(InvalidStateError):
                started.set_exception(error)
            return
        try:
            started.set_result(None)
        except InvalidStateError:  # whoever started it has gone
            self._vllm.shut_down()
            return
        try:
            self._vllm.run()
        except EngineFailedError as error:
            self._post(partial(self._fail, error))
        except Exception as error:
            self._post(partial(self._fail, EngineFailedError(f"vLLM failed: {error!r}")))
        finally:
            self._vllm.shut_down()

    def _build(self) -> tuple[VllmLoop, Any]:
        refuse_hidden_gpus()
        prepare_environment(self._settings.source)
        with imports("imported vLLM"):
            import torch
            from vllm.v1.engine.llm_engine import LLMEngine

            from plaudit_workers.rollout.vllm_loop import VllmLoop
            from plaudit_workers.tokenizer import with_model_ends

        if is_cpu_build():
            # The variable is too late where something else has imported torch before.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        arguments = engine_arguments(self._settings)
        engine = LLMEngine.from_engine_args(arguments)
        engine.logger_manager = self._stats  # each finished request keeps its times
        loop = VllmLoop(
            engine,
            lambda answers: self._post(partial(_resolve, answers)),
            untied=is_untied(arguments),
            adapters=arguments.enable_lora,
            images=self._settings.images is not None,
        )
        return loop, with_model_ends(engine.get_tokenizer(), self._settings.source, self._settings.revision)

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _fail(self, error: EngineFailedError) -> None:
        self._error = error
        _resolve((future, error) for future in self._awaited)


class VllmStats:
    """Stand in for vLLM's ``StatLoggerManager``. The engine's thread records, any thread reads ``status``.

    vLLM's Prometheus series cost 5 % of a small model's speed. This costs a few assignments a step; the rollout's
    heartbeat carries the figures to the metrics service.
    """

    def __init__(self) -> None:
        self.status: EngineStatus | None = None
        """As of the engine's newest step; None before the first."""
        self._first_tokens_s: deque[float] = deque(maxlen=_NEWEST)
        self._mean_s: float | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None) -> None:
        """Keep the figures of one step."""
        if iteration_stats is not None and iteration_stats.time_to_first_tokens_iter:
            self._first_tokens_s.extend(iteration_stats.time_to_first_tokens_iter)
            self._mean_s = sum(self._first_tokens_s) / len(self._first_tokens_s)
        self.status = EngineStatus(
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            scheduler_stats.kv_cache_usage,
            self._mean_s,
        )

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Keep nothing: the rollout's heartbeat reports whether it sleeps."""

    def log(self) -> None:
        """Log nothing; vLLM calls this every few seconds."""


@dataclass(slots=True)
class Generation:
    """Hold one response, from its submission until it is finished."""

    id: str
    request: SampleRequest
    submitted: float
    """Monotonic clock, seconds."""
    future: asyncio.Future[FinishedSample]
    internal_id: str = ""
    """vLLM's own id, while the request is inside vLLM."""
    version: PolicyVersion | None = None
    """Of the adapter that samples it; None where the engine's weights are switched."""
    recomputed: int = 0
    """Preemptions caused by switches of weights, not by a lack of memory."""
    images: Sequence[Image] = ()
    """The decoded images of the request."""


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """Request a switch of weights."""

    path: Path
    version: PolicyVersion
    switch: WeightSwitch
    future: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Request to free the GPUs until the next load."""

    switch: WeightSwitch
    future: asyncio.Future[None]


def _resolve(answers: Iterable[FutureResult]) -> None:
    """Resolve futures on their event loop; those that were cancelled meanwhile are ignored."""
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
