"""The dynamic batcher: a bounded queue of sequences, one forward pass at a time, results as they finish.

While a pass runs the queue fills; the next pass takes from what waits then (``batching``). Nothing waits for a batch to
become full: an idle server answers a single sequence at once.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from plaudit_reward.model_server.batching import choose_neighbours, choose_oldest
from plaudit_reward.model_server.series import Series

Logits = list[float]
Forward = Callable[[Sequence[Sequence[int]]], list[Logits]]


class QueueFullError(Exception):
    """More would wait than the server lets wait; ask again later."""


class StoppedError(Exception):
    """The server is ending: this request has to go elsewhere."""


class ForwardError(Exception):
    """The forward pass with this request failed; the server ends."""


@dataclass(frozen=True)
class BatchLimits:
    """Sizes of queue and batches."""

    max_batch_tokens: int = 16_384
    """Tokens of a forward pass, padding included."""
    max_padding: int | None = 64
    """Padding that one more sequence may bring: what a forward pass costs besides its tokens, in tokens. None: passes
    are packed, there is no padding."""
    max_queue: int = 4096
    """Sequences that wait or are computed."""


@dataclass(order=True)
class _Waiting:
    length: int
    number: int
    """Of arrival."""
    tokens: Sequence[int]
    result: asyncio.Future[Logits]
    since_s: float


class Batcher:
    """Computes sequences of many requests together.

    Args:
        forward: from token ids to logits, sequences in the same order; runs in a thread of its own.
        limits: sizes.
        series: what is measured.
    """

    def __init__(self, forward: Forward, limits: BatchLimits, series: Series) -> None:
        self._forward = forward
        self._limits = limits
        self._series = series
        self._by_length: list[_Waiting] = []
        self._by_arrival: dict[int, _Waiting] = {}
        self._computed = 0
        self._arrivals = 0
        self._changed = asyncio.Event()
        self._stopping = False

    @property
    def max_queue(self) -> int:
        """The most sequences that may wait."""
        return self._limits.max_queue

    async def logits(self, sequences: Sequence[Sequence[int]]) -> list[Logits]:
        """Queues all sequences of a request and waits for their logits, in the same order.

        Cancelling it takes those out of the queue that are not being computed yet.

        Raises:
            QueueFullError: they do not fit into the queue; none of them was queued.
            StoppedError: the server takes nothing more.
            ForwardError: their pass failed.
        """
        if self._stopping:
            raise StoppedError
        if len(self._by_length) + self._computed + len(sequences) > self._limits.max_queue:
            raise QueueFullError
        waiting = [self._enqueue(tokens) for tokens in sequences]
        try:
            return await asyncio.gather(*(one.result for one in waiting))
        finally:
            for one in waiting:
                self._forget(one)

    async def run(self) -> None:
        """Computes until ``stop`` was called and nothing waits any more.

        Whatever ``forward`` raises ends the server: requests are checked before they are queued, so it is the device
        or its memory that failed, and a fresh process is the only cure.
        """
        try:
            with ThreadPoolExecutor(1, "forward") as thread:
                while self._by_length or not self._stopping:
                    if self._by_length:
                        await self._compute(self._take(), thread)
                    else:
                        self._changed.clear()
                        await self._changed.wait()
        finally:
            self._stopping = True
            for one in self._by_length:
                if not one.result.done():
                    one.result.set_exception(StoppedError())

    def stop(self) -> None:
        """Takes nothing more; ``run`` ends when what was taken is done."""
        self._stopping = True
        self._changed.set()

    def _enqueue(self, tokens: Sequence[int]) -> _Waiting:
        self._arrivals += 1
        result: asyncio.Future[Logits] = asyncio.get_running_loop().create_future()
        one = _Waiting(len(tokens), self._arrivals, tokens, result, time.perf_counter())
        bisect.insort(self._by_length, one)
        self._by_arrival[one.number] = one
        self._series.queued(len(self._by_length))
        self._changed.set()
        return one

    def _take(self) -> list[_Waiting]:
        batch = self._oldest() if self._limits.max_padding is None else self._neighbours(self._limits.max_padding)
        for one in batch:
            self._forget(one)
        return batch

    def _oldest(self) -> list[_Waiting]:
        lengths = (one.length for one in self._by_arrival.values())
        return list(islice(self._by_arrival.values(), choose_oldest(lengths, self._limits.max_batch_tokens)))

    def _neighbours(self, max_padding: int) -> list[_Waiting]:
        oldest = bisect.bisect_left(self._by_length, next(iter(self._by_arrival.values())))
        lengths = _Lengths(self._by_length)
        return self._by_length[choose_neighbours(lengths, oldest, self._limits.max_batch_tokens, max_padding)]

    async def _compute(self, batch: list[_Waiting], thread: ThreadPoolExecutor) -> None:
        began_s = time.perf_counter()
        self._computed = len(batch)
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(thread, self._forward, [one.tokens for one in batch])
        except Exception as error:
            for one in batch:
                if not one.result.done():
                    one.result.set_exception(ForwardError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._computed = 0
        self._measure(batch, began_s)
        for one, logits in zip(batch, results, strict=True):
            if not one.result.done():
                one.result.set_result(logits)

    def _measure(self, batch: list[_Waiting], began_s: float) -> None:
        lengths = [one.length for one in batch]
        padding = 0 if self._limits.max_padding is None else max(lengths) * len(lengths) - sum(lengths)
        self._series.computed(lengths, padding, [began_s - one.since_s for one in batch], began_s)

    def _forget(self, one: _Waiting) -> None:
        """Takes a sequence out of the queue, if it is still there."""
        if self._by_arrival.pop(one.number, None) is not None:
            del self._by_length[bisect.bisect_left(self._by_length, one)]
            self._series.queued(len(self._by_length))


class _Lengths(Sequence[int]):
    """The lengths of waiting sequences, seen as a sequence without a copy."""

    def __init__(self, waiting: list[_Waiting]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, place: int) -> int:  # type: ignore[override]
        return self._waiting[place].length
