"""Admit requests to one endpoint: the circuit first, then the limits. Record how each request ended."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from plaudit_reward.endpoint.circuit import Circuit
from plaudit_reward.endpoint.failures import BusyError, CircuitOpenError, EndpointRefusedError
from plaudit_reward.endpoint.limiter import Limiter, Passage
from plaudit_reward.endpoint.limits import NEVER_SENT
from plaudit_reward.endpoint.usage import UsageReport
from plaudit_reward.scorer import Attempt


class EndpointAccess:
    """Control one worker's access to an endpoint.

    Args:
        limiter: started and stopped here.
        report: adds the usage to the run's; started and stopped here. None outside of a run.
    """

    def __init__(self, name: str, url: str, limiter: Limiter, report: UsageReport | None = None) -> None:
        self._limiter = limiter
        self._report = report
        self._circuit = Circuit(name, url)

    def start(self) -> None:
        """Start the limiter and the report."""
        self._limiter.start()
        if self._report is not None:
            self._report.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._circuit.is_open

    def room(self) -> int:
        """Return how many more requests may start soon: one, the probe, while the circuit is open."""
        if self._circuit.is_open:
            return 1 if self._circuit.probe_due else 0
        return self._limiter.room()

    @asynccontextmanager
    async def request(self, tokens: int, attempt: Attempt) -> AsyncIterator[Passage]:
        """Wait until a request may be sent; the block sends it and sets ``Passage.tokens`` to its real cost.

        Raises:
            CircuitOpenError: requests are stopped.
            InfrastructureError: the limits failed.
        """
        self._circuit.check()
        began = time.monotonic()
        try:
            passage = await self._limiter.enter(tokens)
        finally:
            now = time.monotonic()
            attempt.waited_s += now - began
            attempt.held_s += self._limiter.held_s(began, now)
        try:
            with self._circuit.call():
                yield passage
        except CircuitOpenError:
            passage.tokens = NEVER_SENT
            raise
        except (BusyError, EndpointRefusedError) as error:
            passage.tokens = 0
            self._limiter.refused(error.retry_after_s or 0.0)
            raise
        else:
            self._limiter.accepted()
        finally:
            self._limiter.leave(passage)

    def on_sent(self, passage: Passage) -> Callable[[], None] | None:
        """Return the function to call when the request has left this process; None where that moment does not count."""
        return partial(self._limiter.sent, passage) if self._limiter.rated else None

    async def stop(self) -> None:
        """Stop the limiter and the report."""
        await self._limiter.stop()
        if self._report is not None:
            await self._report.stop()
