"""OpenRLHF's ``--reward.remote_url``: ``{query, prompts, labels}`` to ``{rewards, scores, extra_logs}``, all lists.

A query is the prompt followed by the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plaudit_workers.gateway.callers.results import SampleAnswer
from plaudit_workers.scoring.offline.lines import SampleInput, sample_input


def samples(body: Mapping[str, Any]) -> list[SampleInput]:
    """Return the samples of a request. Raise ``ValueError``."""
    queries = body.get("query")
    if not isinstance(queries, list):
        raise ValueError(f"query: give a list of texts, not {type(queries).__name__}")
    prompts = body.get("prompts") or [""] * len(queries)
    labels = body.get("labels") or [None] * len(queries)
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(f"query, prompts, labels: {len(queries)}, {len(prompts)}, {len(labels)} of each; give as many")
    return [_sample(query, prompt, label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]


def _sample(query: Any, prompt: Any, label: Any) -> SampleInput:
    response = query.removeprefix(prompt) if isinstance(query, str) and isinstance(prompt, str) else query
    return sample_input({"prompt": prompt, "response": response, "ground_truth": label}, SampleInput)


def answer(body: Mapping[str, Any], results: Sequence[SampleAnswer]) -> dict[str, Any]:
    """Return the lists; a sample without a score has null in both."""
    scores = [result.score for result in results]
    names = {name for result in results for name in result.scorers}
    logs = {
        name: [result.scorers[name].value if name in result.scorers else None for result in results] for name in names
    }
    return {"rewards": scores, "scores": scores, "extra_logs": logs}
