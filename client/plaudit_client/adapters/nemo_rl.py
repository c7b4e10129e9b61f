"""Give rewards to NeMo-RL: an environment of one turn whose reward comes from a Plaudit service.

::

    from plaudit_client.adapters.nemo_rl import register

    register()          # before setup_response_data; then data.default.env_name: plaudit, and a section env.plaudit

NeMo-RL accepts numbers only: a sample without a score raises, unless ``env.plaudit.on_failure`` names a number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env

from plaudit_client.adapters.service import client, extra_info_of, ground_truth_of, number, text_of

NAME = "plaudit"
_OWN_FIELDS = frozenset({"data_source", "prompt", "reward_spec", "reward_model", "ground_truth", "extra_info"})


def register(name: str = NAME) -> None:
    """Register the environment with NeMo-RL under a name, in the process that sets up the data.

    The actor runs in the Python environment of that process, which has ``plaudit-client``.
    """
    actor = f"{__name__}.PlauditEnvironment"
    ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
    register_env(name, actor)


@ray.remote
class PlauditEnvironment(EnvironmentInterface):  # type: ignore[misc]
    """Score the last reply of each conversation and end it. Calls overlap: the actor is asynchronous.

    ``config`` is the section ``env.<name>``: ``url``, ``token``, ``timeout_s``, ``on_failure``, ``data_source`` (of
    rows without one); each may be missing.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        settings = config or {}
        self._service = settings.get("url", ""), settings.get("token", ""), settings.get("timeout_s", 0.0)
        self._on_failure = settings.get("on_failure", "raise")
        self._data_source = settings.get("data_source", "")
        client(*self._service)  # a missing address ends the start, not the first step

    async def step(
        self,
        message_log_batch: Sequence[Sequence[Mapping[str, Any]]],
        metadata: Sequence[Mapping[str, Any] | None],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn:
        """Score a batch: of each conversation the last message of the assistant, by its row (``extra_env_info``).

        Raises ``NoScoreError`` for one without a score if ``on_failure`` is ``raise``, and ``UnavailableError``.
        """
        service = client(*self._service)
        samples = [self._sample(log, row or {}) for log, row in zip(message_log_batch, metadata, strict=True)]
        results = await asyncio.gather(*(service.score(sample) for sample in samples))
        return EnvironmentReturn(
            # some of its rollouts cannot tokenise an empty observation
            observations=[{"role": "environment", "content": f"Environment: {r.outcome}"} for r in results],
            metadata=list(metadata),
            next_stop_strings=[None] * len(results),
            rewards=torch.tensor([number(r, self._on_failure) for r in results], dtype=torch.float32),
            terminateds=torch.ones(len(results), dtype=torch.bool),
            answers=[None] * len(results),
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch as it is, and no figures: those of the scores are in the service."""
        return batch, {}

    def _sample(self, log: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
        last = max((i for i, message in enumerate(log) if message.get("role") == "assistant"), default=len(log))
        return {
            "data_source": row.get("data_source") or self._data_source,
            "prompt": row.get("prompt") or _prompt(log[:last]),
            "response": text_of(log[last].get("content")) if last < len(log) else "",
            "ground_truth": ground_truth_of(row),
            "extra_info": extra_info_of(row, _OWN_FIELDS),
        }


def _prompt(messages: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the prompt; a single message is text: NeMo-RL's processors render the whole prompt into it."""
    if len(messages) == 1:
        return text_of(messages[0].get("content"))
    return [{"role": message["role"], "content": text_of(message.get("content"))} for message in messages]
