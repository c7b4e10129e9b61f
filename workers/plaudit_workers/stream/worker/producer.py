"""The rollout's side: publish finished samples, and look up the samples that a prompt still lacks."""

from __future__ import annotations

from plaudit_wire.messages import EncodedBody, Prompt, SampleBody, encode_body
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions import worker as transitions
from plaudit_workers.stream.transitions.worker import Publication
from plaudit_workers.stream.worker.lease import Delivery, discard

__all__ = ["Publication", "discard", "publish", "unpublished"]

_SPILL_ABOVE_MEMORY_SHARE = 0.8


async def publish(transport: Transport, delivery: Delivery[Prompt], index: int, body: SampleBody) -> Publication:
    """Publish one sample as soon as it is finished; concurrent calls travel together. Wait through outages."""
    memory_share = await transport.retry_through_outage(transport.memory_share)
    encoded = await _spilled(transport, delivery.group, index, encode_body(body), memory_share)
    return await transport.scripts.run(transitions.publish(delivery, index, encoded))


async def _spilled(transport: Transport, group: str, index: int, body: EncodedBody, memory_share: float) -> EncodedBody:
    """Replace parts that are too large for Redis by references to the shared volume."""
    volume = transport.volume
    if volume.needed(body.tensors, memory_is_short=memory_share > _SPILL_ABOVE_MEMORY_SHARE):
        body = body._replace(tensors=await transport.spill(group, f"tensors-{index}", body.tensors))
    if volume.needed(body.sample):
        body = body._replace(sample=await transport.spill(group, f"sample-{index}", body.sample))
    return body


async def unpublished(transport: Transport, prompt: Prompt) -> list[int]:
    """Return the indices that a redelivered prompt still has to generate.

    [] when its group is gone or needs no more samples: then ``discard`` ends the entry.
    """
    fields = [f"{name}:{i}" for i in range(prompt.n) for name in ("published", "ended")]
    phase, *known = await transport.commands.hmget(transport.names.group(prompt.group), ["phase", *fields])
    if phase != b"open":
        return []
    return [i for i in range(prompt.n) if known[2 * i] is None and known[2 * i + 1] is None]
