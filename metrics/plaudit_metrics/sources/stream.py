"""Read the ``events`` stream with a consumer group of its own, which records its position, and decode its entries.

A start has two phases. First it reads again what earlier starts handled, up to the group's last delivered entry, to
restore steps and waiting samples without counting them. Then it continues where they stopped. An entry is acknowledged
after it was handled, so one that was in progress during a crash is handled and counted by the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from plaudit_wire.logs import get_logger
from plaudit_wire.names import EVENTS_GROUP, Names
from plaudit_wire.records import GenerationRecord, GroupRecord, SampleRecord, ScoringRecord, StepRecord, read_fields

EventRecord = SampleRecord | GroupRecord | StepRecord
_GENERATION = msgspec.msgpack.Decoder(GenerationRecord)
_SCORING = msgspec.msgpack.Decoder(ScoringRecord)
_GROUP = msgspec.msgpack.Decoder(GroupRecord)
_STEP = msgspec.msgpack.Decoder(StepRecord)
_MOST_SAMPLES = 1 << 16
"""No group has as many."""
_ENDED = b"ended:"


def decode_event(fields: Mapping[bytes, bytes]) -> Sequence[EventRecord]:
    """Decode one entry; return nothing for an unknown kind or a damaged one (only figures are lost, never a sample).

    Fields: ``kind`` = ``samples`` | ``group`` | ``step``. A group's or step's ``record`` is its msgpack. The samples of
    a group share one entry, which a script writes from the group's hash: ``group``, ``split``, ``step``,
    ``data_source``, ``admitted`` as text; then of each index ``ended:<index>`` and, where it was published,
    ``published:<index>`` (see ``read_fields``). Unknown fields are ignored, so that newer writers do not stop an older
    reader.
    """
    try:
        match fields.get(b"kind"):
            case b"samples":
                return list(_samples(fields))
            case b"group":
                return [_GROUP.decode(fields[b"record"])]
            case b"step":
                return [_STEP.decode(fields[b"record"])]
            case _:
                return []
    except (msgspec.MsgspecError, KeyError, ValueError):
        return []


def _samples(fields: Mapping[bytes, bytes]) -> Iterator[SampleRecord]:
    group, admitted = fields[b"group"].decode(), float(fields[b"admitted"])
    split: Any = fields[b"split"].decode()
    step, data_source = int(fields[b"step"]), fields[b"data_source"].decode()
    for name, ended in fields.items():
        if not name.startswith(_ENDED):
            continue
        index = int(name[len(_ENDED) :])
        if not 0 <= index < _MOST_SAMPLES:
            raise ValueError(f"index {index} is outside of a group")
        sample = read_fields(admitted, fields.get(b"published:%d" % index), ended)
        yield SampleRecord(
            group=group,
            index=index,
            split=split,
            step=step,
            data_source=data_source,
            stamps=sample.stamps,
            scoring=_SCORING.decode(sample.scoring or b""),
            generation=_GENERATION.decode(sample.generation) if sample.generation else None,
            deliveries=sample.deliveries,
        )


logger = get_logger(__name__)
_BATCH = 100
"""Entries read at a time; each holds the samples of one group."""
_RECORDS_AT_A_TIME = 1000
"""Records handled before requests are answered: about 10 ms."""
_BLOCK_MS = 500
_RETRY_AFTER_S = 1.0
StreamEntry = tuple[bytes, dict[bytes, bytes]]
"""Id and fields."""
Handle = Callable[[list[EventRecord], bool], None]
"""Takes a batch of records in the stream's order, and True if they count."""


class EventReader:
    """Feed the records of one run to ``handle``, batch by batch.

    The client decodes no responses, and its socket timeout exceeds the blocking time.
    """

    def __init__(self, client: Redis, keys: Names, handle: Handle) -> None:
        self._client = client
        self._keys = keys
        self._handle = handle
        self.ready = asyncio.Event()
        """Set once everything that earlier starts handled has been read again."""

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``; outages of Redis and lost keys are retried."""
        caught_up = False
        while not stop.is_set():
            try:
                await self._ensure_group()
                if not caught_up:
                    await self._read_again()
                    caught_up = True
                    self.ready.set()
                while entries := await self._read("0"):  # its own pending ones
                    await self._finish(entries)
                while not stop.is_set():
                    if entries := await self._read(">"):
                        await self._finish(entries)
            except (RedisError, OSError) as error:  # down, loading its file, or keys lost: start again
                logger.warning("cannot read events; retrying", error=str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_AFTER_S):
                        await stop.wait()

    async def _ensure_group(self) -> None:
        if await self._group() is not None:  # Redis denies XGROUP CREATE on a full memory before it looks
            return
        try:
            await self._client.xgroup_create(self._keys.events, EVENTS_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _group(self) -> dict[str, Any] | None:
        try:
            groups: list[dict[str, Any]] = await self._client.xinfo_groups(self._keys.events)
        except ResponseError:  # no such key
            return None
        return next((group for group in groups if group["name"] == EVENTS_GROUP.encode()), None)

    async def _read_again(self) -> None:
        if (group := await self._group()) is None:
            raise ResponseError(f"{self._keys.events} has lost its group")
        last = group["last-delivered-id"]
        pending = await self._client.xpending_range(self._keys.events, EVENTS_GROUP, min="-", max="+", count=_BATCH * 4)
        not_handled = {each["message_id"] for each in pending}
        after: bytes | str = "-"
        client: Any = self._client
        while entries := await client.xrange(self._keys.events, min=after, max=last, count=_BATCH):
            await self._deliver([entry for entry in entries if entry[0] not in not_handled], count=False)
            after = b"(" + entries[-1][0]

    async def _read(self, start: str) -> list[StreamEntry]:
        answer: Any = await self._client.xreadgroup(
            EVENTS_GROUP, EVENTS_GROUP, {self._keys.events: start}, count=_BATCH, block=_BLOCK_MS
        )
        return [entry for _, entries in answer for entry in entries] if answer else []

    async def _finish(self, entries: list[StreamEntry]) -> None:
        await self._deliver(entries, count=True)
        await self._client.xack(self._keys.events, EVENTS_GROUP, *(entry_id for entry_id, _ in entries))

    async def _deliver(self, entries: list[StreamEntry], *, count: bool) -> None:
        """Decode and hand on entries, some records at a time: requests are answered in between.

        An entry that was trimmed while it was pending comes without fields.
        """
        waiting: list[EventRecord] = []
        for _, fields in entries:
            if not fields:
                continue
            waiting += decode_event(fields)
            if len(waiting) >= _RECORDS_AT_A_TIME:
                self._handle(waiting, count)
                waiting = []
                await asyncio.sleep(0)
        if waiting:
            self._handle(waiting, count)
        await asyncio.sleep(0)
