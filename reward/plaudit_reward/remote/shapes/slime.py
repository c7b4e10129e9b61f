"""``slime``: slime's ``remote_rm``. The request has ``prompt``, ``response``, ``label``; the answer is the reward."""

from __future__ import annotations

from typing import Any

from plaudit_reward.remote.shapes.shape import EndpointShape, MalformedAnswerError, others, scored
from plaudit_reward.score import Score
from plaudit_wire.sample import Sample

_NAMES = ("score", "reward")


def _body(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.messages or sample.prompt,
        "response": sample.response,
        "label": sample.ground_truth,
        "metadata": sample.extra_info,
    }


def _score(answer: Any) -> Score:
    """Read a number, or an object with ``score`` or ``reward``."""
    if not isinstance(answer, dict):
        return scored(answer)
    for name in _NAMES:
        if name in answer:
            return scored(answer[name], others(answer, name))
    raise MalformedAnswerError(
        f"the answer is an object without {' or '.join(_NAMES)} (its members: {', '.join(answer) or 'none'}); name the "
        "member in http.jsonPath"[:400]
    )


SLIME = EndpointShape(_body, _score)
