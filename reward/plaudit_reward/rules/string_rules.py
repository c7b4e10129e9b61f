"""Score by rules that only process strings. The results are those of verl's rules of the same names."""

from __future__ import annotations

import re
import string
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

from msgspec import Meta

from plaudit_reward.rules.final_answer import last_box, last_braced, text_truth, with_opened_thought
from plaudit_reward.rules.prm800k import MalformedError, hendrycks_form
from plaudit_reward.scorer import Score
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample


def matches_format(sample: Sample, *, pattern: str, match: Literal["full", "start", "anywhere"] = "full") -> float:
    """Return 1.0 if the response matches a regular expression of the job, such as ``<think>.*</think>.*``, else 0.0.

    Args:
        pattern: in Python's syntax; ``.`` matches line ends too.
        match: the part of the response that must match: all, the start, or any part.
    """
    expression = re.compile(pattern, re.DOTALL)
    methods = {"full": expression.fullmatch, "start": expression.match, "anywhere": expression.search}
    return 1.0 if methods[match](with_opened_thought(sample)) else 0.0


def overlong(
    sample: Sample,
    *,
    buffer_tokens: Annotated[int, Meta(ge=1)],
    max_tokens: Annotated[int, Meta(ge=1)] | None = None,
    penalty_factor: Annotated[float, Meta(ge=0)] = 1.0,
) -> Score:
    """Punish a response that runs into the last ``buffer_tokens``: the extra ``overlong`` is then 1, else 0.

    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", equation 13::

        value = min(0, -(response_tokens - (max_tokens - buffer_tokens)) / buffer_tokens * penalty_factor)

    It is 0 up to ``max_tokens - buffer_tokens`` and ``-penalty_factor`` at ``max_tokens``. Make it a separate scorer:
    the weighted sum adds it to the others' values.

    Args:
        max_tokens: length of the longest response; None: the sample's ``max_tokens`` (``rollout.sampling.maxTokens``).

    Raises:
        DataError: the longest response is unknown, or shorter than the buffer.
    """
    longest = sample.max_tokens if max_tokens is None else max_tokens
    if longest < buffer_tokens:
        raise DataError(
            f"the longest response has {longest} tokens, the buffer {buffer_tokens}: set overlong's maxTokens to the "
            "longest response, or its bufferTokens to less"
        )
    exceeding = sample.response_tokens - (longest - buffer_tokens)
    value = min(0.0, -exceeding / buffer_tokens * penalty_factor)
    return Score.scored(value, overlong=float(value < 0))


_OPENING, _CLOSING = "<answer>", "</answer>"
_MAX_TAGS = 10
_MANY_TAGS_FACTOR = 0.25
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def search_r1_like_qa_em(sample: Sample, *, substring: bool = False, careful: bool = False) -> float:
    """Return 1.0 when the text between the last ``<answer>`` tags is a golden answer: Search-R1's exact match.

    Jin et al. 2025, "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning". Case,
    punctuation (ASCII), articles and blanks do not count. A right answer in a response that holds more than 10 opening
    or closing tags is worth a quarter.

    Args:
        sample: its ground truth is ``{target: text}`` or ``{target: [text, …]}``.
        substring: an answer that contains a golden one is also right, and tags are not counted (verl's
            ``compute_score_subem``).
        careful: ``C#`` is not ``C``, ``1.5`` is not ``15``, ``A`` is not ``the``, and an accent counts in each of its
            encodings alike.
    """
    form = careful_form if careful else answer_form
    golden = [form(target) for target in search_targets(sample.ground_truth)]
    answer = last_answer(sample.response)
    if answer is None:
        return 0.0
    given = form(answer)
    if substring:
        return 1.0 if any(target in given for target in golden) else 0.0
    if given not in golden:
        return 0.0
    num_tags = max(sample.response.count(_OPENING), sample.response.count(_CLOSING))
    return _MANY_TAGS_FACTOR if num_tags > _MAX_TAGS else 1.0


