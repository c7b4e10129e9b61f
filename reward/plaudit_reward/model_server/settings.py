"""Define the settings of the model that the server loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ModelSettings:
    """The model and how to compute it."""

    source: str
    """Hub id or folder."""
    revision: str = "main"
    dtype: Dtype = "bfloat16"
    device: str = ""
    """``cpu``, ``cuda``, ``cuda:1``; empty: a GPU if one is available."""
    max_model_length: int | None = None
    """Tokens of a sequence; None: the lower of the model's and its tokenizer's limit."""
    trust_remote_code: bool = False
