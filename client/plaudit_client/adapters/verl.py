"""Give rewards to verl by its custom reward function.

::

    reward.custom_reward_function.path=pkg://plaudit_client.adapters.verl
    +reward.custom_reward_function.reward_kwargs.url=$PLAUDIT_URL
    +reward.custom_reward_function.reward_kwargs.token=$PLAUDIT_TOKEN

verl accepts numbers only. A sample without a score raises, and ends the step, unless ``reward_kwargs.on_failure`` names
a number; ``scored`` (1 or 0) and ``outcome`` among the extra columns then say which samples those are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_client.adapters.service import client, number
from plaudit_client.result import Result


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str = "",
    token: str = "",
    timeout_s: float = 0.0,
    on_failure: float | str = "raise",
    **_of_the_reward_model: Any,
) -> dict[str, float | str]:
    """Score one sample as verl passes it.

    Args:
        url: as for ``service.client``, as ``token`` and ``timeout_s``.
        on_failure: ``raise`` (``NoScoreError``), or the number for a sample without a score. ``UnavailableError`` is
            raised in any case.
    """
    result = await client(url, token, timeout_s).score(
        {
            "data_source": data_source,
            "response": solution_str,
            "ground_truth": ground_truth,
            "extra_info": plain(extra_info or {}),
        }
    )
    return columns(result, on_failure)


def columns(result: Result, on_failure: float | str) -> dict[str, float | str]:
    """Return the score and the extra columns. verl requires the same columns of every sample."""
    score = number(result, on_failure)
    return {
        "score": score,
        "acc": score,
        "scored": float(result.score is not None),
        "outcome": result.outcome,
        "reward_seconds": result.seconds,
    }


def plain(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that have a value: verl fills a row's missing items with None."""
    return {name: value for name, value in extra_info.items() if value is not None}