def last_answer(response: str) -> str | None:
    """Return the text of the last complete pair of tags, stripped; pairs are matched from the left."""
    answer, start = None, response.find(_OPENING)
    while start >= 0:
        end = response.find(_CLOSING, start)
        if end < 0:
            break
        answer = response[start + len(_OPENING) : end].strip()
        start = response.find(_OPENING, end)
    return answer


def answer_form(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


_EDGES = "\"'`.,;:!?()[]{}*_"
_INITIALS = re.compile(r"\b([^\W\d_])\.(?=[^\W\d_]\b)")


def careful_form(text: str) -> str:
    """Return the text in small letters, without articles and the signs around words; what is inside a word stays."""
    text = unicodedata.normalize("NFC", text).replace("’", "'").lower()
    text = re.sub(r"(?<=[^\W\d_])[-–—/](?=[^\W\d_])", " ", _INITIALS.sub(r"\1", text))
    words = [word.strip(_EDGES) for word in text.split()]
    words = [word for word in words if word]
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def search_targets(ground_truth: Any) -> list[str]:
    """Return the golden answers of a row; raise ``DataError`` if it has none in that form."""
    targets = ground_truth.get("target") if isinstance(ground_truth, dict) else None
    targets = [targets] if isinstance(targets, str) else targets
    if isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets):
        return list(targets)
    raise DataError(
        f"ground_truth is {ground_truth!r}; search_r1_like_qa_em needs {{target: text}} or {{target: [text, …]}}"
    )


NUM_TAIL_CHARACTERS = 300
"""Characters at the end of the response that are read."""
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_SOLUTION_NUMBER = re.compile(r"####\s*\$?(-?[0-9.,]*[0-9])")


def strict_answer(response: str) -> str | None:
    """Return the number after the last ``#### ``, as GSM8K's own answers have it, without commas; None without it."""
    marked = _MARKED.findall(response[-NUM_TAIL_CHARACTERS:])
    return str(marked[-1]).replace(",", "") if marked else None


def flexible_answer(response: str) -> str | None:
    """Return the last thing that looks like a number, as it stands, skipping lone full stops; None if nothing does.

    When there are only full stops, the first of them is the answer (verl's result, which equals no ground truth).
    """
    candidates = _NUMBER.findall(response[-NUM_TAIL_CHARACTERS:])
    if not candidates:
        return None
    return next((str(c) for c in reversed(candidates) if c != "."), str(candidates[0]))


def gsm8k(sample: Sample, *, numeric: bool = False) -> float:
    """Return 1.0 when the strict answer equals the ground truth, character by character, else 0.0.

    Args:
        sample: its ground truth is the number, as text, or GSM8K's own ``answer`` column, a whole solution: the number
            behind the last ``####`` counts, without its thousands separators, as verl's preparation of the data reads.
        numeric: compare them as numbers, without thousands separators, dollars and a full stop at the end.

    Raises:
        DataError: the ground truth is not text, or there is no number behind its ``####``.
    """
    return _compare(strict_answer(sample.response), sample.ground_truth, numeric)


def gsm8k_flexible(sample: Sample, *, numeric: bool = False) -> float:
    """Return 1.0 when the flexible answer equals the ground truth, else 0.0; arguments as ``gsm8k``."""
    return _compare(flexible_answer(sample.response), sample.ground_truth, numeric)


def _compare(answer: str | None, ground_truth: object, numeric: bool) -> float:
    truth = gsm8k_truth(text_truth(ground_truth, "gsm8k"))
    if numeric and answer is not None:
        return 1.0 if number_of(answer) == number_of(truth) is not None else 0.0
    return 1.0 if answer == truth else 0.0


def gsm8k_truth(truth: str) -> str:
    """Return the number of a ground truth that is the number alone, or a solution that ends in ``####`` and it."""
    if "####" not in truth:
        return truth
    numbers = _SOLUTION_NUMBER.findall(truth)
    if not numbers:
        raise DataError(f"ground_truth {truth[-80:]!r} has no number behind ####; gsm8k needs it, or the number alone")
    return str(numbers[-1]).replace(",", "")


