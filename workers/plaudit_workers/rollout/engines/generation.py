"""Joins the engine's finished samples with the agents that wait for them. Called by ``worker`` and the agents."""

from __future__ import annotations

import asyncio

from plaudit_workers.rollout.engines.protocol import Engine, FinishedSample, Outcome, RefusedSample, SampleRequest


class RequestRefusedError(Exception):
    """The engine can never generate this request; the message is the engine's."""


class Generation:
    """``await generate(request)`` over an engine that reports finished samples as a stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[FinishedSample]] = {}

    async def generate(self, request: SampleRequest) -> FinishedSample:
        """Submits a request and waits for its end; cancelling the caller cancels it in the engine.

        Raises:
            RequestRefusedError: the engine can never generate it.
        """
        future: asyncio.Future[FinishedSample] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._engine.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.cancel([request.id])
            raise
        finally:
            self._waiting.pop(request.id, None)

    async def pump(self) -> None:
        """Hands out finished samples until cancelled.

        Raises:
            EngineFailedError: the engine broke.
        """
        async for outcomes in self._engine.finished():
            for outcome in outcomes:
                self._hand_out(outcome)

    def _hand_out(self, outcome: Outcome) -> None:
        future = self._waiting.get(outcome.id)
        if future is None or future.done():
            return
        if isinstance(outcome, RefusedSample):
            future.set_exception(RequestRefusedError(outcome.reason))
        else:
            future.set_result(outcome)
