"""The two reward functions of ``reward_loop``, in verl's signature; both sides load this file.

``extra_info`` says what a sample's call does: it waits ``seconds`` (0: nothing), and a guilty one raises or never ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Waits as a function does that asks a judge with ``requests.post``."""
    misbehave(extra_info)
    if extra_info["seconds"]:
        time.sleep(extra_info["seconds"])
    return 1.0


async def score_async(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Waits as a function does that asks a judge with an async client."""
    misbehave(extra_info)
    await asyncio.sleep(extra_info["seconds"])
    return 1.0


def misbehave(extra_info: dict[str, Any]) -> None:
    """Raises or never ends, on samples that are to."""
    if extra_info["guilt"] == "raises":
        raise ValueError("raised on purpose")
    while extra_info["guilt"] == "hangs":
        pass
