"""Score a share of the samples by another service as well, and compare: its results are counted, never answered."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import msgspec

from plaudit_reward.errors import CallTimeoutError, InfrastructureError
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError
from plaudit_workers.gateway.bodies import SubmittedSamples
from plaudit_workers.gateway.callers.results import Answer, SampleAnswer
from plaudit_workers.gateway.canary.canary_series import CanarySeries
from plaudit_workers.scoring.offline.lines import SampleInput

_MOST_AT_ONCE = 512
"""Copies in flight; further ones are left out, so that a slow canary holds no memory here."""
_WITHIN_S = 600.0
_PARTS = 1 << 16
_FAILURES = (NoResponseError, CallTimeoutError, InfrastructureError, msgspec.DecodeError)


class _Scored(msgspec.Struct):
    score: float | None
    outcome: str
    seconds: float = 0.0
    version: str = ""


_decoder = msgspec.json.Decoder(_Scored)


class Canary:
    """The other service. ``close`` ends its connections.

    Args:
        url: of the service, without a route.
        token: of the caller there.
        share: of the samples that are copied, 0 to 1.
        series: of this process.
    """

    def __init__(self, url: str, token: str, share: float, series: CanarySeries) -> None:
        self._url = f"{url.rstrip('/')}/v1/score"
        self._share = share
        self._series = series
        self._http = HttpClient(
            max_connections=_MOST_AT_ONCE, bearer_token=token, key_field="canary.service.tokenSecret"
        )
        self._copies: set[asyncio.Task[None]] = set()

    def offer(self, submitted: SubmittedSamples, answer: Answer) -> None:
        """Copy a sample that was scored here, if it belongs to the share. Groups are not copied."""
        if submitted.is_group or not isinstance(answer, SampleAnswer) or not self._draws(submitted.id):
            return
        if len(self._copies) >= _MOST_AT_ONCE:
            self._series.count("left_out", "")
            return
        copy = asyncio.create_task(self._compare(submitted.samples[0], answer))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    async def close(self) -> None:
        """End the copies in flight and close the connections."""
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        await self._http.close()

    def _draws(self, own_id: str) -> bool:
        """Decide by the id: a repeated request draws the same."""
        return zlib.crc32(own_id.encode()) % _PARTS < self._share * _PARTS

    async def _compare(self, sample: SampleInput, here: SampleAnswer) -> None:
        try:
            response = await self._http.post(self._url, msgspec.json.encode(_without_id(sample)), _WITHIN_S)
            if response.status != 200:
                self._series.count("unavailable", "")
                return
            there = _decoder.decode(response.body)
        except _FAILURES:
            self._series.count("unavailable", "")
            return
        self._series.compare(here.score, there.score, there.seconds, there.version)


def _without_id(sample: SampleInput) -> dict[str, Any]:
    """Return the sample for a request of its own; an id could meet that of another sample there."""
    fields: dict[str, Any] = msgspec.structs.asdict(sample)
    del fields["id"]
    return fields
