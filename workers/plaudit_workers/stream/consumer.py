"""Take work from a stream for one worker: ``take → work → commit (or publish) → finished``.

The transition that ends the work also ends the entry; ``finished`` only updates this process's state. A worker that
dies leaves its entries pending; their leases lapse, and another consumer claims them. A lease is renewed every few
seconds for as long as the work takes; a consumer that has lost an entry detects it at the next renewal and stops the
work. An entry that kills its workers, or that cannot be read, becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

import msgspec
from redis.exceptions import ResponseError

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import (
    EncodedBody,
    GroupDelivery,
    Prompt,
    RecordError,
    SampleBody,
    SchemaVersionError,
    decode,
    encode_body,
)
from plaudit_wire.names import CONSUMER_GROUPS, Stream
from plaudit_wire.records import LEASE_S, Sample, ScoringRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.process import Supervised, set_within
from plaudit_workers.stream import calls as transitions
from plaudit_workers.stream.calls import ClaimedEntry, ClaimRules, Commitment, Delivery, Publication
from plaudit_workers.stream.groups import (
    Group,
    ServerTime,
    entries_by_id,
    read_entries,
    read_group,
    without_group_scorers,
)
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import VolumeError

logger = get_logger(__name__)
T = TypeVar("T")
_OLD_ENTRY_S = 2.0
_CLAIMED_AT_ONCE = 64
_READ_AT_ONCE = 8
"""Payloads in one round trip: each has up to 256 KiB, and all must arrive within the client's timeout of 5 s."""
_UNREADABLE_REMEMBERED = 1000
_SPILL_ABOVE_MEMORY_SHARE = 0.8
_PAYLOADS: dict[str, type[Any]] = {"prompts": Prompt, "samples": Sample}


@dataclass(frozen=True)
class ConsumerOptions:
    """Set the times and limits of leases; the defaults are the protocol's."""

    lease_s: float = LEASE_S
    """An entry that was not renewed for this long may be claimed by others."""
    renew_every_s: float = 5.0
    poison_limit: int = 3
    """An entry becomes a dead letter once this many workers have lost it, the last in isolation."""
    suspect_from: int = 3
    """From this delivery on, an entry is suspected of ending its workers, and worked on apart from entries that are
    not. A lower number isolates sooner and costs throughput after every killed worker."""
    most_suspects: int = 16
    """Suspects that are worked on at once, so that killed workers, which make many, cost little; after each further
    loss a quarter as many, in the end one: only its own loss makes a dead letter."""
    block_s: float = 1.0
    """Seconds that ``take`` waits for work, below the blocking client's timeout of 10 s; 0: no wait."""
    reclaim_every_s: float = 1.0
    unreadable_pause_s: float = 5.0
    """Pause of ``take`` after an entry that the shared volume did not provide."""


