r"""MATH: the boxed answer equals the ground truth in the normal form of the MATH benchmark (``hendrycks``).

The results are those of verl's ``math_reward``. Its search for the box has flaws that ``last_box_wins`` corrects: a
``\boxed `` with a blank anywhere in the response wins over every later ``\boxed{…}`` and takes all that follows up to
the next ``$``; ``\fbox{5}`` and ``\boxed`` with braces on the next line count as no answer.
"""

from __future__ import annotations

from plaudit_reward.rules.mathematics.boxed import closing_brace, last_box
from plaudit_reward.rules.mathematics.hendrycks import MalformedError, normal_form
from plaudit_reward.rules.truth import text_truth
from plaudit_wire.sample import Sample

_SPACED = "\\boxed "
_BRACED = "\\boxed{"


def math_reward(sample: Sample, *, last_box_wins: bool = False) -> float:
    r"""Return 1.0 when the boxed answer equals the ground truth, else 0.0.

    Args:
        sample: its ground truth is the answer, as LaTeX without a box.
        last_box_wins: the last box counts, whether ``\boxed{5}``, ``\boxed {5}``, ``\boxed 5`` or ``\fbox{5}``.
    """
    truth = text_truth(sample.ground_truth, "math_reward")
    answer = last_box(sample.response) if last_box_wins else _verls_box(sample.response)
    return 1.0 if answer is not None and equivalent(answer, truth) else 0.0


def equivalent(answer: str, truth: str) -> bool:
    """Return True if two answers have the same normal form or, where one has none, the same text."""
    try:
        return normal_form(answer) == normal_form(truth)
    except MalformedError:
        return answer == truth


def _verls_box(response: str) -> str | None:
    if _SPACED in response:
        return response.rsplit(_SPACED, 1)[1].split("$", 1)[0]
    start = response.rfind("\\boxed")
    if start < 0 or not response.startswith(_BRACED, start):
        return None
    end = closing_brace(response, start)
    return None if end is None else response[start + len(_BRACED) : end]
