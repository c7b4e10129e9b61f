"""Write the tensors of a state as one safetensors file in another precision, holding one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from plaudit_workers.training.shards.reader import ShardReader
from plaudit_workers.training.shards.tensor_bytes import DTYPE_NAMES, DTYPES_BY_NAME, bytes_of
from plaudit_workers.weight_transfer.layout import TensorParts, TensorShape, file_layout


def write_converted(
    path: Path, reader: ShardReader, names: Mapping[str, str], dtype: torch.dtype, parts: Mapping[str, TensorParts]
) -> None:
    """Write whole tensors.

    Args:
        names: name in the file → name in the state.
        dtype: of floating-point tensors; others keep theirs.
        parts: name in the file → the tensors that it consists of, where they are not itself.

    Raises:
        ShardError: a tensor is missing or damaged.
        OSError: a file cannot be read, or the disk is full.
    """
    stored = reader.index.tensors
    dtypes = {name: _converted(DTYPES_BY_NAME[stored[source].dtype], dtype) for name, source in names.items()}
    layout = file_layout(
        TensorShape(name, DTYPE_NAMES[dtypes[name]], stored[source].shape, parts.get(name, ()))
        for name, source in names.items()
    )
    with path.open("xb") as file:
        file.write(layout.header)
        for name in sorted(names, key=layout.offsets.__getitem__):
            file.write(bytes_of(reader.whole(names[name]).to(dtypes[name])))
        file.flush()
        os.fsync(file.fileno())


def _converted(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if own.is_floating_point else own
