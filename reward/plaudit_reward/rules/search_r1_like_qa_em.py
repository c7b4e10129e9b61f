"""Search-R1's exact match: the text between the last ``<answer>`` tags is one of the golden answers.

Jin et al. 2025, "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning". Case,
punctuation (ASCII), articles and blanks do not count. The results are those of verl's ``search_r1_like_qa_em``: a right
answer in a response that holds more than 10 opening or closing tags is worth a quarter.
"""

from __future__ import annotations

import re
import string
from typing import Any

from plaudit_wire.errors import DataError
from plaudit_wire.sample import Sample

_OPENING, _CLOSING = "<answer>", "</answer>"
_MAX_TAGS = 10
_MANY_TAGS_FACTOR = 0.25
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def search_r1_like_qa_em(sample: Sample, *, substring: bool = False) -> float:
    """Return 1.0 when the answer is a golden one (0.25 with too many tags), else 0.0.

    Args:
        sample: its ground truth is ``{target: text}`` or ``{target: [text, …]}``.
        substring: an answer that contains a golden one is also right, and tags are not counted (verl's
            ``compute_score_subem``).
    """
    golden = [normal_form(target) for target in _targets(sample.ground_truth)]
    answer = last_answer(sample.response)
    if answer is None:
        return 0.0
    given = normal_form(answer)
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


def normal_form(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _targets(ground_truth: Any) -> list[str]:
    targets = ground_truth.get("target") if isinstance(ground_truth, dict) else None
    targets = [targets] if isinstance(targets, str) else targets
    if isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets):
        return list(targets)
    raise DataError(
        f"ground_truth is {ground_truth!r}; search_r1_like_qa_em needs {{target: text}} or {{target: [text, …]}}"
    )
