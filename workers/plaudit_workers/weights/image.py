"""Keep the published bytes of a rank's weight file in host memory, to publish only what changes of them.

For versions that are published as deltas (``trainer.weights.fullEvery``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from torch import Tensor

from plaudit_workers.weights.deltas import DELTA_SUFFIX, Bits, TensorDelta, as_bits, encode_deltas
from plaudit_workers.weights.files import DTYPES_BY_NAME, WeightFile, WeightFiles, bytes_of
from plaudit_workers.weights.published import write_flushed

_MAX_DELTA_SHARE = 0.5
"""A larger delta saves a rollout too little: the version is then written whole."""


class WeightForm(msgspec.Struct, frozen=True):
    """Command every rank to write the copied weights. Sent by rank 0."""

    folder: str
    """An existing one, on a volume that all ranks share."""
    whole: bool
    """Write the whole files."""
    delta: bool
    """Write what changed since the copy before."""


class CopiedWeights(msgspec.Struct, frozen=True):
    """Hold the copy of one rank, or of all."""

    digests: dict[str, str]
    """Name of each whole file → SHA-256 of its bytes, hexadecimal."""
    has_delta: bool
    """What changed is known, and takes at most half of each file."""

    @classmethod
    def of_ranks(cls, copies: Iterable[Self]) -> Self:
        """Return the copy of all ranks."""
        all_ranks = list(copies)
        digests = {name: digest for each in all_ranks for name, digest in each.digests.items()}
        return cls(digests, all(each.has_delta for each in all_ranks))


class WeightImage:
    """Hold the bytes of one rank's file as they were published last, and what changed with the newest ones."""

    def __init__(self, files: WeightFiles, rank: int) -> None:
        own = files.files[rank : rank + 1]
        self._image = _FileImage(own[0]) if own else None
        self._index = files.index() if rank == 0 else {}

    def replace(self, tensors: Iterable[tuple[str, Tensor]]) -> CopiedWeights:
        """Take new weights.

        Args:
            tensors: (published name, whole tensor) in the order of ``WeightFiles.order``; all are taken, because
                taking one may be a collective call.
        """
        if self._image is None:
            for _ in tensors:
                pass
            return CopiedWeights({}, has_delta=True)
        digest = self._image.replace(tensors)
        return CopiedWeights({self._image.name: digest}, self._image.has_delta)

    def write(self, form: WeightForm) -> None:
        """Write this rank's file as ``form`` says; rank 0 writes the index of whole files too."""
        folder = Path(form.folder)
        if self._image is not None:
            self._image.write(folder, form)
        if form.whole:
            for name, content in self._index.items():
                (folder / name).write_bytes(content)


class _FileImage:
    def __init__(self, file: WeightFile) -> None:
        self.name = file.name
        self._layout = file.layout
        self._tensors = {tensor.name: tensor for tensor in file.tensors}
        self._bytes = np.zeros(self._layout.num_bytes, dtype=np.uint8)
        self._bytes[: len(self._layout.header)] = np.frombuffer(self._layout.header, dtype=np.uint8)
        self._published = False
        self._deltas: dict[str, TensorDelta] | None = None
        """None if they are unknown, or too large."""

    @property
    def has_delta(self) -> bool:
        return self._deltas is not None

    def replace(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        digest = hashlib.sha256(self._layout.header)
        self._deltas = {} if self._published else None
        left = int(self._layout.num_bytes * _MAX_DELTA_SHARE)
        for name, tensor in tensors:
            if name in self._tensors:
                new = tensor.detach().to("cpu", DTYPES_BY_NAME[self._tensors[name].dtype]).contiguous()
                left -= self._replace_tensor(name, new)
                digest.update(bytes_of(new))
            if left < 0:
                self._deltas = None
        self._published = True
        return digest.hexdigest()

    def _replace_tensor(self, name: str, tensor: Tensor) -> int:
        """Return the bytes of the tensor's delta."""
        start, content, size = self._layout.offsets[name], bytes_of(tensor), 0
        for part in self._tensors[name].published:
            end = start + part.num_bytes
            old = as_bits(self._bytes[start:end], tensor.element_size())
            size += self._replace_part(part.name, old, as_bits(content[: part.num_bytes], tensor.element_size()))
            start, content = end, content[part.num_bytes :]
        return size

    def _replace_part(self, name: str, old: Bits, new: Bits) -> int:
        delta = None if self._deltas is None else TensorDelta.between(old, new)
        np.copyto(old, new)
        if delta is None or self._deltas is None:
            return 0
        self._deltas[name] = delta
        return delta.num_bytes

    def write(self, folder: Path, form: WeightForm) -> None:
        if form.whole:
            write_flushed(folder / self.name, [self._bytes.data])
        if form.delta:
            assert self._deltas is not None
            write_flushed(folder / f"{self.name}{DELTA_SUFFIX}", [encode_deltas(self._deltas)])
