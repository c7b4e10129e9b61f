"""The short form of benchmarks/delay_profile.py: it runs, trains every group, and nothing beats its lower bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_the_delay_profile_runs_and_its_lower_bound_is_one(
    quick_benchmark: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    results = quick_benchmark("delay_profile", "--strategy", "both")["results"]
    assert [(result["strategy"], result["cap"]) for result in results] == [("both", "8"), ("both", "none")]
    assert all(result["wall_s"] >= result["bound_s"] > 0 for result in results)
    assert {result["bound_by"] for result in results if result["cap"] == "8"} == {"reward"}
    assert len(capsys.readouterr().out.splitlines()) == 3
