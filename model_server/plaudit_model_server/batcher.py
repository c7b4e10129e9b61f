"""Batch dynamically: a bounded queue of sequences, one forward pass at a time, results as they finish.

While a pass runs, the queue fills; the next pass takes from it. The server never waits for a batch to fill: when idle,
it computes a single sequence at once. The server's settings, messages and series are defined here too, without torch.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


def choose_oldest(lengths: Iterable[int], max_tokens: int) -> int:
    """Return the number of longest-waiting sequences that fit into one packed pass; a longer sequence goes alone.

    A packed pass costs as much as its tokens, whatever their lengths: first come, first served. ``lengths`` are the
    tokens of all waiting sequences, in order of arrival; at least one.
    """
    return max(1, sum(1 for _ in takewhile(lambda tokens: tokens <= max_tokens, accumulate(lengths))))


def choose_neighbours(lengths: Sequence[int], oldest: int, max_tokens: int, max_padding: int) -> slice:
    """Choose the sequences of a padded pass: neighbours of the one that has waited longest, so that none starves.

    A padded pass costs as much as its padded tokens (``len * longest``), plus a fixed part. So sequences of about the
    same length go together, and one joins only while the padding that it adds costs less than a separate forward pass.

    Args:
        lengths: tokens of all waiting sequences, in ascending order.
        oldest: index of the sequence that has waited longest; it is always chosen.
        max_tokens: most tokens of a forward pass, padding included; a longer sequence goes alone.
        max_padding: most padding, in tokens, that one more sequence may add.
    """
    start, stop = oldest, oldest + 1
    while True:
        count, longest = stop - start, lengths[stop - 1]
        shorter = longest - lengths[start - 1] if start else math.inf
        longer = (lengths[stop] - longest) * count if stop < len(lengths) else math.inf
        padding, width = min((shorter, longest), (longer, lengths[stop] if stop < len(lengths) else longest))
        if padding > max_padding or (count + 1) * width > max_tokens:
            return slice(start, stop)
        if shorter <= longer:
            start -= 1
        else:
            stop += 1


_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ModelServerSeries:
    """Hold the series of ``/metrics``, separate for queue, batches and inference."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        name = "plaudit_model_server_{}".format
        self._queue = Gauge(name("queue_sequences"), "Sequences that wait", registry=own)
        self._wait = Histogram(
            name("queue_wait_seconds"), "From a sequence's arrival to its pass", registry=own, buckets=_SECONDS
        )
        self._sequences = Histogram(
            name("batch_sequences"), "Sequences of a forward pass", registry=own, buckets=_SEQUENCES
        )
        self._tokens = Histogram(
            name("batch_tokens"), "Tokens of a forward pass without padding", registry=own, buckets=_TOKENS
        )
        self._padding = Counter(name("padding_tokens"), "Tokens computed as padding", registry=own)
        self._inference = Histogram(name("inference_seconds"), "A forward pass", registry=own, buckets=_SECONDS)
        self._requests = Counter(name("requests"), "Requests to /classify by HTTP status", ["code"], registry=own)

    def count_queue(self, sequences: Callable[[], int]) -> None:
        """Call ``sequences`` for the number of waiting sequences at each scrape."""
        self._queue.set_function(sequences)

    def computed(self, lengths: Sequence[int], padding: int, waits_s: Sequence[float], began_s: float) -> None:
        """Record a finished forward pass that began at ``began_s`` of ``time.perf_counter``."""
        self._inference.observe(time.perf_counter() - began_s)
        for wait_s in waits_s:
            self._wait.observe(wait_s)
        self._sequences.observe(len(lengths))
        self._tokens.observe(sum(lengths))
        self._padding.inc(padding)

    def answered(self, code: int) -> None:
        """Record a response."""
        self._requests.labels(str(code)).inc()


Logits = list[float]
Forward = Callable[[Sequence[Sequence[int]]], list[Logits]]
Occupy = Callable[[bool], None]
"""Moves the weights to the device (True), or to host memory (False)."""


class QueueFullError(Exception):
    """The request does not fit into the queue; retry later."""


class ShuttingDownError(Exception):
    """The server is shutting down; send the request to another replica."""


class ForwardError(Exception):
    """The forward pass with this request failed; the server shuts down."""


