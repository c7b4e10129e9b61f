"""``openrlhf``: OpenRLHF's ``--reward.remote_url``. Lists with one item: ``query``, ``prompts``, ``labels``."""

from __future__ import annotations

from typing import Any

from plaudit_reward.remote.shapes.shape import EndpointShape, MalformedAnswerError, member, scored
from plaudit_reward.score import Score
from plaudit_wire.sample import Sample


def _body(sample: Sample) -> dict[str, Any]:
    return {
        "query": [sample.prompt + sample.response],
        "prompts": [sample.prompt],
        "labels": [sample.ground_truth],
    }


def _score(answer: Any) -> Score:
    logs = answer.get("extra_logs") if isinstance(answer, dict) else None
    extra = {name: _only(item, name) for name, item in logs.items()} if isinstance(logs, dict) else {}
    return scored(_only(member(answer, "rewards"), "rewards"), extra)


def _only(value: Any, name: str) -> Any:
    """Return the item of a list of one. Some servers answer a bare value."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise MalformedAnswerError(f"{name!r} has {len(value)} items for one sample")
    return value[0]


OPENRLHF = EndpointShape(_body, _score)
