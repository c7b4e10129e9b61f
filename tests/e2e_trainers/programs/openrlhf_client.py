"""Score by OpenRLHF's own client for remote rewards, and by slime's request as its source sends it."""

from __future__ import annotations

import asyncio
import os

import aiohttp
from openrlhf.utils.agent import SingleTurnAgentExecutor
from report import progress, report

SAMPLES = 100
URL = os.environ["PLAUDIT_URL"].replace("://", f"://trainer:{os.environ['PLAUDIT_TOKEN']}@")


async def by_openrlhf(row: int, executor: SingleTurnAgentExecutor) -> tuple[str, int, float | None]:
    """Score one sample the way OpenRLHF does."""
    response = f"answer {row}"
    (answer,) = await executor._fetch_rewards_via_http([f"row {row}{response}"], [f"row {row}"], [row])
    (reward,) = answer["rewards"]
    progress(row)
    return response, row, reward


async def by_slime(row: int) -> tuple[str, int, float | None]:
    """Score one sample by slime's request (``remote_rm``): the answer is the reward."""
    body = {"prompt": f"row {row}", "response": f"answer {row}", "label": row}
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(f"{URL}/slime", json=body) as response:
                    response.raise_for_status()
                    reward = await response.json()
                    progress(row)
                    return f"answer {row}", row, reward
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)


async def main() -> None:
    """Score every row by both."""
    executor = SingleTurnAgentExecutor(f"{URL}/openrlhf")
    one = await asyncio.gather(*(by_openrlhf(row, executor) for row in range(SAMPLES)))
    other = await asyncio.gather(*(by_slime(row) for row in range(SAMPLES)))
    report([*one, *other])


if __name__ == "__main__":
    asyncio.run(main())
