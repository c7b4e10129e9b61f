"""``nemo-gym``: ``POST /verify`` of a NeMo Gym resources server: the row's members and an OpenAI ``response``.

The row opens a session first (``/seed_session``): some servers verify by what they keep in it.
"""

from __future__ import annotations

import time
from typing import Any

from plaudit_reward.remote.session import seed_url
from plaudit_reward.remote.shapes.shape import EndpointShape, member, others, scored
from plaudit_reward.score import Score
from plaudit_wire.sample import Sample


def _body(sample: Sample) -> dict[str, Any]:
    """Return the row (``extra_info``), the request that the model answered, and its answer as a Responses object."""
    identity = f"{sample.group}-{sample.index}"
    text = {"type": "output_text", "text": sample.response, "annotations": []}
    message = {
        "id": f"msg_{identity}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        **sample.extra_info,
        "responses_create_params": {
            "input": sample.messages or [{"role": "user", "content": sample.prompt}],
        },
        "response": {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        },
    }


def _score(answer: Any) -> Score:
    reward = member(answer, "reward")
    components = answer.get("reward_components")
    return scored(reward, components if isinstance(components, dict) else others(answer, "reward"))


NEMO_GYM = EndpointShape(_body, _score, seed_url, unseeded=frozenset({"response"}))
