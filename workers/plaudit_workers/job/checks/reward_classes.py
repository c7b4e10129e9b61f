"""Check the class of a reward model: vLLM serves some as embedders, which give no score."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rewards.scorers import RewardModelSpec

_REWARD_CLASS = re.compile(r"(ForRewardModeling|(For(Process)?)?RewardModel)$")


def writes_no_text(architecture: str) -> bool:
    """Return True for the class of a classifier or a reward model."""
    return architecture.endswith("ForSequenceClassification") or _REWARD_CLASS.search(architecture) is not None


def architecture_of(config: dict[str, Any]) -> str:
    """Return the class that a model's configuration names; empty for none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, Sequence) and names else ""


def class_problem(field: str, model: RewardModelSpec, architecture: str) -> Problem | None:
    """Return the problem of a model that vLLM would take for an embedder; None if there is none.

    vLLM goes by the end of the class's name. ``…RewardModel`` and ``…ForRewardModeling`` become embedders: loading
    fails at the head's weights, and ``--convert classify`` is refused.
    """
    base = _REWARD_CLASS.sub("", architecture)
    if model.engine != "vllm" or base == architecture or "hf_overrides" in model.arguments:
        return None
    if architecture.endswith("ProcessRewardModel"):
        return Problem(
            f"{field}.source",
            f"{model.source} has class {architecture}, which scores the steps of a response, not the response",
            "Name a classifier with one output, or ask it in a function (kind: python)",
        )
    return Problem(
        f"{field}.source",
        f"{model.source} has class {architecture}, which vLLM takes for an embedder",
        "If its head is one linear layer 'score', add arguments: {hf_overrides: {architectures: "
        f"[{base}ForSequenceClassification]}}}}; else set engine to plaudit",
    )