@dataclass(frozen=True)
class BatchLimits:
    """Limit the sizes of queue and batches."""

    max_batch_tokens: int = 16_384
    """Tokens of a forward pass, including padding."""
    max_padding: int | None = 64
    """Padding that one more sequence may add: the fixed cost of a forward pass, in tokens. None: passes are packed,
    without padding."""
    max_queue: int = 4096
    """Sequences that wait or are being computed."""


@dataclass(order=True)
class _Waiting:
    length: int
    number: int
    """Time of arrival."""
    tokens: Sequence[int]
    result: asyncio.Future[Logits]
    since_s: float


class Batcher:
    """Compute sequences of many requests together.

    Requests arrive and finish on the event loop. A separate thread starts each pass as soon as the previous one is
    done, without waiting for an event loop that is busy with requests. There ``forward`` turns token ids into logits,
    in the same order; ``occupy`` is called between two passes, when the server goes to sleep or wakes.
    """

    def __init__(
        self, forward: Forward, limits: BatchLimits, series: ModelServerSeries, occupy: Occupy = lambda _: None
    ) -> None:
        self._forward = forward
        self._occupy = occupy
        self._limits = limits
        self._series = series
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._by_length: list[_Waiting] = []
        self._by_arrival: dict[int, _Waiting] = {}
        self._computed = 0
        self._arrivals = 0
        self._stopping = False
        self._asleep = False
        self._moving = asyncio.Lock()
        """Held while the weights move: one move at a time."""
        series.count_queue(lambda: len(self._by_length))

    @property
    def max_queue(self) -> int:
        """Return the most sequences that may wait."""
        return self._limits.max_queue

    async def logits(self, sequences: Sequence[Sequence[int]]) -> list[Logits]:
        """Queue all sequences of a request and return their logits, in the same order.

        Cancelling it removes those from the queue that are not being computed yet.

        Raises ``QueueFullError`` if they do not fit into the queue (then none of them was queued), and
        ``ShuttingDownError`` or ``ForwardError``.
        """
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._stopping:
                raise ShuttingDownError
            if len(self._by_length) + self._computed + len(sequences) > self._limits.max_queue:
                raise QueueFullError
            waiting = [self._enqueue(tokens, loop.create_future()) for tokens in sequences]
            self._changed.notify_all()
        try:
            return await asyncio.gather(*(one.result for one in waiting))
        finally:
            with self._changed:
                for one in waiting:
                    self._forget(one)

    async def run(self) -> None:
        """Compute until ``stop`` is called and the queue is empty.

        Any exception of ``forward`` ends the server: requests are checked before they are queued, so the device or its
        memory has failed, and only a new process helps.
        """
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "forward") as thread:
            try:
                await loop.run_in_executor(thread, self._compute_all, loop)
            finally:
                self.stop()
                self._refuse_rest()

    def stop(self) -> None:
        """Accept no more requests; ``run`` ends when the accepted ones are done."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    async def sleep(self) -> None:
        """Finish the pass under way and free the device; what is in the queue, and what arrives, waits.

        Raises ``ForwardError`` if the weights could not be moved; the server then shuts down.
        """
        async with self._moving:
            with self._changed:
                if self._asleep:
                    return
                self._asleep = True
            await asyncio.to_thread(self._wait_for_pass)
            await self._move(to_device=False)

    async def wake_up(self) -> None:
        """Take the device again and continue with the queue. Raises as ``sleep`` does."""
        async with self._moving:
            if not self._asleep:
                return
            await self._move(to_device=True)
            with self._changed:
                self._asleep = False
                self._changed.notify_all()

    def _wait_for_pass(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._computed or self._stopping)

    async def _move(self, *, to_device: bool) -> None:
        try:
            await asyncio.to_thread(self._occupy, to_device)
        except Exception as error:
            self.stop()
            raise ForwardError(f"the weights could not be moved: {error}") from error

    def _enqueue(self, tokens: Sequence[int], result: asyncio.Future[Logits]) -> _Waiting:
        self._arrivals += 1
        one = _Waiting(len(tokens), self._arrivals, tokens, result, time.perf_counter())
        bisect.insort(self._by_length, one)
        self._by_arrival[one.number] = one
        return one

    def _refuse_rest(self) -> None:
        with self._changed:
            rest = list(self._by_arrival.values())
            for one in rest:
                self._forget(one)
        for one in rest:
            if not one.result.done():
                one.result.set_exception(ShuttingDownError())

    def _compute_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Compute passes until stopped; the thread's main loop."""
        while batch := self._take():
            began_s = time.perf_counter()
            try:
                results = self._forward([one.tokens for one in batch])
            except Exception as error:
                failure = error if isinstance(error, ForwardError) else ForwardError(f"{type(error).__name__}: {error}")
                loop.call_soon_threadsafe(_fail, batch, failure)
                raise
            with self._changed:
                self._computed = 0  # before the results are returned: the queue has room again
                self._changed.notify_all()
            loop.call_soon_threadsafe(_answer, batch, results)
            lengths = [one.length for one in batch]
            padding = 0 if self._limits.max_padding is None else max(lengths) * len(lengths) - sum(lengths)
            self._series.computed(lengths, padding, [began_s - one.since_s for one in batch], began_s)

    def _take(self) -> list[_Waiting]:
        """Return the next pass; wait for a sequence to compute. Empty after a stop, also if sequences wait in sleep."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._by_length and not self._asleep))
            if not self._by_length or self._asleep:
                return []
            waiting, limits = self._by_arrival.values(), self._limits
            if limits.max_padding is None:
                count = choose_oldest((one.length for one in waiting), limits.max_batch_tokens)
                batch = list(islice(waiting, count))
            else:
                oldest, lengths = bisect.bisect_left(self._by_length, next(iter(waiting))), _Lengths(self._by_length)
                chosen = choose_neighbours(lengths, oldest, limits.max_batch_tokens, limits.max_padding)
                batch = self._by_length[chosen]
            for one in batch:
                self._forget(one)
            self._computed = len(batch)
            return batch

    def _forget(self, one: _Waiting) -> None:
        """Remove a sequence from the queue, if it still waits."""
        if self._by_arrival.pop(one.number, None) is not None:
            del self._by_length[bisect.bisect_left(self._by_length, one)]


def _answer(batch: list[_Waiting], results: list[Logits]) -> None:
    for one, logits in zip(batch, results, strict=True):
        if not one.result.done():
            one.result.set_result(logits)


def _fail(batch: list[_Waiting], error: ForwardError) -> None:
    for one in batch:
        if not one.result.done():
            one.result.set_exception(error)


class _Lengths(Sequence[int]):
    """View the lengths of waiting sequences, without a copy."""

    def __init__(self, waiting: list[_Waiting]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, place: int) -> int:  # type: ignore[override]
        return self._waiting[place].length


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request a classification as from vLLM's ``/classify``, field by field (vLLM 0.32): of ``input`` or ``messages``.

    ``plaudit_reward.endpoint.served`` writes it among others. Fields of vLLM that change the result
    (``truncate_prompt_tokens``, ``chat_template``, …) are not supported here. Unknown fields are refused, because
    ignoring one would change the result silently.
    """

    input: str | list[str | int | list[int]] | None = None
    """A text or the token ids of one; a list of texts, or of lists of token ids. One kind only."""
    messages: list[dict[str, Any]] | None = None
    """One chat, rendered by the model's chat template."""
    use_activation: bool | None = None
    """False: return the logits. Default: return their activation, as vLLM does."""
    add_special_tokens: bool | None = None
    """Default: true for texts, false for chats, whose template writes them."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    model: str | None = None
    user: str | None = None
    request_id: str | None = None


class Classification(msgspec.Struct):
    """Hold one sequence's result."""

    index: int
    label: str | None
    """Label of the largest value."""
    probs: list[float]
    """Logits or, with activation, probabilities; one for each label."""
    num_classes: int


class Usage(msgspec.Struct):
    """Count the tokens of a request, including special ones."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyResponse(msgspec.Struct):
    """Respond with one ``Classification`` for each sequence, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class ErrorInfo(msgspec.Struct):
    """Explain why a request failed."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """Form the body of every response with a status other than 200."""

    error: ErrorInfo


Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ModelSettings:
    """Name the model and how to compute it."""

    source: str
    """Hub id or folder."""
    revision: str = "main"
    dtype: Dtype = "bfloat16"
    device: str = ""
    """``cpu``, ``cuda``, ``cuda:1``; empty: a GPU if one is available."""
    max_model_length: int | None = None
    """Tokens of a sequence; None: the lower of the model's and its tokenizer's limit."""
    trust_remote_code: bool = False
