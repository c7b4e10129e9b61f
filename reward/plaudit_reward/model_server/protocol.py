"""Define the request and the response of vLLM's ``/classify``, field by field (vLLM 0.32).

Written by ``plaudit_reward.model_client`` among others, read by ``api``. Fields of vLLM that change the result
(``truncate_prompt_tokens``, ``chat_template``, …) are not supported here. Unknown fields are refused, because ignoring
one would change the result silently.
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
    """False: return the logits. Default: return their activation, as vLLM does."""
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
    """Label of the largest value."""
    probs: list[float]
    """Logits or, with activation, probabilities; one for each label."""
    num_classes: int


class Usage(msgspec.Struct):
    """Tokens of a request, including special ones."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyResponse(msgspec.Struct):
    """The response: one ``Classification`` for each sequence, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class ErrorInfo(msgspec.Struct):
    """The reason that a request failed."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """The body of every response with a status other than 200."""

    error: ErrorInfo
