"""Define the Prometheus series of a broker of machines, and how its parts fill them.

Labels are fixed values, so they stay few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from plaudit_wire.errors import DataError, InfrastructureError

State = Literal["starting", "warm", "claimed", "verifying"]
"""Of a machine with a place."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class BrokerSeries:
    """Hold the series of one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.seconds = Histogram(
            "plaudit_broker_seconds",
            "Seconds of a stage: claim (until a place is free), start, fill, exec, verify, keep, release",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.failures = prometheus_client.Counter(
            "plaudit_broker_failures", "Stages that failed, by reason", ["stage", "reason"], registry=registry
        )
        self.superseded = prometheus_client.Counter(
            "plaudit_broker_superseded", "Machines removed because their sample began again", registry=registry
        )

    def show(self, num_waiting: Callable[[], float], num_in_state: Callable[[str], float]) -> None:
        """Show the present numbers of a broker."""
        waiting = Gauge("plaudit_broker_claims_waiting", "Claims that wait for a place", registry=self.registry)
        waiting.set_function(num_waiting)
        machines = Gauge("plaudit_broker_machines", "Machines with a place", ["state"], registry=self.registry)
        for state in get_args(State):
            machines.labels(state).set_function(partial(num_in_state, state))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Observe the seconds of a stage, and count it if it fails."""
        began_s = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failures.labels(stage, reason_of(error)).inc()
            raise
        finally:
            self.seconds.labels(stage).observe(time.monotonic() - began_s)

    def page(self) -> bytes:
        """Return the series as Prometheus reads them."""
        return generate_latest(self.registry)


def reason_of(error: Exception) -> str:
    """Return why a machine failed, as a label."""
    kinds = {DataError: "data_error", InfrastructureError: "infra_error", OSError: "disk"}
    return next((reason for kind, reason in kinds.items() if isinstance(error, kind)), "other")
