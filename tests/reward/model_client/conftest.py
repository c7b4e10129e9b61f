"""A scorer over several scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from plaudit_reward.endpoint.served import ModelScorer, ServerPool


@pytest.fixture
async def open_scorer() -> AsyncIterator[Callable[..., Awaitable[ModelScorer]]]:
    """A scorer over places; waits until it has a healthy server unless told otherwise."""
    scorers: list[ModelScorer] = []

    async def make(places: list[str], *, wait: bool = True, **options: Any) -> ModelScorer:
        token = options.pop("token", "")
        scorer = ModelScorer(ServerPool("rm", places, token=token), **options)
        scorers.append(scorer)
        await scorer.open()
        while wait and not scorer.room():
            await asyncio.sleep(0.01)
        return scorer

    yield make
    for scorer in scorers:
        await scorer.close()
