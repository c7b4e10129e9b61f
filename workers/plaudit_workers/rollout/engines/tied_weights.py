"""Load a model whose output head is tied to its embedding into an engine that keeps them separate.

vLLM's CPU backend packs the head's matrix when it builds the model; a reload replaces the embedding and leaves the
packed head at the old weights, without an error (log-probabilities off by 0.5 and more). So on a CPU the model is built
untied and the head is loaded as a matrix of its own. Called by ``vllm_loop``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class UntiedWeights:
    """Yield the tensors of a folder of weights with a head of their own; each iteration reads the files.

    With tensor parallelism vLLM sends it to its worker processes, which a generator cannot be.
    """

    folder: Path

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all ``*.safetensors``; if they have no head, the embedding again as the head."""
        has_head, embedding = False, None
        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping: it cannot be iterated)
                    tensor = tensors.get_tensor(name)
                    has_head = has_head or name == _HEAD
                    embedding = tensor if name.endswith(_EMBEDDING) else embedding
                    yield name, tensor
        if not has_head and embedding is not None:
            yield _HEAD, embedding
