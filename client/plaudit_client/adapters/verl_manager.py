"""Give rewards to verl by its reward manager. Unlike the function, it passes the prompt and the lengths on.

::

    reward.reward_manager.source=importlib reward.reward_manager.name=PlauditRewardManager
    reward.reward_manager.module.path=pkg://plaudit_client.adapters.verl_manager
    +reward.reward_kwargs.url=$PLAUDIT_URL +reward.reward_kwargs.token=$PLAUDIT_TOKEN

Samples without a score are treated as ``verl`` treats them (``+reward.reward_kwargs.on_failure``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from plaudit_client.adapters.service import client, ground_truth_of, plain_messages
from plaudit_client.adapters.verl import columns, plain


class PlauditRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Score each trajectory with a Plaudit service, whose scorers replace ``compute_score``.

    ``reward.reward_kwargs`` of verl's configuration holds ``url``, ``token``, ``timeout_s`` and ``on_failure``.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        settings: Mapping[str, Any] = config.reward.get("reward_kwargs") or {}
        self._client = client(settings.get("url", ""), settings.get("token", ""), settings.get("timeout_s", 0.0))
        self._on_failure = settings.get("on_failure", "raise")

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the last sequence of a trajectory; raise as ``verl.compute_score``."""
        item = data[-1:][0]
        row = item.non_tensor_batch
        responses = item.batch["responses"]
        num_tokens = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        response = await asyncio.to_thread(self.tokenizer.decode, responses[:num_tokens], skip_special_tokens=True)
        result = await self._client.score(
            {
                "data_source": row["data_source"],
                "prompt": plain_messages(row["raw_prompt"]) if row.get("raw_prompt") is not None else "",
                "response": response,
                "response_tokens": num_tokens,
                "max_tokens": int(responses.shape[-1]),
                "ground_truth": ground_truth_of(row),
                "extra_info": _extra_info(row),
            }
        )
        extra = columns(result, self._on_failure)
        return {"reward_score": extra["score"], "reward_extra_info": extra}


def _extra_info(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's ``extra_info`` and what the agent loop adds to it, as verl's own managers pass them."""
    return plain(
        {
            **(row.get("extra_info") or {}),
            **(row.get("tool_extra_fields") or {}),
            "num_turns": row.get("__num_turns__"),
            "rollout_reward_scores": row.get("reward_scores"),
        }
    )
