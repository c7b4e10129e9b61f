"""Give rewards to agent-lightning 1.0: a hook that scores each rollout that succeeded.

A file for ``agentlightning.hooks``, of one line::

    from plaudit_client.adapters.agentlightning import RewardHooks

with ``PLAUDIT_URL`` and ``PLAUDIT_TOKEN`` in the environment of the trainer, and perhaps ``PLAUDIT_ON_FAILURE``: a
number for samples without a score. agent-lightning trains a rollout without a reward with ``reward_fillna_value``, and
survives every exception of a hook, so that a sample without a score ends the training by ``SystemExit`` otherwise.
"""

from __future__ import annotations

import os
from typing import Any

from agentlightning.hooks import RolloutHooks, TraceWriter
from agentlightning.schemas import Rollout

from plaudit_client import NoScoreError
from plaudit_client.adapters.service import blocking_client, extra_info_of, ground_truth_of, number, text_of

_OWN_FIELDS = frozenset({"data_source", "prompt", "reward_model", "ground_truth", "extra_info"})


class RewardHooks(RolloutHooks):  # type: ignore[misc]
    """Score the last answer of the policy, and add the score as the rollout's reward."""

    def on_succeeded(self, rollout: Rollout, events: dict[str, list[Any]], store: TraceWriter) -> None:
        """Score a rollout; its row is the rollout's input. One without an answer, or with a reward, is left alone."""
        attempt = rollout.status.last_attempt_id or next(iter(events), "")
        of_attempt = events.get(attempt, [])
        asked = [event.data for event in of_attempt if event.event_type == "model_request" and _answer(event.data)]
        if not asked or any(event.event_type == "reward" for event in of_attempt):
            return
        row, last = rollout.input if isinstance(rollout.input, dict) else {}, asked[-1]
        choice = last["response"]["choices"][0]
        result = blocking_client().score(
            {
                "id": rollout.rollout_id,
                "data_source": row.get("data_source") or "",
                "prompt": last["request"].get("messages") or "",
                "response": _answer(last),
                "ground_truth": ground_truth_of(row),
                "extra_info": {**extra_info_of(row, _OWN_FIELDS), "num_turns": len(asked)},
                "finish_reason": choice.get("finish_reason") or "stop",
            }
        )
        try:
            value = number(result, os.environ.get("PLAUDIT_ON_FAILURE", "raise"))
        except NoScoreError as error:
            raise SystemExit(
                f"rollout {rollout.rollout_id} has no score ({error}), and a 0 would teach the model "
                "that its answer was wrong. Set PLAUDIT_ON_FAILURE to a number to go on"
            ) from error
        store.add_event(rollout.rollout_id, attempt, "reward", {"value": value, "source": "plaudit"})


def _answer(data: dict[str, Any]) -> str:
    """Return what the policy answered to a request; empty where it answered with calls alone, or not at all."""
    response = data.get("response")
    choices = (response.get("choices") if isinstance(response, dict) else None) or [{}]
    return text_of((choices[0].get("message") or {}).get("content")) or str(choices[0].get("text") or "")
