"""Score groups by the package openreward's own client, in a session for each row."""

from __future__ import annotations

import asyncio
import os

import aiohttp
from openreward import AsyncOpenReward
from openreward.api.environments.types import Message, Task, TextBlock
from openreward.api.errors import OpenRewardError, ScoreGroupFailed
from report import progress, report

ROWS = 50
CANDIDATES = 4


async def scored(environment: object, row: int) -> list[tuple[str, int, float | None]]:
    """Return the scores of a group; without any where the service has none for one of them."""
    responses = [f"answer {row} {number}" for number in range(CANDIDATES)]
    candidates = [[Message(role="assistant", blocks=[TextBlock(text=text)])] for text in responses]
    task = Task("trainers", "trainers", {"prompt": f"row {row}", "ground_truth": row}, None)
    while True:
        try:
            async with environment.session(task) as session:
                assert await session.supports_score_group()
                rewards = [score.reward for score in await session.score_group(candidates)]
        except ScoreGroupFailed as error:
            if "cannot be scored" not in str(error):
                raise
            rewards = [None] * CANDIDATES
        except (aiohttp.ClientError, OpenRewardError, OSError):  # while the service is down
            await asyncio.sleep(0.2)
            continue
        progress(row)
        return [(text, row, reward) for text, reward in zip(responses, rewards, strict=True)]


async def main() -> None:
    """Score every row's group, ten at a time."""
    client = AsyncOpenReward(api_key=os.environ["PLAUDIT_TOKEN"])
    environment = client.environments.get("trainers", base_url=os.environ["PLAUDIT_URL"])
    found = []
    for start in range(0, ROWS, 10):
        groups = await asyncio.gather(*(scored(environment, row) for row in range(start, start + 10)))
        found += [sample for group in groups for sample in group]
    report(found)


if __name__ == "__main__":
    asyncio.run(main())
