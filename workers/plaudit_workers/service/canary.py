"""Score a share of the samples and groups by another service as well: its results are compared, never answered."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Histogram

from plaudit_reward.http import HttpClient, NoResponseError, Token
from plaudit_wire.errors import CallTimeoutError, InfrastructureError
from plaudit_wire.records import is_drawn
from plaudit_workers.service.callers import GatewayAnswer, GroupAnswer, SampleAnswer
from plaudit_workers.service.lines import SampleInput
from plaudit_workers.service.requests import SubmittedSamples

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets of a sample's seconds."""
_DIFFERENCES = (-10, -1, -0.5, -0.25, -0.1, -0.01, 0, 0.01, 0.1, 0.25, 0.5, 1, 10)
_EQUAL_WITHIN = 1e-6


class CanarySeries:
    """Compare two services in Prometheus series and for the service's description, by the figures of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples = prometheus_client.Counter(
            "plaudit_gateway_canary_samples",
            "Samples that a canary scored as well: equal, different, only_here, only_there, neither (has a score); "
            "unavailable, left_out",
            ["result", "version"],
            registry=registry,
        )
        self._difference = Histogram(
            "plaudit_gateway_canary_difference",
            "Score of the canary minus score of the service",
            buckets=_DIFFERENCES,
            registry=registry,
        )
        self._seconds = Histogram(
            "plaudit_gateway_canary_seconds", "Seconds of a sample in the canary", buckets=SECONDS, registry=registry
        )
        self._results: Counter[str] = Counter()
        self._sum = self._sum_of_seconds = 0.0
        self._versions: dict[str, None] = {}

    def count(self, result: str, version: str = "", num_samples: int = 1) -> None:
        """Count samples with the same result."""
        self._samples.labels(result, version).inc(num_samples)
        self._results[result] += num_samples

    def compare(self, here: float | None, there: float | None, seconds: float, version: str) -> None:
        """Count a sample that both have scored; None means that the service has no score."""
        self._versions[version] = None
        self._seconds.observe(seconds)
        self._sum_of_seconds += seconds
        self.count(_result(here, there), version)
        if here is not None and there is not None:
            self._difference.observe(there - here)
            self._sum += there - here

    def description(self) -> dict[str, Any]:
        """Return the comparison so far, of this process."""
        both = self._results["equal"] + self._results["different"]
        scored = both + sum(self._results[name] for name in ("only_here", "only_there", "neither"))
        return {
            "samples": dict(self._results),
            "agreement": self._results["equal"] / both if both else None,
            "mean_difference": self._sum / both if both else None,
            "mean_seconds": self._sum_of_seconds / scored if scored else None,
            "versions": list(self._versions),
        }


def _result(here: float | None, there: float | None) -> str:
    if here is None or there is None:
        return "neither" if here is there else "only_there" if here is None else "only_here"
    return "equal" if math.isclose(here, there, rel_tol=_EQUAL_WITHIN, abs_tol=_EQUAL_WITHIN) else "different"


_MOST_AT_ONCE = 512
"""Copied samples in flight; further ones are left out, so that a slow canary holds no memory here. A group that is
larger goes alone."""
_WITHIN_S = 600.0
_FAILURES = (NoResponseError, CallTimeoutError, InfrastructureError, msgspec.DecodeError)


class _Scored(msgspec.Struct):
    score: float | None
    outcome: str
    seconds: float = 0.0
    version: str = ""


class _ScoredGroup(msgspec.Struct):
    results: list[_Scored]


_decoder = msgspec.json.Decoder(_Scored)
_group_decoder = msgspec.json.Decoder(_ScoredGroup)


class Canary:
    """Copy a ``share`` of the samples (0 to 1) to another service and compare. ``close`` ends its connections."""

    def __init__(self, url: str, token: Token, share: float, series: CanarySeries) -> None:
        self._url = url.rstrip("/")
        self._share = share
        self._series = series
        self._http = HttpClient(
            max_connections=_MOST_AT_ONCE, bearer_token=token, key_field="canary.service.tokenSecret"
        )
        self._copies: set[asyncio.Task[None]] = set()
        self._num_in_flight = 0

    def offer(self, submitted: SubmittedSamples, answer: GatewayAnswer) -> None:
        """Copy a sample or group that was scored here, if it belongs to the share. A group is copied as a whole."""
        # By the id: a repeated request draws the same.
        if not isinstance(answer, SampleAnswer | GroupAnswer) or not is_drawn(submitted.id, self._share):
            return
        num_samples = len(submitted.samples)
        if self._num_in_flight and self._num_in_flight + num_samples > _MOST_AT_ONCE:
            self._series.count("left_out", num_samples=num_samples)
            return
        self._num_in_flight += num_samples
        copy = asyncio.create_task(self._compare(submitted, answer))
        self._copies.add(copy)
        copy.add_done_callback(partial(self._end, num_samples))

    async def close(self) -> None:
        """End the copies in flight and close the connections."""
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        await self._http.close()

    def _end(self, num_samples: int, copy: asyncio.Task[None]) -> None:
        self._copies.discard(copy)
        self._num_in_flight -= num_samples

    async def _compare(self, submitted: SubmittedSamples, answer: SampleAnswer | GroupAnswer) -> None:
        here = answer.results if isinstance(answer, GroupAnswer) else [answer]
        try:
            there = await self._scored(submitted)
        except _FAILURES:
            there = []
        if len(there) != len(here):
            self._series.count("unavailable", num_samples=len(here))
            return
        for own, other in zip(here, there, strict=True):
            self._series.compare(own.score, other.score, other.seconds, other.version)

    async def _scored(self, submitted: SubmittedSamples) -> Sequence[_Scored]:
        """Return the canary's results; [] if it refuses the request."""
        samples = [_without_id(sample) for sample in submitted.samples]
        route, body = ("groups", {"samples": samples}) if submitted.is_group else ("score", samples[0])
        response = await self._http.post(f"{self._url}/v1/{route}", msgspec.json.encode(body), _WITHIN_S)
        if response.status != 200:
            return []
        if submitted.is_group:
            return _group_decoder.decode(response.body).results
        return [_decoder.decode(response.body)]


def _without_id(sample: SampleInput) -> dict[str, Any]:
    """Return the sample for a request of its own; an id could meet that of another sample there."""
    fields: dict[str, Any] = msgspec.structs.asdict(sample)
    del fields["id"]
    return fields