class Consumer(Generic[T]):
    """Take entries of one stream for one worker. Use it as an async context; call ``take`` from one task at a time.

    Payloads are ``Prompt`` (prompts), ``Sample`` (samples) or ``GroupDelivery`` (groups). No other process has or had
    the name of the worker (pod and boot).
    """

    def __init__(
        self,
        transport: Transport,
        stream: Literal["prompts", "samples", "groups"],
        worker: str,
        options: ConsumerOptions = ConsumerOptions(),
    ) -> None:
        if worker.split() != [worker]:
            raise ValueError(f"worker {worker!r}: give a non-empty name without spaces")
        self._transport = transport
        self.stream = stream
        self._worker = worker
        self._options = options
        self._reader = transport.blocking_client()
        self._leases: Leases[T] = Leases(transport, stream, worker)
        self._waiting: list[Delivery[T]] = []  # suspects, to be worked on apart; their leases are renewed
        self._away = True
        self._claim_next = 0.0
        self._unreadable_until = 0.0
        self._reclaim_not_before = time.monotonic() + options.renew_every_s
        self._taking = asyncio.Lock()
        self._took = 0.0
        self._server_time = ServerTime()
        self._unreadable: dict[str, None] = {}  # of another schema version: left to other workers
        self._tasks = Supervised()

    @property
    def readable(self) -> bool:
        """Return False for some seconds after an entry could not be read from the shared volume."""
        return time.monotonic() >= self._unreadable_until

    async def __aenter__(self) -> Self:
        self._tasks = Supervised()
        await self._tasks.__aenter__()
        self._tasks.start(self._renew_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand back unfinished work and leave the consumer group. Raise the error that ended the renewals, if any.

        The work of a worker that failed counts as lost: the entry that ends its workers becomes a dead letter.
        """
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            try:
                await self._leave(failed=kind is not None)
            except (*OUTAGE, ResponseError) as problem:
                logger.warning("cannot hand back unfinished work", stream=self.stream, error=str(problem))
            await self._reader.aclose(close_connection_pool=True)

    async def _renew_forever(self) -> None:
        """Renew the leases until cancelled. A failed call stops claims from other consumers (see ``_take``).

        A worker that is full, or that may not take work now, detects an outage only here.
        """
        while True:
            await asyncio.sleep(self._options.renew_every_s)
            try:
                idle = not self._leases.in_work and time.monotonic() - self._took > self._options.renew_every_s
                await self._leases.renew(even_if_empty=idle)
            except OUTAGE as error:
                self._lost_contact(error)

    def _lost_contact(self, error: Exception) -> None:
        """Stop claiming from other consumers: after an outage their leases look lapsed until they have renewed them."""
        self._transport.outages.report(error)
        self._away = True
        self._reclaim_not_before = math.inf

    async def take(self, slots: int) -> list[Delivery[T]]:
        """Take at most ``slots`` entries, redelivered ones first; [] if none arrived within ``block_s``.

        Waits through outages of Redis. After an outage, where every lease looks lapsed, the consumer renews its own
        leases first and claims nothing from others for the length of one lease.
        """
        if slots <= 0:
            return []
        if not self.readable:
            await asyncio.sleep(min(self._options.block_s, self._options.unreadable_pause_s))
            return []
        async with self._taking:
            try:
                deliveries = await self._take(slots)
                self._took = time.monotonic()
                return deliveries
            except OUTAGE as error:
                self._lost_contact(error)
                await asyncio.sleep(min(0.2, self._options.block_s))
            except ResponseError as error:
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):  # the latter: the key was deleted meanwhile
                    raise
                await self._transport.recreate_groups()
        return []

    async def _take(self, slots: int) -> list[Delivery[T]]:
        if self._away:
            await self._leases.renew()
            self._claim_next = 0.0
        if time.monotonic() >= self._claim_next:
            claimed = await self.reclaim(slots)
            if self._away:
                await self._arrive()
            if claimed:
                return claimed
        if self._waiting or any(map(self._is_suspect, self._leases.in_work.values())):
            return await self._next_suspects(slots)
        return await self._read(slots)

    async def _arrive(self) -> None:
        """Record an answer of Redis; after an outage, give other consumers one lease's time to renew their own."""
        self._away = False
        if self._reclaim_not_before == math.inf:
            self._reclaim_not_before = time.monotonic() + self._options.lease_s
        await self._transport.scripts.run(transitions.forget(self.stream))

    async def reclaim(self, slots: int, lease_s: float | None = None) -> list[Delivery[T]]:
        """Claim entries whose lease has lapsed, and own ones whose delivery was lost; ``take`` does it every second.

        ``lease_s`` replaces the options' lease (0: claim everything that others hold).
        """
        options = self._options
        self._claim_next = time.monotonic() + options.reclaim_every_s
        look_every_s = options.reclaim_every_s if lease_s is None else 0.0
        if lease_s is None:
            lease_s = options.lease_s if time.monotonic() >= self._reclaim_not_before else -1.0
        suspects = (options.suspect_from, options.most_suspects, options.poison_limit)
        rules = ClaimRules(lease_s, look_every_s, *suspects)
        names = await self._claim(min(slots, _CLAIMED_AT_ONCE), rules)
        if len(names) == _CLAIMED_AT_ONCE:
            self._claim_next = 0.0
        fresh = await self._read_claimed(names)
        self._waiting.extend(delivery for delivery in fresh if self._is_suspect(delivery))
        return [delivery for delivery in fresh if not self._is_suspect(delivery)]

    def _is_suspect(self, delivery: Delivery[T]) -> bool:
        return delivery.deliveries >= self._options.suspect_from

    async def _claim(self, count: int, rules: ClaimRules) -> list[ClaimedEntry]:
        sent = time.monotonic()
        busy = [*self._leases.in_work, *self._unreadable]
        server_time, entries = await self._transport.reads.run(
            transitions.claim(self.stream, self._worker, count, rules, self._server_time.expected(sent), busy)
        )
        self._server_time.observe(server_time, sent, time.monotonic())
        return entries

    async def _read_claimed(self, names: Sequence[ClaimedEntry]) -> list[Delivery[T]]:
        """Read the payloads of claimed entries, a few at a time; if a read fails, the earlier ones are in work."""
        fresh: list[Delivery[T]] = []
        for start in range(0, len(names), _READ_AT_ONCE):
            part = names[start : start + _READ_AT_ONCE]
            try:
                fresh += await self._deliver(await self._entries(part))
            except OUTAGE:
                if not fresh:
                    raise
                break  # the next claim of own pending entries finds the rest
        return fresh

    async def _entries(self, names: Sequence[ClaimedEntry]) -> list[tuple[ClaimedEntry, dict[bytes, bytes]]]:
        stream = self._transport.names.stream(self.stream)
        found = await entries_by_id(self._transport, stream, [entry.id for entry in names])
        return [(entry, found[entry.id]) for entry in names if entry.id in found]

    async def _next_suspects(self, slots: int) -> list[Delivery[T]]:
        """Return the suspects, once no other entry is in work; a single one is recorded as isolated."""
        if len(self._leases.in_work) > len(self._waiting):
            await self._leases.wait_for_change(self._options.block_s)
        self._waiting = [delivery for delivery in self._waiting if not delivery.lost.is_set()]
        if not self._waiting or len(self._leases.in_work) > len(self._waiting):
            return []
        self._claim_next = 0.0
        if len(self._leases.in_work) == 1:
            await self._transport.reads.run(transitions.isolate(self._waiting[0]))
        batch, self._waiting = self._waiting[:slots], self._waiting[slots:]
        return batch

    async def _read(self, slots: int) -> list[Delivery[T]]:
        reply: Any = await self._reader.xreadgroup(
            CONSUMER_GROUPS[self.stream],
            self._worker,
            {self._transport.names.stream(self.stream): ">"},
            count=slots,
            block=round(self._options.block_s * 1000) or None,
        )
        entries = [(ClaimedEntry(entry.decode(), 1, False), fields) for entry, fields in read_entries(reply)]
        new = {entry.id for entry, fields in entries if b"retried" not in fields}
        deliveries = await self._deliver(entries)
        for delivery in deliveries:
            delivery.new = delivery.entry_id in new
        return deliveries

    async def _deliver(self, entries: Sequence[tuple[ClaimedEntry, dict[bytes, bytes]]]) -> list[Delivery[T]]:
        """Build deliveries of entries; end those that are not needed, dead-letter those that cannot be worked on."""
        deliveries = [self._delivery(*entry) for entry in entries]
        self._leases.add(deliveries)
        try:
            await self._discard_needless(deliveries)
            for delivery, (_, fields) in zip(deliveries, entries, strict=True):
                if delivery.entry_id in self._leases.in_work:
                    await self._open(delivery, fields)
        except BaseException:
            for delivery in deliveries:  # no task works on them; the next claim of own pending entries finds them
                self._leases.remove(delivery.entry_id)
            raise
        return [d for d in deliveries if d.entry_id in self._leases.in_work]

    async def _open(self, delivery: Delivery[Any], fields: dict[bytes, bytes]) -> None:
        """Read the payload. An entry that cannot be read, or that too many workers have lost, becomes a dead letter."""
        try:
            delivery.payload = await self._payload(delivery, fields)
        except VolumeError as error:
            self._transport.outages.report(error)
            self._unreadable_until = time.monotonic() + self._options.unreadable_pause_s
            await self._leases.hand_back([delivery])  # a worker whose volume is mounted may take it
        except SchemaVersionError as error:
            await self._leave_to_others(delivery, error)
        except (RecordError, msgspec.DecodeError, KeyError, ValueError) as error:
            await self._dead_letter(delivery, f"malformed entry: {error}")
        else:
            if delivery.blamed:
                await self._dead_letter(delivery, f"{delivery.deliveries - 1} workers were lost with it in work")

    async def _leave_to_others(self, delivery: Delivery[Any], error: Exception) -> None:
        """Hand back an entry of another schema version: in a mixed deployment another worker can read it."""
        logger.warning("leaving an entry to workers of another version", stream=self.stream, error=str(error))
        self._unreadable[delivery.entry_id] = None
        if len(self._unreadable) > _UNREADABLE_REMEMBERED:
            del self._unreadable[next(iter(self._unreadable))]
        await self._leases.hand_back([delivery])

    def _delivery(self, entry: ClaimedEntry, fields: dict[bytes, bytes]) -> Delivery[Any]:
        """Return the delivery of an entry; without a group if the entry is malformed."""
        group, index, digest = "", None, ""
        try:
            if self.stream == "samples":
                group, number, digest = fields[b"sample"].decode().split()
                index = int(number)
            else:
                group = fields[b"group"].decode()
        except (KeyError, ValueError):  # of a forged or foreign entry
            group = ""
        return Delivery(
            self.stream, entry.id, None, group, index, entry.deliveries, self._worker, digest, blamed=entry.blamed
        )

    async def _payload(self, delivery: Delivery[Any], fields: dict[bytes, bytes]) -> T:
        if not delivery.group:
            raise RecordError(f"fields {sorted(fields)} are not those of an entry of {self.stream}")
        if self.stream == "groups":
            return cast(T, GroupDelivery(delivery.group))
        record = decode(await self._transport.volume.load(fields[b"record"]), _PAYLOADS[self.stream])
        if record.group != delivery.group or (self.stream == "samples" and record.index != delivery.index):
            raise RecordError(f"the record is of another group or sample than {delivery.group} {delivery.index}")
        return cast(T, record)

    async def _dead_letter(self, delivery: Delivery[Any], reason: str) -> None:
        await dead_letter(self._transport, delivery, reason)
        self.finished(delivery)

    async def _discard_needless(self, deliveries: Iterable[Delivery[Any]]) -> None:
        """Drop entries whose group has ended meanwhile. Check only old entries: the transitions check all of them."""
        old = [
            d
            for d in deliveries
            if d.entry_id in self._leases.in_work
            and d.group  # without one it is malformed and becomes a dead letter
            and (d.deliveries > 1 or time.time() - int(d.entry_id.partition("-")[0]) / 1000 > _OLD_ENTRY_S)
        ]
        if not old:
            return
        for entry in await self._transport.reads.run(transitions.discard(self.stream, old)):
            self._leases.remove(entry.decode())

    async def hand_back(self, deliveries: Iterable[Delivery[T]]) -> None:
        """Hand back unfinished work: others may take it at once, and this delivery does not count."""
        async with self._taking:
            await self._leases.hand_back(deliveries)

    def finished(self, delivery: Delivery[Any]) -> None:
        """End the work on a delivery; call it after the transition that ends the entry has answered.

        An entry that no transition has ended is delivered again, to this worker or another.
        """
        self._leases.remove(delivery.entry_id)

    async def renew(self) -> None:
        """Renew the leases now; a background task does it every ``renew_every_s``."""
        await self._leases.renew()

    async def _leave(self, *, failed: bool) -> None:
        names = await self._claim(10_000, ClaimRules(lease_s=-1.0))
        unseen = [self._delivery(*entry) for entry in await self._entries(names)]
        await self._leases.hand_back(unseen)
        await self._leases.hand_back(self._leases.in_work.values(), failed=failed)
        await self._transport.reads.run(transitions.forget(self.stream, self._worker))


class Leases(Generic[T]):
    """Hold the entries that one consumer works on."""

    def __init__(self, transport: Transport, stream: Stream, worker: str) -> None:
        self._transport = transport
        self._stream = stream
        self._worker = worker
        self._noted: set[str] = set()
        self._renewing = asyncio.Lock()
        self._changed = asyncio.Event()
        self.in_work: dict[str, Delivery[T]] = {}

    def add(self, deliveries: Iterable[Delivery[T]]) -> None:
        """Begin work on these deliveries."""
        self.in_work.update((delivery.entry_id, delivery) for delivery in deliveries)

    def remove(self, entry_id: str) -> None:
        """End work on a delivery, whatever its result."""
        self.in_work.pop(entry_id, None)
        self._noted.discard(entry_id)
        self._changed.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until work on an entry has ended."""
        await set_within(self._changed, timeout_s)

    async def renew(self, *, even_if_empty: bool = False) -> None:
        """Renew every lease; set ``lost`` of entries that have ended or that another consumer now holds."""
        async with self._renewing:
            held = list(self.in_work.values())
            if not held and not even_if_empty:
                return
            new = [d for d in held if d.index is not None and d.entry_id not in self._noted]
            lost = await self._transport.reads.run(transitions.renew(self._stream, self._worker, held, new))
            self._noted.update(d.entry_id for d in new if d.entry_id in self.in_work)
        for delivery in [self.in_work[entry] for entry in map(bytes.decode, lost) if entry in self.in_work]:
            logger.info("lease lost", stream=self._stream, group=delivery.group, index=delivery.index)
            self.remove(delivery.entry_id)
            delivery.lost.set()

    async def hand_back(self, deliveries: Iterable[Delivery[T]], *, failed: bool = False) -> None:
        """Hand back entries; the next consumer finds the same count of deliveries as this one did, unless it failed."""
        back = list(deliveries)
        for delivery in back:
            self.remove(delivery.entry_id)
        async with self._renewing:  # a renewal on its way would make the lease new again
            if back:
                await self._transport.scripts.run(
                    transitions.hand_back(self._stream, self._worker, back, failed=failed)
                )


async def dead_letter(transport: Transport, delivery: Delivery[Any], reason: str) -> bool:
    """Move the entry to the dead letters and make its samples terminal; return False when another consumer holds it.

    A sample ends as ``poison``; of a prompt every index that was not published; a group's scores become
    ``infra_error``.
    """
    group = await read_group(transport, delivery.group) if delivery.stream == "groups" else None
    scorings = without_group_scorers(group, "infra_error", reason) if group else []
    moved = await transport.scripts.run(transitions.dead_letter(delivery, reason, scorings))
    logger.log(
        logging.ERROR if moved else logging.INFO,
        "entry moved to the dead letters" if moved else "another worker holds the entry",
        stream=delivery.stream,
        group=delivery.group,
        index=delivery.index,
        reason=reason,
    )
    return moved


async def discard(transport: Transport, delivery: Delivery[Any]) -> bool:
    """Acknowledge and delete an entry whose group is gone or past it; return False while its work is needed."""
    return bool(await transport.scripts.run(transitions.discard(delivery.stream, [delivery])))


async def publish(
    transport: Transport, delivery: Delivery[Prompt], index: int, body: SampleBody | EncodedBody
) -> Publication:
    """Publish one sample as soon as it is finished; concurrent calls travel together. Wait through outages."""
    memory_share = await transport.retry_through_outage(transport.memory_share)
    encoded, group = body if isinstance(body, EncodedBody) else encode_body(body), delivery.group
    if transport.volume.needed(encoded.tensors, memory_is_short=memory_share > _SPILL_ABOVE_MEMORY_SHARE):
        encoded = encoded._replace(tensors=await transport.spill(group, f"tensors-{index}", encoded.tensors))
    if transport.volume.needed(encoded.sample):
        encoded = encoded._replace(sample=await transport.spill(group, f"sample-{index}", encoded.sample))
    return await transport.scripts.run(transitions.publish(delivery, index, encoded))


async def unpublished(transport: Transport, prompt: Prompt) -> list[int]:
    """Return the indices that a redelivered prompt still has to generate.

    [] when its group is gone or needs no more samples: then ``discard`` ends the entry.
    """
    fields = [f"{name}:{i}" for i in range(prompt.n) for name in ("published", "ended")]
    phase, *known = await transport.commands.hmget(transport.names.group(prompt.group), ["phase", *fields])
    if phase != b"open":
        return []
    return [i for i in range(prompt.n) if known[2 * i] is None and known[2 * i + 1] is None]


async def commit(transport: Transport, delivery: Delivery[Sample], scoring: ScoringRecord) -> Commitment:
    """Commit the score of one sample; concurrent calls travel together. Wait through outages of Redis."""
    return await transport.scripts.run(transitions.commit(delivery, scoring))


async def commit_group(
    transport: Transport, delivery: Delivery[GroupDelivery], group: Group, scorings: Sequence[ScoringRecord]
) -> Commitment:
    """Commit the results of the group-scope scorers for a group that was read; the digests of its samples are checked.

    ``scorings``, one for each sample in the order of their indices, replace those of the samples.
    """
    if len(scorings) != len(group.samples):
        raise ValueError(f"{len(scorings)} scorings for the {len(group.samples)} samples of group {group.id}")
    digests = [sample.digest for sample in group.samples]
    return await transport.scripts.run(transitions.commit_group(delivery, digests, scorings))
