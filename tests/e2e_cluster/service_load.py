"""Submits samples to a reward service until told to stop: ``service_load.py URL RESULTS STOP IDS AT_ONCE``.

The token is in TOKEN.

RESULTS gets a line of JSON for each sample; the file STOP ends it, once every submitted sample has its result. Ids
begin with IDS: under those of an earlier load the service answers with its results.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from plaudit_client import RewardClient


async def main(url: str, results: Path, stop: Path, ids: str, at_once: int) -> None:
    """Keep samples in flight, so many at once."""
    numbers = itertools.count()
    async with RewardClient(url, os.environ["TOKEN"]) as client:
        with results.open("w", buffering=1) as lines:
            await asyncio.gather(*(_submit(client, numbers, lines, stop, ids) for _ in range(at_once)))


async def _submit(client: RewardClient, numbers: itertools.count[int], lines: TextIO, stop: Path, ids: str) -> None:
    while not stop.exists():
        number = next(numbers)
        result = await client.score({"response": f"answer {number}", "id": f"{ids}-{number}"})
        lines.write(json.dumps(dataclasses.asdict(result)) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
