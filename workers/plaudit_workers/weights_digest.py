"""The digest that tells a reader of weights that it holds what the trainer wrote. Used by trainer and rollout."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def weights_digest(folder: Path) -> str:
    """SHA-256, hexadecimal, over the bytes of the folder's ``*.safetensors`` in the order of their names.

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
