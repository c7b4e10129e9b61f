"""``sandbox-fusion``: ``POST /submit`` of a Sandbox Fusion server, which finds the program in a response and tests it.

The row names the problem: its ``ground_truth`` is ``config.provided_data`` where it is an object, ``extra_info.id`` the
problem's id. ``accepted`` is 1 or 0. Rule ``code`` runs test cases of the row through ``/run_code`` instead.
"""

from __future__ import annotations

from typing import Any

from plaudit_reward.remote.shapes.shape import EndpointShape, MalformedAnswerError, member, scored
from plaudit_reward.score import Score
from plaudit_wire.sample import Sample


def _body(sample: Sample) -> dict[str, Any]:
    config = {"provided_data": sample.ground_truth} if isinstance(sample.ground_truth, dict) else {}
    identity = sample.extra_info.get("id", f"{sample.group}/{sample.index}")
    return {"dataset": sample.data_source, "id": identity, "completion": sample.response, "config": config}


def _score(answer: Any) -> Score:
    accepted = member(answer, "accepted")
    if not isinstance(accepted, bool):
        raise MalformedAnswerError(f"'accepted' is {str(accepted)[:100]!r}, not true or false")
    return scored(float(accepted))


SANDBOX_FUSION = EndpointShape(_body, _score)
