"""Only the trainer that took over last has a say: what it sends carries its incarnation, and scripts check it."""

from __future__ import annotations

from typing import Any

from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions.scripts import Argument, new_call


class StaleIncarnationError(Exception):
    """Another trainer has taken over this run: this one has no say any more and must exit."""


class Fence:
    """Sends a trainer's transitions.

    Attributes:
        incarnation: this trainer's number among those that took over the run; 0 before ``take_over``.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.incarnation = 0

    async def take_over(self, floor: int) -> None:
        """Becomes the run's trainer, with an incarnation above ``floor``."""
        self.incarnation = int(await self._transport.scripts.call("take_over", "", new_call(), floor))

    async def call(self, script: str, *arguments: Argument) -> Any:
        """One transition; returns its answer.

        Raises:
            StaleIncarnationError: another trainer has taken over.
        """
        answer = await self._transport.scripts.call(script, *arguments)
        if answer == b"stale":
            raise StaleIncarnationError(
                f"a later trainer than incarnation {self.incarnation} has taken over the run "
                f"{self._transport.names.run}"
            )
        return answer
