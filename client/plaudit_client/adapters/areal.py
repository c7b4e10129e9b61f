"""Give rewards to AReaL 1.0: a workflow of one turn whose reward comes from a Plaudit service.

::

    trainer.train(workflow="plaudit_client.adapters.areal.AReaLWorkflow", workflow_kwargs={...})  # RLVRWorkflow's

with ``PLAUDIT_URL`` and ``PLAUDIT_TOKEN`` in the environment of the rollout workers. A sample without a score is an
episode that AReaL rejects: the rest of its group is trained. A reward function of AReaL's own would not do: what it
does not answer within 15 s becomes a 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.api import InferenceEngine, ModelResponse
from areal.workflow.rlvr import RLVRWorkflow

from plaudit_client import NoScoreError
from plaudit_client.adapters.service import client, extra_info_of, ground_truth_of, note

_OWN_FIELDS = frozenset({"data_source", "messages", "prompt", "reward_model", "ground_truth", "extra_info"})


class AReaLWorkflow(RLVRWorkflow):  # type: ignore[misc]
    """Generate one response to a row and have the service score it.

    Args:
        settings: those of AReaL's ``RLVRWorkflow`` without ``reward_fn``: ``gconfig``, ``tokenizer``, …
        url: as for ``service.client``, as ``token`` and ``timeout_s``.
    """

    def __init__(self, *settings: Any, url: str = "", token: str = "", timeout_s: float = 0.0, **named: Any) -> None:
        super().__init__(_never_called, *settings, **named)
        self._service = (url, token, timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return a trajectory; None, by which AReaL rejects it, for a sample without a score."""
        try:
            return await super().arun_episode(engine, data)  # type: ignore[no-any-return]
        except NoScoreError:  # ``note`` has warned
            return None

    async def _compute_rewards(self, resp: ModelResponse, prompt_str: str, task_data: Mapping[str, Any]) -> float:
        """Score the response; AReaL calls this.

        The sample's ``data_source`` and ``ground_truth`` (or ``answer``, ``solution``) are columns of the row; other
        columns are ``extra_info``. Raises ``NoScoreError`` for a sample without a score, ``UnavailableError`` without
        a result in time.
        """
        result = await client(*self._service).score(
            {
                "data_source": task_data.get("data_source") or "",
                "prompt": task_data.get("messages") or prompt_str,
                "response": self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True),
                "ground_truth": ground_truth_of(task_data),
                "extra_info": extra_info_of(task_data, _OWN_FIELDS),
                "response_tokens": len(resp.output_tokens),
                "finish_reason": "length" if resp.stop_reason == "length" else "stop",
            }
        )
        return note(result).require_score()


def _never_called(*_: Any, **__: Any) -> float:
    raise NotImplementedError("the workflow asks the service")
