"""What a scorer sees: one finished sample. Written by rollouts into the ``samples`` stream, read by reward workers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished response with everything that a scorer may want to know of it."""

    group: str
    """Id of the group (the prompt's n samples)."""
    index: int
    """Which of the group's n samples, from 0."""
    data_source: str
    prompt: str
    """The prompt as the model saw it (chat template applied)."""
    response: str
    """The generated text, special tokens left out."""
    ground_truth: Any = None
    """``reward_model.ground_truth`` of the data row."""
    extra_info: dict[str, Any] = {}
    """``extra_info`` of the data row."""
    messages: list[dict[str, Any]] = []
    """The prompt's chat messages, where the data holds messages."""
    response_tokens: int = 0
    max_tokens: int = 0
    """The most tokens the response could have had (``sampling.maxTokens``); for length penalties."""
    finish_reason: str = "stop"
    """``stop`` or ``length``."""
    split: Literal["train", "validation"] = "train"
