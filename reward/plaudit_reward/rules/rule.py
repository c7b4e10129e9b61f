"""Make a scorer of a rule: of a plain function, called in the worker's process or in child processes.

Most rules are plain functions ``rule(sample, *, option=default, …)`` that return a number or a ``Score``. Their options
are a job's ``ruleArguments``; ``plaudit_job.rules.arguments`` reads and checks them.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from plaudit_reward.functions.result import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.scorer import Attempt, InlineScorer, Score, Scorer
from plaudit_wire.errors import WorkerKilledError
from plaudit_wire.records import Sample


class ChildRule:
    """Call a rule's function in a child process of ``isolation``, which loads this file.

    ``warm_up`` is the response and ground truth of a sample that is scored at the start, to import and cache everything
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


Rule = Callable[[str, Any, int], Scorer]
"""Makes the job's scorer of a name, not opened yet; an entry of ``RULES`` in ``rules.scorer``. The arguments are as
their class in ``plaudit_job.rules.arguments`` reads them, the number is that of child processes."""


@dataclass(frozen=True)
class FunctionRule:
    """Make a rule of a plain function."""

    function: Callable[..., float | Score]
    isolated: bool = False
    """Run it in child processes, killed at the time limit, because it computes (SymPy, a user's regular expression)."""
    warm_up: tuple[str, str] | None = None
    """Response and ground truth of a sample for its children to score first; see ``ChildRule``."""

    def __call__(self, name: str, arguments: Any, processes: int) -> Scorer:
        """Make a scorer that calls the function in this process or in child processes."""
        if not self.isolated:
            return InlineScorer(name, partial(self.function, **arguments))
        child_arguments = {
            "module": self.function.__module__,
            "function": self.function.__name__,
            "arguments": dict(arguments),
            "warm_up": self.warm_up,
        }
        target = Target(inspect.getfile(ChildRule), ChildRule.__name__, child_arguments, by_cpu=True)
        return ComputingScorer(name, target, processes=processes)


KILLED_BY = signal.SIGVTALRM
"""Ends a process whose computation has passed its limit of CPU seconds and cannot be interrupted."""


class ComputingScorer(FunctionScorer):
    """Score in child processes; an answer that takes too many CPU seconds to compute is wrong, on any machine."""

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        try:
            return await super().score(sample, attempt)
        except WorkerKilledError as error:
            if KILLED_BY.name not in str(error):
                raise
            return Score.scored(0.0, reason="not shown to be right within the limit of CPU seconds")
