"""What the reward tests share: samples, user files, scorers that are closed afterwards."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import scripted_scorer
from plaudit_reward import attempts
from plaudit_reward.functions.result import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from scripted_server import ScriptedServer


class Clock:
    """Stands still but for what is slept: in the place of ``time`` and ``asyncio`` where attempts are timed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By it the seconds of attempts and of scripted scorers are exact, whatever the machine does."""
    clock = Clock()
    monkeypatch.setattr(attempts, "time", clock)
    monkeypatch.setattr(attempts, "asyncio", clock)
    monkeypatch.setattr(scripted_scorer, "asyncio", clock)
    return clock


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a user's file; returns its path."""

    def write(source: str, name: str = "rewards.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
async def open_scorer(reward_file: Callable[[str], str]) -> AsyncIterator[Callable[..., Awaitable[FunctionScorer]]]:
    """Opens a scorer on a user's source; all are closed after the test."""
    opened: list[FunctionScorer] = []

    async def make(source: str, function: str = "compute_score", **options: Any) -> FunctionScorer:
        sizes = {name: options.pop(name) for name in ("processes", "max_concurrent") if name in options}
        scorer = FunctionScorer("mine", Target(reward_file(source), function, **options), **sizes)
        opened.append(scorer)
        await scorer.open()
        return scorer

    yield make
    for scorer in opened:
        await scorer.close()


@pytest.fixture
async def servers() -> AsyncIterator[Callable[[int], Awaitable[list[ScriptedServer]]]]:
    """Starts so many servers."""
    started: list[ScriptedServer] = []

    async def start(count: int) -> list[ScriptedServer]:
        started.extend(ScriptedServer() for _ in range(count))
        for server in started:
            await server.start()
        return started

    yield start
    for server in started:
        await server.stop()
