"""Estimate the tokens of a request: reserved from the budget before, corrected by the endpoint's count after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_FIRST_TOKENS_PER_BYTE = 1 / 3
"""English text has about one token for four bytes."""
_FIRST_ANSWER_TOKENS = 512
_FORGETTING = 0.98
"""Factor by which a past maximum shrinks with each answer: estimates err upwards, but not for ever."""


class TokenEstimate:
    """Learn from the endpoint's counts; a request's ``max_completion_tokens`` or ``max_tokens`` bounds the answer."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        bound = arguments.get("max_completion_tokens", arguments.get("max_tokens"))
        self._most_answer = float(bound) if isinstance(bound, int) else math.inf
        self._answer = min(_FIRST_ANSWER_TOKENS, self._most_answer)
        self._per_byte = _FIRST_TOKENS_PER_BYTE

    def tokens(self, prompt: str) -> int:
        """Return the tokens to reserve for a prompt and its answer."""
        return math.ceil(len(prompt.encode()) * self._per_byte + min(self._answer, self._most_answer))

    def learn(self, prompt: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Update the estimate by the real count of one request."""
        self._per_byte = max(prompt_tokens / max(1, len(prompt.encode())), self._per_byte * _FORGETTING)
        self._answer = max(float(answer_tokens), self._answer * _FORGETTING)
