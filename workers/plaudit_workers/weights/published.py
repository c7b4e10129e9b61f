"""Define a folder of published weights: its files, digest and probe. Written by the trainer, checked by rollouts.

``weights/<incarnation>.<number>/`` holds ``*.safetensors`` (one file of each rank; with several, their index),
configuration, tokenizer, and ``probe.json``. With ``trainer.lora`` it holds the adapters only, in peft's format. With
``trainer.weights.fullEvery`` most versions hold only what changed (``deltas``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

PROBE_FILE = "probe.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_FILES_AT_ONCE = 8


class Probe(msgspec.Struct, frozen=True):
    """Hold ``probe.json``: a fixed sequence with the trainer's log-probabilities, which a rollout computes again."""

    ids: list[int]
    """[L] token ids."""
    logprobs: list[float]
    """[L - 1]: of ``ids[1:]``, each given all tokens before it, at temperature 1."""
    limit: float = 0.1
    """Mean absolute difference in nats above which a rollout refuses the weights; depends on their precision."""


def is_whole(folder: Path) -> bool:
    """Return True if the folder holds whole weight files."""
    return any(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """Read and hash the folder's weight files; return ``combined_digest`` of them."""
    return digest_files(folder, _file_digest)


def digest_files(folder: Path, digest: Callable[[Path], str]) -> str:
    """Return ``combined_digest`` of what ``digest`` gives for each of the folder's ``*.safetensors``, eight at once."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}")
    with ThreadPoolExecutor(_FILES_AT_ONCE, "weights-files") as threads:
        return combined_digest(dict(zip((path.name for path in files), threads.map(digest, files), strict=True)))


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a folder of weights: SHA-256, hexadecimal, over a line for each file, sorted by name.

    Args:
        digests: name of each file → SHA-256 of its bytes, hexadecimal. A line is that of ``sha256sum``.
    """
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_all(file: BinaryIO, content: memoryview) -> None:
    """Write all bytes to an unbuffered file, of which one write may be short."""
    while content:
        content = content[file.write(content) :]


def write_flushed(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and flush it to the disk."""
    with path.open("xb", buffering=0) as file:
        for content in contents:
            write_all(file, memoryview(content))
        os.fsync(file.fileno())


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
