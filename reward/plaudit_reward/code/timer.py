"""Limit the time of one sample to the time in which at least one of its test cases runs."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Literal, Self

from plaudit_reward.scorer import Attempt


class SampleTimer:
    """End the block that it surrounds with ``TimeoutError`` when the sample's programs have run for too long.

    Args:
        attempt: its limit; ``report`` adds the time of waiting to it.
    """

    def __init__(self, attempt: Attempt, waits_for: Literal["process", "limit"]) -> None:
        self._attempt = attempt
        self._waits_for = waits_for
        self._entered_s = time.monotonic()
        self._spent_s = 0.0
        self._since_s = 0.0
        self._num_running = 0
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    def begin(self) -> None:
        """Note that a program begins."""
        if self._num_running == 0:
            self._since_s = time.monotonic()
            left_s = self._attempt.limit_s - self._spent_s
            self._reschedule(asyncio.get_running_loop().time() + left_s)
        self._num_running += 1

    def end(self) -> None:
        """Note that a program that began has ended."""
        self._num_running -= 1
        if self._num_running == 0:
            self._spent_s += time.monotonic() - self._since_s
            self._reschedule(None)

    def _reschedule(self, when: float | None) -> None:
        if not self._timeout.expired():
            self._timeout.reschedule(when)

    def report(self) -> None:
        """Add to the attempt how long the sample waited."""
        waited_s = max(0.0, time.monotonic() - self._entered_s - self._spent_s)
        if self._waits_for == "process":
            self._attempt.queued_s += waited_s
        else:
            self._attempt.waited_s += waited_s
