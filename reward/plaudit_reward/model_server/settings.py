"""Settings of the model that the server loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is computed."""

    source: str
    """Hub id or folder."""
    revision: str = "main"
    dtype: Dtype = "bfloat16"
    device: str = ""
    """``cpu``, ``cuda``, ``cuda:1``; empty: a GPU where there is one."""
    max_model_length: int | None = None
    """Tokens of a sequence; None: the lower of the model's and its tokenizer's limit."""
    trust_remote_code: bool = False
