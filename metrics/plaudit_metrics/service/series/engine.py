"""Compute the Prometheus series of the rollouts' engines, over all live rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily

from plaudit_metrics.service.series.optional_gauge import GaugeValues, gauge_family
from plaudit_wire.records import EngineStatus


def engine_gauges(engines: Sequence[EngineStatus]) -> Iterator[GaugeMetricFamily]:
    """Yield the gauges of the live rollouts' engines, without values if there are none."""
    running, waiting = (sum(getattr(engine, state) for engine in engines) for state in ("running", "waiting"))
    requests: GaugeValues = {("running",): running, ("waiting",): waiting} if engines else {}
    yield gauge_family("plaudit_engine_requests", "Requests in the engines of all rollouts", ["state"], requests)
    for name, documentation, values in (
        (
            "plaudit_engine_kv_cache_ratio",
            "Share of the engines' key-value cache in use",
            [engine.kv_cache_share for engine in engines],
        ),
        (
            "plaudit_engine_first_token_seconds",
            "Mean time to the first token of the newest requests",
            [engine.first_token_s for engine in engines],
        ),
    ):
        known = [value for value in values if value is not None]
        figures: GaugeValues = {("mean",): sum(known) / len(known), ("max",): max(known)} if known else {}
        yield gauge_family(name, documentation, ["statistic"], figures)
