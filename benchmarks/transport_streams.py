"""The roles of ``transport.py`` over Plaudit's streams: what each process does once it is connected."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

from plaudit_wire.messages import PolicyVersion, Prompt, SampleBody, Sampling
from plaudit_wire.records import GenerationRecord, Sample, ScorerRecord, ScoringRecord
from plaudit_workers.stream.calls import Admission, Delivery, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

TOKENS = 512
GROUP_SIZE = 8
WINDOW = 128
RATE_PER_S = 500
SCORE_S = 0.512
BATCH = 64
NO_WAIT = ConsumerOptions(block_s=0.2)

_IDS = struct.pack(f"<{TOKENS}i", *range(TOKENS))
_LOGPROBS = struct.pack(f"<{TOKENS}f", *([-0.5] * TOKENS))
_MASK = bytes([1] * TOKENS)
TEXT = "the answer is 42. " * 110  # about four characters a token
Hops = dict[str, list[float]]


def make_prompt(position: int, incarnation: int) -> Prompt:
    """A prompt of 64 tokens of which 8 samples are wanted."""
    return Prompt(
        group=f"t-{position}-{incarnation}.0",
        position=position,
        split="train",
        step=0,
        n=GROUP_SIZE,
        min_version=PolicyVersion(1, 0),
        seed=position,
        sampling=Sampling(max_tokens=TOKENS),
        data_source="benchmark",
        prompt="What is six times seven? " * 8,
        prompt_ids=_IDS[:256],
        extra_info={"sent": time.monotonic()},
    )


def make_body(prompt: Prompt, index: int, tokens: int = TOKENS) -> SampleBody:
    """A response of so many tokens."""
    times, rest = divmod(tokens, TOKENS)
    return SampleBody(
        response_ids=_IDS * times + _IDS[: 4 * rest],
        logprobs=_LOGPROBS * times + _LOGPROBS[: 4 * rest],
        loss_mask=_MASK * times + _MASK[:rest],
        version_spans=[(0, 1, 0)],
        generation=GenerationRecord("rollout", 1.0, 64, tokens, 0, 0),
        sample=Sample(
            group=prompt.group,
            index=index,
            data_source=prompt.data_source,
            prompt=prompt.prompt,
            response=TEXT * times + TEXT[: len(TEXT) * rest // TOKENS],
            ground_truth="42",
            extra_info={"sent": time.monotonic()},
            response_tokens=tokens,
        ),
    )


def no_op_score() -> ScoringRecord:
    """A score that cost nothing."""
    scorer = ScorerRecord("scored", 1.0, extra={"sent": time.monotonic()})
    return ScoringRecord("scored", 1.0, scorers={"no-op": scorer}, worker="reward")


async def rollout(transport: Transport, groups: int, paced: bool) -> Hops:
    """Publishes every sample of every prompt; paced: one after the other at RATE_PER_S."""
    hops: list[float] = []
    publishing: set[asyncio.Task[None]] = set()
    start = 0.0

    async def publish_paced(delivery: Delivery[Prompt], number: int) -> None:
        for index in range(GROUP_SIZE):
            due = start + (number * GROUP_SIZE + index) / RATE_PER_S
            await asyncio.sleep(max(due - time.monotonic(), 0))
            await publish(transport, delivery, index, make_body(delivery.payload, index))
        consumer.finished(delivery)

    async with Consumer[Prompt](transport, "prompts", "rollout", NO_WAIT) as consumer:
        done = 0
        while done < groups:
            deliveries = await consumer.take(BATCH // GROUP_SIZE)
            received = time.monotonic()
            start = start or received
            hops += [received - d.payload.extra_info["sent"] for d in deliveries]
            if paced:
                _spawn(publishing, *(publish_paced(d, done + i) for i, d in enumerate(deliveries)))
            elif deliveries:
                samples = [(d, i, make_body(d.payload, i)) for d in deliveries for i in range(GROUP_SIZE)]
                await asyncio.gather(*(publish(transport, *sample) for sample in samples))
                for delivery in deliveries:
                    consumer.finished(delivery)
            done += len(deliveries)
        await asyncio.gather(*publishing)
    return {"prompts": hops}


def _spawn(tasks: set[asyncio.Task[None]], *work: Coroutine[Any, Any, None]) -> None:
    for part in work:
        task = asyncio.create_task(part)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def reward(transport: Transport, groups: int, paced: bool) -> Hops:
    """Commits a score for every sample; paced: after SCORE_S, hundreds at a time."""
    hops: list[float] = []
    scoring: set[asyncio.Task[None]] = set()

    async def score(delivery: Delivery[Sample]) -> None:
        await asyncio.sleep(SCORE_S)
        await commit(transport, delivery, no_op_score())
        consumer.finished(delivery)

    async with Consumer[Sample](transport, "samples", "reward", NO_WAIT) as consumer:
        done = 0
        while done < groups * GROUP_SIZE:
            deliveries = await consumer.take(BATCH)
            received = time.monotonic()
            hops += [received - d.payload.extra_info["sent"] for d in deliveries]
            done += len(deliveries)
            if paced:
                _spawn(scoring, *(score(delivery) for delivery in deliveries))
            elif deliveries:
                await asyncio.gather(*(commit(transport, delivery, no_op_score()) for delivery in deliveries))
                for delivery in deliveries:
                    consumer.finished(delivery)
        await asyncio.gather(*scoring)
    return {"samples": hops}


def last_sent(group: Group) -> float:
    """Return the time at which the commit that made the group ready was sent."""
    return max(float(s.scoring.scorers["no-op"].extra["sent"]) for s in group.samples if s.scoring)


async def trainer(transport: Transport, groups: int, paced: bool) -> Hops:
    """Admits groups, up to the window or at the rate, and closes those that are ready."""
    streams = TrainerStreams(transport, StreamLimits(max_open_groups=groups))
    incarnation = await streams.take_over()
    hops: list[float] = []
    under_way: set[asyncio.Task[None]] = set()
    room = asyncio.Semaphore(groups if paced else WINDOW)
    start = time.monotonic()

    async def admit_all() -> None:
        for position in range(groups):
            await room.acquire()
            if paced:
                await asyncio.sleep(max(start + position * GROUP_SIZE / RATE_PER_S - time.monotonic(), 0))
            _spawn(under_way, admit(position))

    async def admit(position: int) -> None:
        if await streams.admit(make_prompt(position, incarnation)) is not Admission.admitted:
            raise RuntimeError(f"group {position} was not admitted")

    async def close(group: Group) -> None:
        await streams.close(group.id, "trained")
        room.release()

    admitting = asyncio.create_task(admit_all())
    taken = 0
    while taken < groups:
        ready = await streams.take_ready(BATCH, 0.5)
        received = time.monotonic()
        hops += [received - last_sent(group) for group in ready]
        _spawn(under_way, *(close(group) for group in ready))
        taken += len(ready)
    await asyncio.gather(admitting, *under_way)
    return {"ready": hops}


ROLES: dict[str, Callable[[Transport, int, bool], Coroutine[Any, Any, Hops]]] = {
    "trainer": trainer,
    "rollout": rollout,
    "reward": reward,
}
