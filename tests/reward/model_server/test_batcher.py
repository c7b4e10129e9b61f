"""The queue: bounds, order of results, cancelled requests, the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from plaudit_model_server.batcher import (
    Batcher,
    BatchLimits,
    ForwardError,
    ModelServerSeries,
    QueueFullError,
    ShuttingDownError,
)


class Sums:
    """A forward pass that adds token ids up; it waits while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[list[int]] = []

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.passes.append([len(tokens) for tokens in sequences])
        self.gate.wait(30)
        return [[float(sum(tokens))] for tokens in sequences]


@asynccontextmanager
async def running(forward: Sums, **limits: int | None) -> AsyncIterator[Batcher]:
    batcher = Batcher(forward, BatchLimits(**limits), ModelServerSeries())
    computing = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        forward.gate.set()
        batcher.stop()
        await computing


async def test_waiting_requests_are_computed_together_by_length_and_answered_in_order() -> None:
    sums = Sums()
    async with running(sums, max_padding=5) as batcher:
        sums.gate.clear()
        first = asyncio.create_task(batcher.logits([[1]]))
        while not sums.passes:
            await asyncio.sleep(0)
        rest = asyncio.create_task(batcher.logits([[2] * 100, [3] * 2, [4] * 98, [5]]))
        await asyncio.sleep(0.01)
        sums.gate.set()
        assert await rest == [[200.0], [6.0], [392.0], [5.0]]
        assert await first == [[1.0]]
    assert sums.passes == [[1], [98, 100], [1, 2]]


async def test_a_server_sleeps_after_the_pass_under_way_and_computes_what_waits_when_it_wakes() -> None:
    sums, moves = Sums(), []
    batcher = Batcher(sums, BatchLimits(), ModelServerSeries(), lambda device: moves.append((device, len(sums.passes))))
    computing = asyncio.create_task(batcher.run())
    sums.gate.clear()
    first = asyncio.create_task(batcher.logits([[1]]))
    while not sums.passes:
        await asyncio.sleep(0)
    sleeping = asyncio.create_task(batcher.sleep())
    await asyncio.sleep(0.05)
    assert not sleeping.done()
    sums.gate.set()
    await asyncio.gather(sleeping, batcher.sleep())  # a second time changes nothing
    assert await first == [[1.0]]
    second = asyncio.create_task(batcher.logits([[2]]))
    await asyncio.sleep(0.05)
    assert (second.done(), moves) == (False, [(False, 1)])
    await batcher.wake_up()
    assert await second == [[2.0]]
    assert moves == [(False, 1), (True, 1)]
    batcher.stop()
    await computing


async def test_a_server_that_is_stopped_in_its_sleep_refuses_what_waits() -> None:
    sums = Sums()
    async with running(sums) as batcher:
        await batcher.sleep()
        waiting = asyncio.create_task(batcher.logits([[1]]))
        await asyncio.sleep(0)
        batcher.stop()
        with pytest.raises(ShuttingDownError):
            await waiting
    assert sums.passes == []


async def test_a_server_whose_weights_cannot_move_back_shuts_down() -> None:
    def occupy(device: bool) -> None:
        if device:
            raise RuntimeError("out of memory")

    batcher = Batcher(Sums(), BatchLimits(), ModelServerSeries(), occupy)
    computing = asyncio.create_task(batcher.run())
    await batcher.sleep()
    with pytest.raises(ForwardError, match="could not be moved: out of memory"):
        await batcher.wake_up()
    await computing
    with pytest.raises(ShuttingDownError):
        await batcher.logits([[1]])


async def test_packed_requests_are_computed_in_the_order_of_arrival() -> None:
    sums = Sums()
    async with running(sums, max_padding=None, max_batch_tokens=101) as batcher:
        sums.gate.clear()
        first = asyncio.create_task(batcher.logits([[1]]))
        while not sums.passes:
            await asyncio.sleep(0)
        rest = asyncio.create_task(batcher.logits([[2] * 100, [3], [4] * 98, [5]]))
        await asyncio.sleep(0.01)
        sums.gate.set()
        assert await rest == [[200.0], [3.0], [392.0], [5.0]]
        assert await first == [[1.0]]
    assert sums.passes == [[1], [100, 1], [98, 1]]


async def test_beyond_the_bound_nothing_is_queued() -> None:
    sums = Sums()
    async with running(sums, max_queue=3) as batcher:
        sums.gate.clear()
        taken = [asyncio.create_task(batcher.logits([[1], [1]])), asyncio.create_task(batcher.logits([[1]]))]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError):
            await batcher.logits([[1]])
        sums.gate.set()
        await asyncio.gather(*taken)
        assert await batcher.logits([[7], [8], [9]]) == [[7.0], [8.0], [9.0]]


async def test_a_request_whose_client_left_is_not_computed() -> None:
    sums = Sums()
    async with running(sums, max_queue=3) as batcher:
        sums.gate.clear()
        first = asyncio.create_task(batcher.logits([[1]]))
        while not sums.passes:
            await asyncio.sleep(0)
        left = asyncio.create_task(batcher.logits([[1] * 7, [1] * 8]))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait([left])
        sums.gate.set()
        await first
        assert await batcher.logits([[2], [2], [2]]) == [[2.0], [2.0], [2.0]]
    assert all(length == 1 for lengths in sums.passes for length in lengths)


async def test_a_stop_answers_accepted_requests_and_accepts_no_more() -> None:
    sums = Sums()
    batcher = Batcher(sums, BatchLimits(max_padding=0), ModelServerSeries())
    computing = asyncio.create_task(batcher.run())
    sums.gate.clear()
    taken = asyncio.create_task(batcher.logits([[1], [1, 1], [1, 1, 1]]))
    await asyncio.sleep(0.01)
    batcher.stop()
    with pytest.raises(ShuttingDownError):
        await batcher.logits([[1]])
    sums.gate.set()
    assert await taken == [[1.0], [2.0], [3.0]]
    await computing


async def test_a_failed_forward_pass_ends_the_server_and_all_waiting_requests() -> None:
    def fails(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise RuntimeError("out of memory")

    batcher = Batcher(fails, BatchLimits(max_padding=1), ModelServerSeries())
    failing, waiting = (asyncio.create_task(batcher.logits([[1] * length])) for length in (1, 50))
    await asyncio.sleep(0)
    computing = asyncio.create_task(batcher.run())
    with pytest.raises(ForwardError, match="RuntimeError: out of memory"):
        await failing
    with pytest.raises(ShuttingDownError):
        await waiting
    with pytest.raises(RuntimeError, match="out of memory"):
        await computing
