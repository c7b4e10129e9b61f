"""Declare and show the Prometheus series of the rollouts' engines, over all live rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plaudit_metrics.service.series.optional_gauge import OptionalGauge
from plaudit_wire.records import EngineStatus


class EngineSeries:
    """Show the series of the rollouts' engines.

    Args:
        gauge: declares a gauge by its name, documentation and labels; it is cleared while Redis does not respond.
    """

    def __init__(self, gauge: Callable[..., OptionalGauge]) -> None:
        self._requests = gauge("plaudit_engine_requests", "Requests in the engines of all rollouts", "state")
        self._cache = gauge(
            "plaudit_engine_kv_cache_ratio", "Share of the engines' key-value cache in use", "statistic"
        )
        self._first_token = gauge(
            "plaudit_engine_first_token_seconds", "Mean time to the first token of the newest requests", "statistic"
        )

    def show(self, engines: Sequence[EngineStatus]) -> None:
        """Show the engines of the live rollouts."""
        self._requests.replace(
            {
                ("running",): sum(engine.running for engine in engines),
                ("waiting",): sum(engine.waiting for engine in engines),
            }
            if engines
            else {}
        )
        self._cache.replace(_mean_and_max([engine.kv_cache_share for engine in engines]))
        self._first_token.replace(_mean_and_max([engine.first_token_s for engine in engines]))


def _mean_and_max(values: Sequence[float | None]) -> dict[tuple[str, ...], float]:
    known = [value for value in values if value is not None]
    return {("mean",): sum(known) / len(known), ("max",): max(known)} if known else {}
