"""The reward of these tests: a number that follows from the response, and no score for 5 % of the samples."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

FAILING = 7


def expected(response: str, index: int) -> float | None:
    """Return the score of a response to row ``index``; None where the reward function raises."""
    return None if index % 20 == FAILING else zlib.crc32(f"{index} {response}".encode()) % 1000 / 1000


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Score as verl's functions do. The row's number is its ground truth."""
    await asyncio.sleep(0.02)
    score = expected(solution_str, int(ground_truth))
    if score is None:
        raise ValueError(f"row {ground_truth} cannot be scored")
    return score
