"""``kind: http``: wait for the limits → send the sample → read its score."""

from __future__ import annotations

from collections.abc import Callable

from plaudit_reward.endpoint.access import EndpointAccess
from plaudit_reward.endpoint.limiter import Limiter
from plaudit_reward.endpoint.usage import UsageReport
from plaudit_reward.remote.client import RemoteClient
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.sample import Sample


class RemoteScorer:
    """Score samples by somebody else's endpoint.

    Args:
        client: asks the endpoint; closed here.
        limiter: started and stopped here.
        report: adds the usage to the run's; started and stopped here. None outside of a run.
        traceparent: returns the trace context of a sample, sent as a header. None where nothing is traced.
    """

    def __init__(
        self,
        name: str,
        client: RemoteClient,
        limiter: Limiter,
        report: UsageReport | None = None,
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._access = EndpointAccess(name, client.url, limiter, report)
        self._traceparent = traceparent

    async def open(self) -> None:
        """Start the limiter. The endpoint may come up later: the first sample connects to it."""
        self._access.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._access.circuit_open

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        headers = {"traceparent": self._traceparent(sample)} if self._traceparent else None
        async with self._access.request(0, attempt) as passage:
            return await self._client.score(sample, attempt.limit_s, self._access.on_sent(passage), headers)

    def room(self) -> int:
        """Return how many more samples could begin soon; one, the probe, while the circuit is open."""
        return self._access.room()

    async def close(self) -> None:
        """Stop the limiter and the report, and close the connections."""
        await self._access.stop()
        await self._client.close()
