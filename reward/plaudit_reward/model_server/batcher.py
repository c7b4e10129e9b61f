"""Batch dynamically: a bounded queue of sequences, one forward pass at a time, results as they finish.

While a pass runs, the queue fills; the next pass takes from it (``batching``). The server never waits for a batch to
fill: when idle, it computes a single sequence at once.
"""

from __future__ import annotations

import asyncio
import bisect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from plaudit_reward.model_server.batching import choose_neighbours, choose_oldest
from plaudit_reward.model_server.series import ModelServerSeries

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
    """The sizes of queue and batches."""

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
    done, without waiting for an event loop that is busy with requests.

    Args:
        forward: from token ids to logits, sequences in the same order; runs in that thread.
        occupy: called between two passes, when the server goes to sleep or wakes.
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

        Raises:
            QueueFullError: they do not fit into the queue; none of them was queued.
            ShuttingDownError: the server accepts no more requests.
            ForwardError: their pass failed.
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

        Raises:
            ForwardError: the weights could not be moved; the server shuts down.
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
            self._measure(batch, began_s)

    def _take(self) -> list[_Waiting]:
        """Return the next pass; wait for a sequence to compute. Empty after a stop, also if sequences wait in sleep."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._by_length and not self._asleep))
            if not self._by_length or self._asleep:
                return []
            batch = self._oldest() if self._limits.max_padding is None else self._neighbours(self._limits.max_padding)
            for one in batch:
                self._forget(one)
            self._computed = len(batch)
            return batch

    def _oldest(self) -> list[_Waiting]:
        lengths = (one.length for one in self._by_arrival.values())
        return list(islice(self._by_arrival.values(), choose_oldest(lengths, self._limits.max_batch_tokens)))

    def _neighbours(self, max_padding: int) -> list[_Waiting]:
        oldest = bisect.bisect_left(self._by_length, next(iter(self._by_arrival.values())))
        lengths = _Lengths(self._by_length)
        return self._by_length[choose_neighbours(lengths, oldest, self._limits.max_batch_tokens, max_padding)]

    def _measure(self, batch: list[_Waiting], began_s: float) -> None:
        lengths = [one.length for one in batch]
        padding = 0 if self._limits.max_padding is None else max(lengths) * len(lengths) - sum(lengths)
        self._series.computed(lengths, padding, [began_s - one.since_s for one in batch], began_s)

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
