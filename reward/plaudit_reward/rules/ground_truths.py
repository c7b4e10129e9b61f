"""Find the ground truths that a rule cannot use: with them every response would get the same score.

Scoring makes such a row a ``data_error``, and a job's data can be checked for them before a run. One check takes a
fraction of a millisecond, whatever the row holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from plaudit_reward.code.cases import cases_of
from plaudit_reward.rules.answer_values import read
from plaudit_reward.rules.final_answer import final_truth
from plaudit_reward.rules.prm800k import MalformedError, hendrycks_form
from plaudit_reward.rules.string_rules import (
    answer_form,
    careful_form,
    gsm8k_truth,
    normal_form,
    number_of,
    search_targets,
)
from plaudit_wire.errors import DataError
from plaudit_wire.printable import shown

_MOST_CHARACTERS = 10_000
_MOST_WORDS = 12
"""Of an answer in words; what is longer is a solution."""
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_PLACEHOLDERS = frozenset(("proof", "notfound", "not found", "n/a", "null", "nan", "tbd", "todo", "[invalid]"))
"""What data sets write where a problem has no answer, NuminaMath for one."""
_MATH_REMEDY = "give the answer alone, such as 6, or use rule: math, which also reads solutions"
_REMOVE = "remove the row, or give its answer"
Check = Callable[[Mapping[str, Any], Any], str | None]


def _no_text(truth: Any) -> str:
    return f"is missing: {_REMOVE}" if truth is None else f"is {type(truth).__name__}, not text: write it in quotes"


def _answer_problem(truth: Any) -> str | None:
    """Return what is wrong with a truth that should be a mathematical answer, for every rule."""
    if not isinstance(truth, str):
        return _no_text(truth)
    if not truth.strip():
        return f"is blank: {_REMOVE}"
    found = final_truth(truth)
    text = "" if found is None else found.text
    if text.strip().strip(".$").casefold() in _PLACEHOLDERS:
        return f"stands for a problem without an answer: {_REMOVE}"
    if not read(text):
        return f"holds no answer: {_REMOVE}"
    return None


def _math(_: Mapping[str, Any], truth: Any) -> str | None:
    problem = _answer_problem(truth)
    if problem is None and _unbalanced(truth):
        return "has braces that do not match: mend the LaTeX"
    return problem


def _unbalanced(text: str) -> bool:
    bare = text.replace("\\{", "").replace("\\}", "")
    return bare.count("{") != bare.count("}")


def _bare_answer(name: str, form: Callable[[str], str]) -> Check:
    """Return the check of a rule that compares with the text of the answer alone."""

    def check(_: Mapping[str, Any], truth: Any) -> str | None:
        if name == "prime_math" and isinstance(truth, int | float) and not isinstance(truth, bool):
            return None
        problem = _answer_problem(truth)
        if problem is not None:
            return problem
        if len(truth) > _MOST_CHARACTERS:
            return f"has {len(truth)} characters: {_MATH_REMEDY}"
        if re.search(r"\\(?:boxed|fbox)\b", truth):
            return (
                f"is an answer in a box, or a solution with one; {name} compares with the answer alone: {_MATH_REMEDY}"
            )
        if len(words := _WORDS.findall(truth)) > _MOST_WORDS:
            return f"is a text of {len(words)} words, which no response repeats: {_MATH_REMEDY}"
        with suppress(MalformedError):  # compared as it stands
            if not form(truth).strip():
                return f"is blank in the normal form of {name}, so that an empty answer would be right: {_MATH_REMEDY}"
        return None

    return check


def _geo3k(arguments: Mapping[str, Any], truth: Any) -> str | None:
    if isinstance(truth, str) and truth.strip() == "None":
        return f"is what geo3k reads from a response without a box, so that it would be right: {_REMOVE}"
    return _bare_answer("geo3k", hendrycks_form)(arguments, truth)


def _gsm8k(arguments: Mapping[str, Any], truth: Any) -> str | None:
    if not isinstance(truth, str):
        return _no_text(truth)
    try:
        number = gsm8k_truth(truth)
    except DataError:
        return "has no number behind ####: give the number alone, or a solution that ends in #### and the number"
    if number_of(number) is None:
        return "is no number: give the number alone, such as 72, or use rule: math"
    if not arguments.get("numeric") and not re.fullmatch(r"-?[0-9.]+", number):
        return "is never met, because answers are compared letter for letter: set numeric, or write it like 1072"
    return None


def _gsm8k_flexible(arguments: Mapping[str, Any], truth: Any) -> str | None:
    problem = _gsm8k({"numeric": True}, truth)
    if problem is None and not arguments.get("numeric") and not re.fullmatch(r"-?[0-9.,]+", gsm8k_truth(truth)):
        return "is never met, because answers are compared letter for letter: set numeric, or write it like 1072"
    return problem


def _search(arguments: Mapping[str, Any], truth: Any) -> str | None:
    try:
        targets = search_targets(truth)
    except DataError:
        return "must be {target: text} or {target: [text, …]}"
    if not targets:
        return "has no target: give at least one answer"
    form = careful_form if arguments.get("careful") else answer_form
    blank = next((target for target in targets if not form(target)), None)
    if blank is None:
        return None
    why = "is blank" if not blank.strip() else "is nothing but articles and punctuation, which do not count"
    return f"has the target {blank!r}, which {why}: remove it" + (
        "" if arguments.get("careful") else ", or set careful"
    )


def _code(_: Mapping[str, Any], truth: Any) -> str | None:
    try:
        cases_of(truth)
    except DataError as error:
        return str(error).removeprefix("ground_truth ")
    return None


def _math_verify(arguments: Mapping[str, Any], truth: Any) -> str | None:
    problem = _math(arguments, truth)
    if problem is None and len(truth) > _MOST_CHARACTERS:
        return f"has {len(truth)} characters: {_MATH_REMEDY}"
    return problem


CHECKS: dict[str, Check] = {
    "code": _code,
    "geo3k": _geo3k,
    "gsm8k": _gsm8k,
    "gsm8k_flexible": _gsm8k_flexible,
    "math": _math,
    "math_dapo": _bare_answer("math_dapo", normal_form),
    "math_reward": _bare_answer("math_reward", hendrycks_form),
    "math_verify": _math_verify,
    "prime_math": _bare_answer("prime_math", hendrycks_form),
    "search_r1_like_qa_em": _search,
}
"""What is wrong with a ground truth, by rule; a rule that is not here uses none."""


def ground_truth_problem(rule: str, arguments: Mapping[str, Any], ground_truth: Any) -> str | None:
    """Return a sentence that says why the rule cannot use the ground truth, and the remedy; None: it can.

    ``arguments`` are the rule's, as the job gives them or as the function takes them.
    """
    check = CHECKS.get(rule)
    problem = None if check is None else check(arguments, ground_truth)
    return None if problem is None else f"ground_truth {shown(ground_truth)} {problem}"
