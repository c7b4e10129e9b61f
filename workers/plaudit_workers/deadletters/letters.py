"""Reads dead letters, puts them back, drops them. Written by ``stream.bury``; what a retry does: ``retry_dead.lua``."""

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
    """One dead letter."""

    id: str
    stream: Stream
    """Which work it was: ``samples`` (scoring), ``prompts`` (generation) or ``groups`` (group-scope scoring)."""
    role: str
    """Which kind of worker it was buried by."""
    group: str
    index: int | None
    """Of the sample; None for prompts and groups."""
    reason: str
    deliveries: int
    """How many workers had it."""
    age_s: float
    """Since it was buried, by Redis's clock."""
    consumer: str
    """Who buried it."""
    history: list[str]
    """Workers that were lost with it, and when they were last heard of: ``worker@seconds since the epoch``."""
    fields: dict[str, bytes] = {}
    """The entry as it was."""


class DeadLetters:
    """The dead letters of a run.

    Args:
        transport: of the run.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Letter]:
        """All of them, oldest first."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead)
        now_s = await self._transport.now()
        return [_letter(entry.decode(), fields, now_s) for entry, fields in entries]

    async def find(self, letter: str) -> Letter | None:
        """One of them; None where there is none of that id."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead, letter, letter)
        now_s = await self._transport.now()
        return next((_letter(entry.decode(), fields, now_s) for entry, fields in entries), None)

    async def payload(self, letter: Letter) -> Prompt | Sample | str | None:
        """What the entry carried; where it cannot be read, why, as text. None for groups, which carry nothing."""
        record = letter.fields.get("record")
        if record is None:
            return None
        kind: type[Prompt] | type[Sample] = Prompt if letter.stream == "prompts" else Sample
        try:
            return decode(await self._transport.volume.load(record), kind)
        except (RecordError, VolumeError) as error:
            return str(error)

    async def retry(self, letter: Letter) -> Retried:
        """Puts an entry back into its stream, once: it has all its deliveries again, and its sample is open again.

        Only while its group is open: a group whose last sample has ended is on its way to the trainer.
        """
        return cast(Retried, await self._transport.scripts.run(retry_dead(letter.group, letter.id)))

    async def drop(self, letter: Letter) -> bool:
        """Deletes a letter; its sample stays ended as ``poison``. Whether it was there."""
        return bool(await self._transport.commands.xdel(self._transport.names.dead, letter.id))


_ROLES: dict[str, str] = {"prompts": "rollout", "samples": "reward", "groups": "reward"}
_OF_LETTER = ("stream", "entry", "reason", "consumer", "deliveries", "history", "buried")


def _letter(letter: str, fields: Mapping[bytes, bytes], now_s: float) -> Letter:
    about = {name.decode(): value for name, value in fields.items()}
    stream = cast(Stream, about["stream"].decode())
    group, _, rest = (about.get("sample") or about["group"]).decode().partition(" ")
    return Letter(
        id=letter,
        stream=stream,
        role=_ROLES[stream],
        group=group,
        index=int(rest.split()[0]) if rest else None,
        reason=about["reason"].decode(),
        deliveries=int(about["deliveries"]),
        age_s=max(0.0, now_s - float(about["buried"])),
        consumer=about["consumer"].decode(),
        history=about["history"].decode().split(),
        fields={name: value for name, value in about.items() if name not in _OF_LETTER},
    )
