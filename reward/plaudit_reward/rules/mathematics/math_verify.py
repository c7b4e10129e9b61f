r"""Math-Verify: the response's answer and the ground truth are the same expression.

The results are those of verl's ``math_verify``: the ground truth is read as LaTeX in a box, the response as LaTeX or as
a plain expression, and any pair of what was found may agree. A comparison that takes longer than its limit is 0, as in
verl; here the limit is CPU seconds.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

from msgspec import Meta

from plaudit_reward.rules.cpu_limit import shown_within
from plaudit_reward.rules.truth import text_truth
from plaudit_wire.sample import Sample

_LIBRARY = "math_verify"


def math_verify(sample: Sample, *, limit_seconds: Annotated[float, Meta(gt=0)] = 30.0) -> float:
    """Return 1.0 when they are the same, else 0.0.

    Args:
        sample: its ground truth is the answer, as LaTeX without a box.
        limit_seconds: CPU seconds of one comparison.
    """
    truth = text_truth(sample.ground_truth, "math_verify")
    return 1.0 if shown_within(limit_seconds, partial(verified, sample.response, truth)) else 0.0


def verified(response: str, truth: str) -> bool:
    """Return True if Math-Verify finds the truth among the response's answers; call it under ``cpu_limit``."""
    from math_verify.grader import verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger(_LIBRARY).setLevel(logging.ERROR)  # it warns that its own time limits are off
    golden = parse(f"\\boxed{{{truth}}}", (LatexExtractionConfig(),), parsing_timeout=None)
    given = parse(response, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
    return bool(golden and given and verify(golden, given, timeout_seconds=None))
