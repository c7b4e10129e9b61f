"""Write a model's tensors as one safetensors file of each rank, hashed on the way. Called by ``policy_model``.

Each rank writes whole tensors, balanced by their bytes. They are gathered one after the other, so no rank ever holds
the whole model. With several files an index names the file of each tensor, as in every sharded model on the Hugging
Face hub.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from torch import Tensor

from plaudit_workers.training.shards.tensor_bytes import DTYPES_BY_NAME, bytes_of
from plaudit_workers.weight_transfer.layout import FileLayout, TensorShape, file_layout

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class WeightFile:
    """Hold one file of the published weights."""

    name: str
    tensors: tuple[TensorShape, ...]

    @property
    def layout(self) -> FileLayout:
        """Return the layout of the file."""
        return file_layout(self.tensors)


@dataclass(frozen=True)
class WeightFiles:
    """Plan the files of the published weights: file i is written by rank i. The same on every rank."""

    files: tuple[WeightFile, ...]
    """At most one for each rank, none of them empty."""

    @classmethod
    def plan(cls, tensors: Sequence[TensorShape], name: str, num_files: int) -> Self:
        """Distribute tensors over files: the largest first, each to the file that has the fewest bytes.

        Args:
            name: of the only file, such as ``model.safetensors``; several are ``model-00001-of-00008.safetensors`` …
            num_files: at most; fewer if there are fewer tensors.
        """
        shares: list[list[TensorShape]] = [[] for _ in range(max(1, min(num_files, len(tensors))))]
        sizes = [0] * len(shares)
        for tensor in sorted(tensors, key=lambda each: (-each.num_bytes, each.name)):
            least = min(range(len(shares)), key=lambda number: (sizes[number], len(shares[number])))
            shares[least].append(tensor)
            sizes[least] += tensor.num_bytes
        stem, _, suffix = name.rpartition(".")
        names = [f"{stem}-{number + 1:05d}-of-{len(shares):05d}.{suffix}" for number in range(len(shares))]
        used = names if len(shares) > 1 else [name]
        return cls(tuple(WeightFile(own, tuple(share)) for own, share in zip(used, shares, strict=True)))

    def write_own(self, folder: Path, rank: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write the file of this rank; every tensor is taken from ``tensors``, whether it is written here or not.

        Args:
            folder: exists on a volume that all ranks share.
            tensors: (published name, whole tensor) in the order of ``order``; taking one may be a collective call.

        Returns:
            The file's name with its SHA-256, hexadecimal; empty if this rank has no file.

        Raises:
            OSError: the disk is full, or the folder is missing. All tensors were taken before.
        """
        own = self.files[rank] if rank < len(self.files) else None
        if own is None:
            for _ in tensors:
                pass
            return {}
        dtypes = {tensor.name: DTYPES_BY_NAME[tensor.dtype] for tensor in own.tensors}
        with _HashedFile(folder / own.name, own.layout) as file:
            for name, tensor in tensors:
                if name in dtypes:
                    file.append(tensor.detach().to("cpu", dtypes[name]).contiguous())
        return {own.name: file.digest}

    @property
    def order(self) -> list[str]:
        """Return the names of all tensors in the order in which they are gathered: that of each file's layout."""
        starts = {name: start for file in self.files for name, start in file.layout.offsets.items()}
        return sorted(starts, key=lambda name: (starts[name], name))

    def index(self) -> Mapping[str, bytes]:
        """Return the index file by its name; empty if there is one file only."""
        if len(self.files) == 1:
            return {}
        stem = self.files[0].name.partition("-")[0]
        weight_map = {
            part.name: file.name for file in self.files for tensor in file.tensors for part in tensor.published
        }
        total = sum(tensor.num_bytes for file in self.files for tensor in file.tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return {f"{stem}.safetensors.index.json": json.dumps(content, indent=1).encode()}


class _HashedFile:
    """Write and hash a new file in a thread, while the caller gathers the next tensor."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        self._header = layout.header
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "weights-write")
        self._file: BinaryIO | None = None
        self._last: Future[None] = self._thread.submit(self._open)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def append(self, tensor: Tensor) -> None:
        """Write a tensor; the one before is written first, so two are held at most. Errors are raised at the end."""
        self._wait()
        if self._error is None:
            self._last = self._thread.submit(self._write, bytes_of(tensor))

    def __exit__(self, *_: object) -> None:
        self._wait()
        if self._error is None:
            self._last = self._thread.submit(self._flush)
            self._wait()
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()
        if self._error is not None:
            raise self._error

    @property
    def digest(self) -> str:
        """Return SHA-256 of the written bytes."""
        return self._hash.hexdigest()

    def _wait(self) -> None:
        self._error = self._error or self._last.exception()

    def _open(self) -> None:
        self._file = self._path.open("xb", buffering=0)
        self._write(memoryview(self._header))

    def _write(self, content: memoryview) -> None:
        assert self._file is not None
        for start in range(0, len(content), _BLOCK_BYTES):
            block = content[start : start + _BLOCK_BYTES]
            self._hash.update(block)
            while block:  # an unbuffered write may be short
                block = block[self._file.write(block) :]

    def _flush(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
