"""Give rewards to TRL (``GRPOTrainer``, ``RLOOTrainer`` and others with ``reward_funcs``).

::

    from plaudit_client.adapters.trl import reward

    trainer = GRPOTrainer(reward_funcs=reward(), …)  # PLAUDIT_URL and PLAUDIT_TOKEN say where the service is

A sample without a score is None: TRL leaves it out of its group's mean and trains nothing on it. A service that cannot
be reached within the client's time raises, and ends the training.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from plaudit_client.adapters.service import client, extra_info_of, ground_truth_of, note, text_of
from plaudit_client.client import RewardClient
from plaudit_client.result import Result

_OF_THE_TRAINER = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
_OWN_COLUMNS = frozenset({"data_source", "extra_info", "ground_truth", "reward_model"})
RewardFunction = Callable[..., Coroutine[Any, Any, list[float | None]]]


def reward(
    url: str = "", token: str = "", *, data_source: str = "", group_size: int = 1, timeout_s: float = 0.0
) -> RewardFunction:
    """Return a reward function for TRL: async, named ``plaudit``, and picklable.

    Args:
        url: as for ``service.client``, as ``token`` and ``timeout_s``.
        data_source: of rows without such a column.
        group_size: the trainer's ``num_generations``, if the service has scorers with ``scope: group``; 1: no groups.
    """
    function = functools.partial(
        plaudit, service=client(url, token, timeout_s), default_source=data_source, group_size=group_size
    )
    function.__name__ = "plaudit"  # type: ignore[attr-defined]  # older TRL reads it from the partial
    return function


async def plaudit(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    service: RewardClient,
    default_source: str = "",
    group_size: int = 1,
    **columns: Any,
) -> list[float | None]:
    """Score a batch as TRL passes it; see ``reward``."""
    rows = _rows(columns, len(prompts))
    samples = [_sample(*each, default_source) for each in zip(rows, prompts, completions, strict=True)]
    for sample, ids in zip(samples, completion_ids or (), strict=False):
        sample["response_tokens"] = len(ids)
    results = await _score(service, samples, group_size)
    _log(columns, results)
    return [note(result).score for result in results]


async def _score(service: RewardClient, samples: list[dict[str, Any]], group_size: int) -> list[Result]:
    if group_size == 1:
        return list(await asyncio.gather(*(service.score(sample) for sample in samples)))
    if len(samples) % group_size:
        raise ValueError(f"group_size {group_size} does not divide a batch of {len(samples)}: give num_generations")
    starts = range(0, len(samples), group_size)
    groups = await asyncio.gather(*(service.score_group(samples[start : start + group_size]) for start in starts))
    return [result for group in groups for result in group]


def _rows(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the data's columns row by row."""
    lists = {name: values for name, values in columns.items() if name not in _OF_THE_TRAINER}
    return [{name: values[i] for name, values in lists.items()} for i in range(count)]


def _sample(row: dict[str, Any], prompt: Any, completion: Any, default_source: str) -> dict[str, Any]:
    return {
        "data_source": row.get("data_source") or default_source,
        "prompt": prompt,
        "response": completion if isinstance(completion, str) else _last_reply(completion),
        "ground_truth": ground_truth_of(row),
        "extra_info": extra_info_of(row, _OWN_COLUMNS),
    }


def _last_reply(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of the assistant."""
    replies = (text_of(message.get("content")) for message in reversed(messages) if message["role"] == "assistant")
    return next(replies, "")


def _log(columns: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Show outcomes in TRL's table of completions, and the share without a score among its metrics."""
    if log_extra := columns.get("log_extra"):
        log_extra("plaudit_outcome", [result.outcome for result in results])
    if (log_metric := columns.get("log_metric")) and results:
        log_metric("plaudit/no_score", sum(result.score is None for result in results) / len(results))
