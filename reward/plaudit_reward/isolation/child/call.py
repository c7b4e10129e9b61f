"""Call a user's function in a child and turn whatever happens into typed scores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.functions.trace import within_trace
from plaudit_reward.isolation.messages import Finished, Work
from plaudit_reward.score import Score
from plaudit_wire.frames import frame

Resolve = Callable[[Any], Any]
"""Turns the return value of a call into its result (awaits it)."""


def perform(function: UserFunction, work: Work, resolve: Resolve | None = None, *, alone: bool = False) -> Finished:
    """Call the function for one work; never raises. ``alone``: the child runs one work at a time."""
    began = time.perf_counter()
    try:
        with within_trace(work.traceparent, alone=alone):
            returned = function.call(work.samples, work.values, post_process=work.post_process)
            if resolve is not None:
                returned = resolve(returned)
        scores = function.scores(returned, num_scores(work), post_process=work.post_process)
    except BaseException as error:  # the user's code: sys.exit and the like included
        scores = function.failed(error, num_scores(work))
    return finished(work, time.perf_counter() - began, scores)


def finished(work: Work, seconds: float, scores: list[Score]) -> Finished:
    """Return the report of one work; a score that cannot be encoded (no valid Unicode) becomes a ``data_error``."""
    report = Finished(work.id, seconds, scores)
    if any(score.extra or score.reason for score in scores):
        try:
            frame([report])
        except (TypeError, ValueError, OverflowError) as error:
            broken = Score.failed("data_error", f"the result cannot be encoded: {type(error).__name__}")
            return Finished(work.id, seconds, [broken] * len(scores))
    return report


def num_scores(work: Work) -> int:
    """Return how many scores a work must have."""
    return len(work.values) if work.post_process else len(work.samples)
