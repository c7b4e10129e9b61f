"""The benchmark runs in its short form: every way to the logits gives the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_all_ways_give_the_same_logits(quick_benchmark: Callable[..., dict[str, Any]]) -> None:
    found = quick_benchmark("reward_model")
    assert set(found["sequences_per_s"]) == {"loop, one by one", "loop, batches", "model_server"}
    assert max(found["logits_apart"].values()) < 1e-4
