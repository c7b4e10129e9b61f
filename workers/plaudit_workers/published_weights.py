"""The contract of a folder of published weights: digest and probe. Written by the trainer, checked by rollouts.

``weights/<incarnation>.<number>/`` holds ``*.safetensors``, configuration, tokenizer, and ``probe.json``. With
``trainer.lora`` it holds the adapters only, in peft's format.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

PROBE_FILE = "probe.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_CHUNK_BYTES = 1 << 20


class Probe(msgspec.Struct, frozen=True):
    """``probe.json``: a fixed sequence with the trainer's log-probabilities, which a rollout computes again."""

    ids: list[int]
    """[L] token ids."""
    logprobs: list[float]
    """[L - 1]: of ``ids[1:]``, each given all tokens before it, at temperature 1."""
    limit: float = 0.1
    """Mean absolute difference in nats above which a rollout refuses the weights; depends on their precision."""


def weights_digest(folder: Path) -> str:
    """Return SHA-256, hexadecimal, over the bytes of the folder's ``*.safetensors`` in the order of their names.

    Raises:
        FileNotFoundError: there are none, or one vanished.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