def number_of(text: str) -> Decimal | None:
    """Return the number that the text is, without thousands separators, dollars and a full stop at the end."""
    try:
        return Decimal(text.replace(",", "").replace("$", "").strip().removesuffix("."))
    except InvalidOperation:
        return None


_SPACED = "\\boxed "
_BRACED = "\\boxed{"


def math_reward(sample: Sample, *, last_box_wins: bool = False) -> float:
    r"""Return 1.0 when the boxed answer equals the ground truth in the normal form of the MATH benchmark, else 0.0.

    verl's search for the box has flaws that ``last_box_wins`` corrects: a ``\boxed `` with a blank anywhere in the
    response wins over every later ``\boxed{…}`` and takes all that follows up to the next ``$``; ``\fbox{5}`` and
    ``\boxed`` with braces on the next line count as no answer.

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
        return hendrycks_form(answer) == hendrycks_form(truth)
    except MalformedError:
        return answer == truth


def _verls_box(response: str) -> str | None:
    if _SPACED in response:
        return response.rsplit(_SPACED, 1)[1].split("$", 1)[0]
    return last_braced(response) if response.startswith(_BRACED, response.rfind("\\boxed")) else None


NUM_BOX_CHARACTERS = 100
"""Characters at the end of the response that must contain the box."""
INVALID = "[INVALID]"
"""The value of ``pred`` for a response without an answer."""
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_LEFT_OUT = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
        (r"(\\text\{)(.*?)(\})", r"\2"),
        (r"(\\textbf\{)(.*?)(\})", r"\2"),
        (r"(\\overline\{)(.*?)(\})", r"\2"),
        (r"(\\boxed\{)(.*)(\})", r"\2"),
        (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
        (r"(sqrt)([^{])", r"sqrt{\2}"),
    )
)


def math_dapo(sample: Sample, *, strict_boxed: bool = False, normalize_boxed: bool = False) -> Score:
    r"""Score DAPO's mathematics: 1.0 when the answer equals the ground truth, else -1.0.

    Of the last 300 characters the line after the last ``Answer:`` counts, normalised as Minerva's answers are
    (Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language Models", appendix D.1); without one,
    the last ``\boxed{…}`` of the last 100 characters, letter for letter. The results are those of verl's ``math_dapo``,
    with its ``acc`` (1 or 0) and ``pred`` as extras. That a box is compared letter for letter, and is not seen when it
    is longer than 100 characters, is a flaw that ``normalize_boxed`` corrects.

    Args:
        strict_boxed: only a box counts (verl's ``strict_box_verify``).
        normalize_boxed: a boxed answer is searched for in all 300 characters and compared in normal form.
    """
    truth = text_truth(sample.ground_truth, "math_dapo")
    tail = sample.response[-NUM_TAIL_CHARACTERS:]
    answers = [] if strict_boxed else _ANSWER.findall(tail)
    marked = normal_form(answers[-1]) if answers else INVALID
    if marked != INVALID:
        return _score(marked == normal_form(truth), marked)
    if normalize_boxed:
        boxed = last_braced(tail)
        boxed, truth = (None if boxed is None else normal_form(boxed)), normal_form(truth)
    else:
        boxed = last_braced(tail[-NUM_BOX_CHARACTERS:])
    if boxed is not None or strict_boxed:
        return _score(boxed == truth, boxed)
    return _score(normal_form(truth) == INVALID, INVALID)


def _score(correct: bool, answer: str | None) -> Score:
    pred = {} if answer is None else {"pred": answer}
    return Score.scored(1.0 if correct else -1.0, acc=float(correct), **pred)


def normal_form(answer: str) -> str:
    """Return the normal form of an answer: its right side, without units, articles, text commands and blanks."""
    answer = answer.rsplit("=", 1)[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for part in _LEFT_OUT:
        answer = answer.replace(part, "")
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
