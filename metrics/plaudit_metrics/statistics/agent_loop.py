"""Compute verl's keys for a step's samples, with verl's meaning, so that its dashboards and notebooks keep working.

Sources: verl pull requests #5971 (``compute_score`` beside ``generate_sequences`` and ``tool_calls``; the slowest
sample is the one with the largest sum of the three) and #5896 (the name ``reward`` for the same figure). One
difference: an unknown number of preemptions (-1) is left out here, while verl counts it as minus one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plaudit_metrics.statistics.columns import Floats, Integers, SampleColumns

_PREFIX = "timing_s/agent_loop"


@dataclass(frozen=True)
class AgentLoopColumns:
    """Hold the measures of verl's agent loop for each sample; arrays of shape [number of samples]."""

    generate_sequences: Floats
    """Seconds in the engine, tool calls excluded."""
    tool_calls: Floats
    """Seconds in tools."""
    compute_score: Floats
    """Seconds in the scorers, waits for limits and retries included."""
    num_preempted: Integers
    """Preemptions by the engine; -1 = unknown."""
    prompt_length: Integers | None = None
    """Tokens; None leaves out both lengths of the slowest sample."""
    response_length: Integers | None = None

    @classmethod
    def from_samples(cls, samples: SampleColumns) -> AgentLoopColumns:
        """Take the samples that were generated; verl knows no others."""
        kept = slice(None) if samples.generated.all() else samples.generated
        return cls(
            generate_sequences=samples.generate_s[kept],
            tool_calls=samples.tool_s[kept],
            compute_score=(samples.limiter_s + samples.retry_s + samples.call_s)[kept],
            num_preempted=samples.num_preempted[kept],
            prompt_length=samples.prompt_tokens[kept],
            response_length=samples.response_tokens[kept],
        )


def agent_loop_statistics(columns: AgentLoopColumns) -> dict[str, float]:
    """Compute verl's ``timing_s/agent_loop/…`` keys.

    Returns:
        Per measure ``min``, ``max`` and ``mean``, and under ``slowest/`` the measures of the slowest sample (of equal
        ones the first). Without samples nothing; keys of preemptions only where they are known.
    """
    if len(columns.generate_sequences) == 0:
        return {}
    statistics: dict[str, float] = {}
    measures = {
        "generate_sequences": columns.generate_sequences,
        "tool_calls": columns.tool_calls,
        "compute_score": columns.compute_score,
    }
    slowest = int(np.argmax(columns.generate_sequences + columns.tool_calls + columns.compute_score))
    for name, values in measures.items():
        statistics |= _spread(name, values)
        statistics[f"{_PREFIX}/slowest/{name}"] = float(values[slowest])
    statistics |= _spread("num_preempted", columns.num_preempted[columns.num_preempted >= 0])
    if columns.num_preempted[slowest] >= 0:
        statistics[f"{_PREFIX}/slowest/num_preempted"] = float(columns.num_preempted[slowest])
    for name in ("prompt_length", "response_length"):
        lengths = getattr(columns, name)
        if lengths is not None:
            statistics[f"{_PREFIX}/slowest/{name}"] = float(lengths[slowest])
    for measure in ("min", "max", "mean"):
        statistics[f"{_PREFIX}/reward/{measure}"] = statistics[f"{_PREFIX}/compute_score/{measure}"]
    statistics[f"{_PREFIX}/slowest/reward"] = statistics[f"{_PREFIX}/slowest/compute_score"]
    return statistics


def _spread(name: str, values: Floats | Integers) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{_PREFIX}/{name}/min": float(values.min()),
        f"{_PREFIX}/{name}/max": float(values.max()),
        f"{_PREFIX}/{name}/mean": float(values.mean()),
    }
