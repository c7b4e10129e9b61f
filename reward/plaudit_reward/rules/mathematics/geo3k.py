r"""Score Geometry3K (data source ``hiyouga/geometry3k``): the boxed answer, and a small share for thinking first.

``(1 - format_score) * right + format_score * formed``: right when PRM800K's grader finds the ground truth in the last
``\boxed{…}``; formed when the response is ``<think>…</think>…\boxed{…}…``. The results are those of verl's
``geo3k`` with ``mathruler`` 0.1.0.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from msgspec import Meta

from plaudit_reward.rules.cpu_limit import shown_within
from plaudit_reward.rules.mathematics.boxed import last_braced
from plaudit_reward.rules.mathematics.prm800k import MATHRULER, same_answer
from plaudit_reward.rules.truth import text_truth
from plaudit_reward.score import Score
from plaudit_wire.sample import Sample

_FORM = ("</think>", "\\boxed{", "}")
_NO_ANSWER = "None"
"""mathruler's result for a response without a box."""


def geo3k(
    sample: Sample,
    *,
    boxed: bool = True,
    format_score: Annotated[float, Meta(ge=0, le=1)] = 0.1,
    limit_seconds: Annotated[float, Meta(gt=0)] = 10.0,
) -> Score:
    """Return a value from 0 to 1; extras ``acc`` and ``format`` (1 or 0).

    Args:
        boxed: only the box is the answer, else the whole response (verl's ``use_boxed``).
        format_score: the share of the form.
        limit_seconds: CPU seconds of the comparison; an answer that is not shown to be right by then is wrong.
    """
    truth = text_truth(sample.ground_truth, "geo3k")
    answer = sample.response
    if boxed:
        inside = last_braced(answer)
        answer = _NO_ANSWER if inside is None else inside.strip()
    right = float(shown_within(limit_seconds, partial(same_answer, answer, truth, MATHRULER)))
    formed = float(is_formed(sample.response))
    return Score.scored((1.0 - format_score) * right + format_score * formed, acc=right, format=formed)


def is_formed(response: str) -> bool:
    r"""Return True if it begins with ``<think>``, and ``</think>``, ``\boxed{`` and ``}`` follow in this order."""
    if not response.startswith("<think>"):
        return False
    position = len("<think>")
    for part in _FORM:
        found = response.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True
