"""Submits samples to a reward service until told to stop: ``service_load.py URL RESULTS STOP IDS AT_ONCE [once]``.

The token is in TOKEN.

RESULTS gets a line of JSON for each sample; the file STOP ends it, once every submitted sample has its result. Ids
begin with IDS: under those of an earlier load the service answers with its results. With ``once`` each sample is sent
in one plain HTTP request that is never repeated, on connections that are kept and often idle for seconds; the result of
a sample that got no answer is ``{"id", "refused"}``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from plaudit_client import RewardClient

_IDLE_S = 2.0
_KEPT_S = 20.0
Score = Callable[[dict[str, str]], Awaitable[dict[str, Any]]]


async def main(url: str, results: Path, stop: Path, ids: str, at_once: int, *, once: bool) -> None:
    """Keep samples in flight, so many at once."""
    numbers, token = itertools.count(), os.environ["TOKEN"]
    async with RewardClient(url, token) as client, _plain(url, token) as http:

        async def score(sample: dict[str, str]) -> dict[str, Any]:
            return await _score_once(http, sample) if once else dataclasses.asdict(await client.score(sample))

        with results.open("w", buffering=1) as lines:

            async def submit() -> None:
                while not stop.exists():
                    number = next(numbers)
                    lines.write(
                        json.dumps(await score({"response": f"answer {number}", "id": f"{ids}-{number}"})) + "\n"
                    )

            await asyncio.gather(*(submit() for _ in range(at_once)))


def _plain(url: str, token: str) -> httpx.AsyncClient:
    limits = httpx.Limits(keepalive_expiry=_KEPT_S)
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=120.0, limits=limits)


async def _score_once(http: httpx.AsyncClient, sample: dict[str, str]) -> dict[str, Any]:
    await asyncio.sleep(random.choice((0.0, 0.0, _IDLE_S * random.random())))
    try:
        response = await http.post("/v1/score", json=sample)
    except httpx.TransportError as error:
        return {"id": sample["id"], "refused": repr(error)}
    return response.json() if response.status_code == 200 else {"id": sample["id"], "refused": response.text}


if __name__ == "__main__":
    url, results, stop, ids, at_once, *kind = sys.argv[1:]
    asyncio.run(main(url, Path(results), Path(stop), ids, int(at_once), once=kind == ["once"]))
