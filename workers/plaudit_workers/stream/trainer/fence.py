"""Refuse a replaced trainer: each of a trainer's transitions carries its incarnation, which the scripts check."""

from __future__ import annotations

from typing import TypeVar

from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions import trainer as transitions
from plaudit_workers.stream.transitions.call import Call

Answer = TypeVar("Answer")


class StaleIncarnationError(Exception):
    """Another trainer has taken over this run; this one must exit."""


class Fence:
    """Send a trainer's transitions.

    Attributes:
        incarnation: this trainer's number among those that took over the run; 0 before ``take_over``.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.incarnation = 0

    async def take_over(self, floor: int) -> None:
        """Become the run's trainer, with an incarnation above ``floor``."""
        self.incarnation = await self._transport.scripts.run(transitions.take_over(floor))

    async def run(self, call: Call[Answer]) -> Answer:
        """Run one transition and return its answer.

        Raises:
            StaleIncarnationError: another trainer has taken over.
        """
        (answer,) = await self._transport.scripts.answers((call,))
        if answer == b"stale":
            raise StaleIncarnationError(
                f"a later trainer than incarnation {self.incarnation} has taken over the run "
                f"{self._transport.names.run}"
            )
        return call.read(answer)
