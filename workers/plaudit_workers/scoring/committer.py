"""Commits scores: at once, and together with whatever else is done. Used by ``worker``."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.outage import outlasting
from plaudit_workers.stream.worker.commits import Commitment, commit_many
from plaudit_workers.stream.worker.lease import Delivery

_LARGEST_BATCH = 256
"""Commits in one pipeline; while it is under way the next ones gather."""


class Committer:
    """One pipeline at a time, each with all that was scored when it began; nothing waits for company.

    Attributes:
        counts: what became of the commits.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: list[tuple[Delivery[Sample], ScoringRecord, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None
        self.counts: Counter[Commitment] = Counter()

    async def commit(self, delivery: Delivery[Sample], scoring: ScoringRecord) -> None:
        """Commits one score; returns when Redis has answered. While Redis is away the score waits here."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, scoring, answered))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        await answered

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
            pairs = [(delivery, scoring) for delivery, scoring, _ in batch]
            try:
                commitments = await outlasting(partial(commit_many, self._transport, pairs))
            except Exception as error:  # the boundary to the waiting tasks: each of them raises it
                for _, _, answered in batch:
                    if not answered.done():
                        answered.set_exception(error)
                continue
            self.counts.update(commitments)
            for _, _, answered in batch:
                if not answered.done():
                    answered.set_result(None)
