"""The benchmark of conversations with slow tools, beside verl's own tool agent loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trainer_environments import CACHE, python


@pytest.mark.timeout(900)
def test_the_same_conversations_are_held_in_verls_tool_agent_loop(
    quick_benchmark: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    interpreter = python("verl")
    if interpreter is None:
        pytest.skip(f"the environment verl is not built in {CACHE}: make trainers-build")
    found = quick_benchmark("agent_loop", "--verl", str(interpreter))["verl"]
    assert found["workers"] == 2
    assert [(row["kind"], row["samples"]) for row in found["rows"]] == [("blocking", 24), ("async", 24)]
    assert all(row["ratio"] >= 1 for row in found["rows"])
    assert "async tools, 2 workers" in capsys.readouterr().out
