"""Read, retry and drop dead letters. ``bury.lua`` writes them, ``retry_dead.lua`` describes a retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from plaudit_wire.codec import RecordError, decode
from plaudit_wire.messages import Prompt
from plaudit_wire.names import Stream
from plaudit_wire.sample import Sample
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions.worker import retry_dead
from plaudit_workers.stream.volume import VolumeError

Retried = Literal["retried", "unknown", "ended"]
"""``unknown``: there is no such letter (any more); ``ended``: its group has no use for the entry any more."""


class Letter(msgspec.Struct, frozen=True):
    """Hold one dead letter."""

    id: str
    stream: Stream
    """The stream of the entry: ``samples`` (scoring), ``prompts`` (generation) or ``groups`` (group-scope scoring)."""
    role: str
    """Role of the worker that recorded it."""
    group: str
    index: int | None
    """Index of the sample; None for prompts and groups."""
    reason: str
    deliveries: int
    """Number of deliveries."""
    age_s: float
    """Seconds since it was recorded, by Redis's clock."""
    consumer: str
    """Worker that recorded it."""
    history: list[str]
    """Workers that died with it, and the time of their last heartbeat: ``worker@seconds since the epoch``."""
    fields: dict[str, bytes] = {}
    """The fields of the entry."""


class DeadLetters:
    """List, retry and delete the dead letters of a run."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Letter]:
        """Return all, oldest first."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead)
        now_s = await self._transport.now()
        return [_letter(entry.decode(), fields, now_s) for entry, fields in entries]

    async def find(self, letter: str) -> Letter | None:
        """Return one by its id, or None."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead, letter, letter)
        now_s = await self._transport.now()
        return next((_letter(entry.decode(), fields, now_s) for entry, fields in entries), None)

    async def payload(self, letter: Letter) -> Prompt | Sample | str | None:
        """Return the entry's payload; the reason as text if it cannot be read; None for groups, which have none."""
        record = letter.fields.get("record")
        if record is None:
            return None
        kind: type[Prompt] | type[Sample] = Prompt if letter.stream == "prompts" else Sample
        try:
            return decode(await self._transport.volume.load(record), kind)
        except (RecordError, VolumeError) as error:
            return str(error)

    async def retry(self, letter: Letter) -> Retried:
        """Put an entry back into its stream once, with all its deliveries, and open its sample again.

        Only while its group is open: a group whose last sample has ended is on its way to the trainer.
        """
        return cast(Retried, await self._transport.scripts.run(retry_dead(letter.group, letter.id)))

    async def drop(self, letter: Letter) -> bool:
        """Delete a letter; its sample stays ``poison``. Return False if there is no such letter."""
        return bool(await self._transport.commands.xdel(self._transport.names.dead, letter.id))


_ROLES: dict[str, str] = {"prompts": "rollout", "samples": "reward", "groups": "reward"}
_OF_LETTER = ("stream", "entry", "reason", "consumer", "deliveries", "history", "buried")


def _letter(letter: str, fields: Mapping[bytes, bytes], now_s: float) -> Letter:
    about = {name.decode(): value for name, value in fields.items()}
    stream = cast(Stream, about["stream"].decode())
    group, _, rest = (about.get("sample") or about.get("group") or b"").decode(errors="replace").partition(" ")
    return Letter(
        id=letter,
        stream=stream,
        role=_ROLES[stream],
        group=group,
        index=int(rest.split()[0]) if rest.split()[:1] and rest.split()[0].isdigit() else None,
        reason=about["reason"].decode(),
        deliveries=int(about["deliveries"]),
        age_s=max(0.0, now_s - float(about["buried"])),
        consumer=about["consumer"].decode(),
        history=about["history"].decode().split(),
        fields={name: value for name, value in about.items() if name not in _OF_LETTER},
    )
