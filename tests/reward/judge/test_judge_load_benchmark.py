"""The short form of benchmarks/judge_load.py: every sample is scored, and no sample pays for its neighbours' faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_every_sample_is_scored_and_none_pays_for_its_neighbours(
    quick_benchmark: Callable[..., dict[str, Any]],
) -> None:
    found = quick_benchmark("judge_load")
    assert {row["client"] for row in found["steady"]} >= {"judge", "model", "aiohttp"}
    for row in [*found["faulty"], *(row for row in found["steady"] if row["client"] in {"judge", "model"})]:
        assert row["outcomes"] == {"scored": row["samples"]}
        assert row["server"]["innocents_asked_again"] == 0
        assert row["server"]["most_at_a_time"] <= row["in_flight"]
    assert found["faulty"][0]["server"]["faults"] > 0
