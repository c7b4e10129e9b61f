"""The rollout's side: publishes finished samples, asks what a prompt still lacks."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from plaudit_wire.messages import Body, Prompt, encode_body
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions.scripts import Call, new_call
from plaudit_workers.stream.worker.lease import Delivery, discard

__all__ = ["Publication", "discard", "publish", "publish_many", "unpublished"]

_SPILL_ABOVE_MEMORY_SHARE = 0.8


class Publication(enum.Enum):
    """What became of a sample that was published."""

    published = b"published"
    duplicate = b"duplicate"
    """Another worker published this index before."""
    refused = b"refused"
    """The group is gone or past its phase, or the sample was given up: stop working on it."""


async def publish(transport: Transport, delivery: Delivery[Prompt], index: int, body: Body) -> Publication:
    """Publishes one sample the moment it is finished; waits out an outage or a full memory of Redis."""
    return (await publish_many(transport, [(delivery, index, body)]))[0]


async def publish_many(transport: Transport, items: Sequence[tuple[Delivery[Prompt], int, Body]]) -> list[Publication]:
    """Publishes samples (delivery, index, body) in one round trip; the answers in the same order."""
    memory_is_short = await transport.memory_share() > _SPILL_ABOVE_MEMORY_SHARE
    calls = [await _call(transport, *item, memory_is_short) for item in items]
    return [Publication(answer) for answer in await transport.scripts.call_many(calls)]


async def _call(
    transport: Transport, delivery: Delivery[Prompt], index: int, body: Body, memory_is_short: bool
) -> Call:
    encoded = encode_body(body)
    tensors, sample, volume = encoded.tensors, encoded.sample, transport.volume
    if volume.needed(tensors, memory_is_short=memory_is_short):
        tensors = await volume.store(delivery.group, f"tensors-{index}", tensors)
    if volume.needed(sample):
        sample = await volume.store(delivery.group, f"sample-{index}", sample)
    return Call(
        "publish",
        (
            delivery.group,
            new_call(),
            delivery.entry_id,
            index,
            encoded.digest,
            f"{delivery.elapsed_s():.6f}",
            tensors,
            sample,
            encoded.generation,
        ),
    )


async def unpublished(transport: Transport, prompt: Prompt) -> list[int]:
    """The indices that a redelivered prompt still has to generate.

    [] when its group is gone or needs no more: then ``discard`` ends the entry.
    """
    fields = [f"{name}:{i}" for i in range(prompt.n) for name in ("published", "ended")]
    phase, *known = await transport.commands.hmget(transport.names.group(prompt.group), ["phase", *fields])
    if phase != b"open":
        return []
    return [i for i in range(prompt.n) if known[2 * i] is None and known[2 * i + 1] is None]
