"""Every kind of process killed once in a running job: the short form of benchmarks/chaos.py."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(900)
def test_a_job_survives_the_kill_of_each_of_its_processes(quick_benchmark: Callable[[str], dict[str, Any]]) -> None:
    figures = quick_benchmark("chaos")
    assert figures["kills"] == 4
    assert figures["same_prompts_trained"]
    assert figures["trained_twice"] == 0
    assert figures["poison"] == 0
