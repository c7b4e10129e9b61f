"""Carry requests from the event loop to the thread that drives vLLM, each with a future. No heavy imports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.rollout.engines.protocol import FinishedSample, SampleRequest, WeightSwitch

if TYPE_CHECKING:
    from PIL.Image import Image

FutureResult = tuple[asyncio.Future[Any], Any]
"""A future and its result; an exception is raised to whoever awaits it."""


@dataclass(slots=True)
class Generation:
    """Hold one response, from its submission until it is finished."""

    id: str
    request: SampleRequest
    submitted: float
    """Monotonic clock, seconds."""
    future: asyncio.Future[FinishedSample]
    internal_id: str = ""
    """vLLM's own id, while the request is inside vLLM."""
    version: PolicyVersion | None = None
    """Of the adapter that samples it; None where the engine's weights are switched."""
    recomputed: int = 0
    """Preemptions caused by switches of weights, not by a lack of memory."""
    images: Sequence[Image] = ()
    """The decoded images of the request."""


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """Request a switch of weights."""

    path: Path
    version: PolicyVersion
    switch: WeightSwitch
    future: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Request to free the GPUs until the next load."""

    switch: WeightSwitch
    future: asyncio.Future[None]


def resolve(answers: Iterable[FutureResult]) -> None:
    """Resolve futures on their event loop; those that were cancelled meanwhile are ignored."""
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
