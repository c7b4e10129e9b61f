"""Score GSM8K: the final number of the answer equals the ground truth, character by character.

The results are those of verl's scorer: only the last 300 characters count; ``strict`` takes the number after the last
``#### `` (the format that GSM8K's own answers have) without its thousands separators; ``flexible`` takes the last
thing that looks like a number, as it stands. 1 when it equals the ground truth, else 0.

A ground truth with ``####`` is GSM8K's own ``answer`` column, a whole solution: the number behind the last ``####``
counts, without its thousands separators, as verl's preparation of the data reads it.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from plaudit_reward.rules.truth import text_truth
from plaudit_wire.errors import DataError
from plaudit_wire.sample import Sample

NUM_TAIL_CHARACTERS = 300
"""Characters at the end of the response that are read."""

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_SOLUTION_NUMBER = re.compile(r"####\s*\$?(-?[0-9.,]*[0-9])")


def strict_answer(response: str) -> str | None:
    """Return the number after the last ``#### `` without commas; None if there is none."""
    marked = _MARKED.findall(response[-NUM_TAIL_CHARACTERS:])
    return str(marked[-1]).replace(",", "") if marked else None


def flexible_answer(response: str) -> str | None:
    """Return the last number, skipping lone full stops; None if nothing looks like a number.

    When there are only full stops, the first of them is the answer (verl's result, which equals no ground truth).
    """
    candidates = _NUMBER.findall(response[-NUM_TAIL_CHARACTERS:])
    if not candidates:
        return None
    return next((str(c) for c in reversed(candidates) if c != "."), str(candidates[0]))


def gsm8k(sample: Sample, *, numeric: bool = False) -> float:
    """Return 1.0 when the strict answer equals the ground truth, else 0.0.

    Args:
        sample: its ground truth is the number, as text, or a solution that ends with ``#### `` and the number.
        numeric: compare them as numbers, without thousands separators, dollars and a full stop at the end.

    Raises:
        DataError: the ground truth is not text, or there is no number behind its ``####``.
    """
    return _compare(strict_answer(sample.response), sample.ground_truth, numeric)


def gsm8k_flexible(sample: Sample, *, numeric: bool = False) -> float:
    """Return 1.0 when the flexible answer equals the ground truth, else 0.0; arguments as ``gsm8k``."""
    return _compare(flexible_answer(sample.response), sample.ground_truth, numeric)


def _compare(answer: str | None, ground_truth: object, numeric: bool) -> float:
    truth = _true_number(text_truth(ground_truth, "gsm8k"))
    if numeric and answer is not None:
        return 1.0 if _number(answer) == _number(truth) is not None else 0.0
    return 1.0 if answer == truth else 0.0


def _true_number(truth: str) -> str:
    if "####" not in truth:
        return truth
    numbers = _SOLUTION_NUMBER.findall(truth)
    if not numbers:
        raise DataError(f"ground_truth {truth[-80:]!r} has no number behind ####; gsm8k needs it, or the number alone")
    return str(numbers[-1]).replace(",", "")


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "").strip().removesuffix("."))
    except InvalidOperation:
        return None
