"""The simulation of large runs: what its shares and its plot say of small ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest


@pytest.mark.bench
def test_the_scale_benchmark_finds_what_saturates_first(
    quick_benchmark: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plot = tmp_path / "scale.svg"
    few, many = quick_benchmark("scale", "--plot", str(plot))["rows"]
    assert (few["rollouts"], many["rollouts"]) == (2, 32)
    assert few["first"] == "rollouts", "two rollouts generate less than a worker scores"
    assert many["first"] == "workers", "one worker scores 512 samples/s of the 1,250 that 32 rollouts generate"
    assert few["samples_per_s"] < many["samples_per_s"] <= 512 * 1.05
    assert all(0 < share < 1.05 for row in (few, many) for share in row["used"].values())
    assert {"publish", "commit", "take ready", "close"} <= few["costs"].keys()
    lines = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
