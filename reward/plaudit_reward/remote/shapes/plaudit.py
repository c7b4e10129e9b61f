"""``plaudit``: the gateway of a reward service, ``POST /v1/score``."""

from __future__ import annotations

import hashlib
from typing import Any, get_args

from plaudit_reward.remote.shapes.shape import EndpointShape, MalformedAnswerError, member, scored
from plaudit_reward.score import Score
from plaudit_wire.records import Outcome
from plaudit_wire.sample import Sample

CALLER_HEADER = "plaudit-caller"
"""Header with the name of a run among those that share a token."""
_ENDED_ELSEWHERE = {"poison": "infra_error", "given_up": "infra_error"}
"""Outcomes that describe the other service's own processing."""


def _body(sample: Sample) -> dict[str, Any]:
    return {
        "id": _id(sample),
        "response": sample.response,
        "prompt": sample.messages or sample.prompt,
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def _id(sample: Sample) -> str:
    """Return the same id for a sample in every attempt, so that the service scores it once.

    A sample that was generated again after its rollout died has another response, and must not meet the earlier id.
    """
    content = hashlib.sha256(f"{sample.prompt}\0{sample.response}".encode(errors="surrogatepass")).hexdigest()
    return f"{sample.group}/{sample.index}/{content[:12]}"


def _score(answer: Any) -> Score:
    """Read a typed result. The service has already retried: its failures are final here."""
    outcome = member(answer, "outcome")
    if outcome not in get_args(Outcome):
        raise MalformedAnswerError(f"the answer's outcome is {str(outcome)[:100]!r}")
    if outcome == "scored":
        return scored(member(answer, "score"), _values(answer.get("scorers")))
    return Score.failed(_ENDED_ELSEWHERE.get(outcome, outcome), str(answer.get("reason") or outcome)[:500])


def _values(scorers: Any) -> dict[str, Any]:
    """Return the values of the service's own scorers, by name."""
    if not isinstance(scorers, dict):
        return {}
    return {name: result.get("value") for name, result in scorers.items() if isinstance(result, dict)}


PLAUDIT = EndpointShape(_body, _score)
