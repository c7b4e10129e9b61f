"""verl's keys carry verl's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit_metrics.statistics.steps import AgentLoopColumns, agent_loop_statistics, step_statistics
from stage_records import build_sample

SECONDS = st.floats(0, 1000, allow_nan=False)
ROW = st.fixed_dictionaries(
    {
        "generate_sequences": SECONDS,
        "tool_calls": SECONDS,
        "compute_score": SECONDS,
        "num_preempted": st.integers(0, 9),
        "prompt_length": st.integers(1, 5000),
        "response_length": st.integers(0, 5000),
    }
)


def verl_statistics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The meaning of verl's keys, spelt out row by row."""
    statistics: dict[str, float] = {}
    slowest = rows[0]
    for row in rows:
        total = row["generate_sequences"] + row["tool_calls"] + row["compute_score"]
        if total > slowest["generate_sequences"] + slowest["tool_calls"] + slowest["compute_score"]:
            slowest = row
    for name in ("generate_sequences", "tool_calls", "compute_score", "num_preempted"):
        values = [row[name] for row in rows]
        statistics[f"timing_s/agent_loop/{name}/min"] = min(values)
        statistics[f"timing_s/agent_loop/{name}/max"] = max(values)
        statistics[f"timing_s/agent_loop/{name}/mean"] = sum(values) / len(values)
        statistics[f"timing_s/agent_loop/slowest/{name}"] = slowest[name]
    for name in ("prompt_length", "response_length"):
        statistics[f"timing_s/agent_loop/slowest/{name}"] = slowest[name]
    for name in ("min", "max", "mean"):
        statistics[f"timing_s/agent_loop/reward/{name}"] = statistics[f"timing_s/agent_loop/compute_score/{name}"]
    statistics["timing_s/agent_loop/slowest/reward"] = slowest["compute_score"]
    return statistics


def columns_of(rows: list[dict[str, Any]]) -> AgentLoopColumns:
    return AgentLoopColumns(**{name: np.array([row[name] for row in rows]) for name in rows[0]})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROW, min_size=1, max_size=60))
def test_figures_equal_a_plain_loop_over_dictionaries(rows: list[dict[str, Any]]) -> None:
    assert agent_loop_statistics(columns_of(rows)) == pytest.approx(verl_statistics(rows), rel=1e-9, abs=1e-9)


def test_of_equally_slow_samples_the_first_is_the_slowest() -> None:
    row = {"generate_sequences": 1.0, "tool_calls": 2.0, "compute_score": 3.0, "num_preempted": 0}
    rows = [row | {"prompt_length": 5, "response_length": 6}, row | {"prompt_length": 7, "response_length": 8}]
    assert agent_loop_statistics(columns_of(rows))["timing_s/agent_loop/slowest/prompt_length"] == 5


def test_unknown_preemptions_do_not_enter_the_figures() -> None:
    rest = (np.zeros(3), np.zeros(3), np.array([2, -1, 4]), np.ones(3, int), np.ones(3, int))
    statistics = agent_loop_statistics(AgentLoopColumns(np.array([1.0, 9.0, 2.0]), *rest))
    assert statistics["timing_s/agent_loop/num_preempted/min"] == 2
    assert statistics["timing_s/agent_loop/num_preempted/mean"] == 3
    assert "timing_s/agent_loop/slowest/num_preempted" not in statistics


def test_no_samples_give_no_keys() -> None:
    nothing, none = np.empty(0), np.empty(0, int)
    assert agent_loop_statistics(AgentLoopColumns(nothing, nothing, nothing, none, none, none)) == {}


def test_a_step_carries_the_keys_for_its_generated_samples() -> None:
    samples = [
        build_sample(index=0, generation=2.0, tools=1.0, limiter=0.25, retry=0.5, score=3.0),
        build_sample(index=1, engine_queue=0.5, generation=4.0, score=1.0),
    ]
    statistics = step_statistics(samples, opened=0.0, closed=1.0)
    assert statistics["timing_s/agent_loop/generate_sequences/max"] == 4.5
    assert statistics["timing_s/agent_loop/slowest/compute_score"] == 3.75
    assert statistics["timing_s/agent_loop/slowest/tool_calls"] == 1.0
