"""The benchmark of the worker against bare vLLM runs, and both generate the same tokens."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_worker_generates_the_same_tokens_as_bare_vllm(quick_benchmark: Callable[[str], dict[str, Any]]) -> None:
    found = quick_benchmark("rollout_overhead")
    for name in ("long", "short"):
        assert found[name]["same_responses"]
        assert found[name]["ratio"] > 0.1
