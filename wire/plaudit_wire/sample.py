"""The input of a scorer: one finished sample. Rollouts write it to the stream ``samples``, reward workers read it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished response with everything that a scorer may need."""

    group: str
    """Id of the group (the prompt's n samples)."""
    index: int
    """Index among the group's n samples, from 0."""
    data_source: str
    prompt: str
    """The prompt as the model saw it (chat template applied)."""
    response: str
    """The generated text, without special tokens."""
    ground_truth: Any = None
    """``reward_model.ground_truth`` of the data row."""
    extra_info: dict[str, Any] = {}
    """``extra_info`` of the data row."""
    messages: list[dict[str, Any]] = []
    """The prompt's chat messages, where the data holds messages."""
    response_tokens: int = 0
    max_tokens: int = 0
    """The limit on the response's tokens (``sampling.maxTokens``), for length penalties."""
    finish_reason: str = "stop"
    """``stop`` or ``length``."""
    split: Literal["train", "validation"] = "train"
