"""Run a rule in a child process of ``isolation``; ``rule.FunctionRule`` loads this class there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from plaudit_reward.score import Score
from plaudit_wire.sample import Sample


class ChildRule:
    """Call a rule's function.

    Args:
        warm_up: response and ground truth of a sample that is scored at the start, to import and cache everything
            before the first sample: otherwise that sample takes so long that it looks hung.
    """

    def __init__(
        self, module: str, function: str, arguments: Mapping[str, Any], warm_up: Sequence[str] | None = None
    ) -> None:
        self._function = partial(getattr(import_module(module), function), **arguments)
        if warm_up is not None:
            response, ground_truth = warm_up
            self._function(Sample("warm-up", 0, "", "", response, ground_truth))

    def score(self, sample: Sample) -> float | Score:
        """Score one sample."""
        result: float | Score = self._function(sample)
        return result
