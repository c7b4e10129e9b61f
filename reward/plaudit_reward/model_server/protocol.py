"""The request and the response of vLLM's ``/classify``, field by field (vLLM 0.32).

Written by ``plaudit_reward.model_client`` among others, read by ``api``. Fields that vLLM takes and that would change
the result (``truncate_prompt_tokens``, ``chat_template``, …) are not known here, and unknown fields are refused:
leaving one out silently would be another result.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One request: ``input`` or ``messages``."""

    input: str | list[str | int | list[int]] | None = None
    """A text or the token ids of one; a list of texts, or of lists of token ids. One kind only."""
    messages: list[dict[str, Any]] | None = None
    """One chat, rendered by the model's chat template."""
    use_activation: bool | None = None
    """False: the logits. Default: their activation, as in vLLM."""
    add_special_tokens: bool | None = None
    """Default: true for texts, false for chats, whose template writes them."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    model: str | None = None
    user: str | None = None
    request_id: str | None = None


class Classification(msgspec.Struct):
    """One sequence's result."""

    index: int
    label: str | None
    """Of the largest value."""
    probs: list[float]
    """Logits or, with activation, probabilities; one a label."""
    num_classes: int


class Usage(msgspec.Struct):
    """Tokens of a request, special ones included."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyResponse(msgspec.Struct):
    """The answer: one ``Classification`` a sequence, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class ErrorInfo(msgspec.Struct):
    """Why a request got no result."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not 200."""

    error: ErrorInfo
