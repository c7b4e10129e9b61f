r"""Score NuminaMath (data sources ``numina_…``) with PRIME's graders.

The answer is the text after the last ``answer:``, ``answer is`` or ``answers are``, or in the last box; it is right
when PRM800K's grader or ToRA's accepts it (``prm800k``, ``math_equal``). Cui et al. 2025, "Process Reinforcement
through Implicit Rewards". The results are those of verl's ``prime_math``; two flaws of it can be corrected: its
comparison of expressions never succeeds (``symbolic``), and a hundredth and the hundredfold of the truth are right
(``percentages``).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from msgspec import Meta

from plaudit_reward.rules.cpu_limit import shown_within
from plaudit_reward.rules.mathematics.boxed import closing_brace
from plaudit_reward.rules.mathematics.math_equal import ComparisonOptions, math_equal
from plaudit_reward.rules.mathematics.prm800k import PRIME, same_answer
from plaudit_wire.errors import DataError
from plaudit_wire.sample import Sample

_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_VERBS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def prime_math(
    sample: Sample,
    *,
    symbolic: bool = False,
    percentages: bool = True,
    limit_seconds: Annotated[float, Meta(gt=0)] = 10.0,
) -> float:
    """Return 1.0 when the answer is right, else 0.0.

    Args:
        symbolic: compare expressions by Math-Verify if no other step finds them equal.
        percentages: a hundredth and the hundredfold of the truth are also right.
        limit_seconds: CPU seconds of each of the two graders; an answer not shown to be right by then is wrong.
    """
    truth = sample.ground_truth
    if not isinstance(truth, str | int | float) or isinstance(truth, bool):
        raise DataError(f"ground_truth is {truth!r}; prime_math needs the answer as text or number")
    answer, truth = extracted_answer(sample.response), str(truth)
    how = ComparisonOptions(percentages, symbolic)
    graders = (partial(same_answer, answer, truth, PRIME), partial(math_equal, answer, truth, how))
    return 1.0 if any(shown_within(limit_seconds, grader) for grader in graders) else 0.0


def extracted_answer(response: str) -> str:
    """Return the response's answer; the whole response if no answer is marked."""
    for marker in _BEFORE:
        response = _behind(response, marker)
    for marker in _AFTER:
        start = response.lower().rfind(marker)
        response = response[:start].strip() if start >= 0 else response
    response = _box(response) or response
    if ". " in response:
        response = response[: response.lower().rfind(". ")].strip()
    for marker in _VERBS:
        response = _behind(response, marker)
    return response


def _behind(response: str, marker: str) -> str:
    start = response.lower().rfind(marker)
    return response[start + len(marker) :].strip() if start >= 0 else response


def _box(response: str) -> str | None:
    start = response.rfind("\\boxed")
    start = start if start >= 0 else response.rfind("\\fbox")
    end = closing_brace(response, start) if start >= 0 else None
    return None if end is None else response[response.index("{", start) + 1 : end].strip()
