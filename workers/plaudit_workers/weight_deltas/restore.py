"""Restore the whole weight files of a version from those of another one and the deltas between them.

Each file is read, changed, hashed and written block by block in one pass, several files at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from plaudit_workers.published_weights import combined_digest
from plaudit_workers.weight_deltas.encoding import DeltaError, TensorDelta, TensorPatch, as_bits, read_deltas
from plaudit_workers.weight_deltas.folders import DELTA_FILE, DELTA_SUFFIX, chain_from_whole, read_record

_FILES_AT_ONCE = 8
_BLOCK_BYTES = 4 << 20
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
"""Of safetensors itself."""


class _Tensor(NamedTuple):
    name: str
    num_bytes: int
    item_bytes: int


def restore(start: Path, deltas: Sequence[Path], target: Path) -> str:
    """Write the weight files of the version to which the deltas lead.

    Args:
        start: folder with whole weight files.
        deltas: folders, the oldest first; the first one rests on ``start``.
        target: folder for the files; ``start`` itself is changed in place, and damaged if this raises.

    Returns:
        ``combined_digest`` of the written files.

    Raises:
        OSError: a file is missing, or the disk is full.
        DeltaError: a delta does not fit.
    """
    paths = sorted(start.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no safetensors in {start}")
    with ThreadPoolExecutor(_FILES_AT_ONCE, "weights-restore") as threads:
        digests = list(threads.map(partial(_restore_file, deltas=deltas, target=target), paths))
    return combined_digest(dict(zip((path.name for path in paths), digests, strict=True)))


def restore_version(folder: Path, target: Path) -> None:
    """Write the whole weights of a published version, with configuration and tokenizer.

    Args:
        folder: of the version, which has a delta and perhaps no whole files.
        target: an empty folder.

    Raises:
        OSError: a file is missing, or the disk is full.
        DeltaError: a delta or a version that it rests on is damaged or missing.
    """
    chain, record = chain_from_whole(folder), read_record(folder)
    digest = restore(chain.start, chain.deltas, target)
    if record is not None and digest != record.digest:
        raise DeltaError(f"the restored files have digest {digest}, {folder / DELTA_FILE} names {record.digest}")
    copy_companions(chain.start, target)
    copy_companions(folder, target)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what lies beside the weights: configuration, tokenizer, index, probe."""
    for path in source.iterdir():
        if path.suffix not in (".safetensors", DELTA_SUFFIX) and path.name != DELTA_FILE:
            shutil.copyfile(path, target / path.name)


def _restore_file(path: Path, deltas: Sequence[Path], target: Path) -> str:
    changes = [read_deltas(folder / f"{path.name}{DELTA_SUFFIX}") for folder in deltas]
    in_place = path.parent == target
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb") as source, (target / path.name).open("r+b" if in_place else "wb", buffering=0) as file:
        header, tensors = _read_header(source)
        digest.update(header)
        if not in_place:
            _write(file, memoryview(header))
        for tensor in tensors:
            patches = _patches(tensor, changes)
            for start in range(0, tensor.num_bytes, _BLOCK_BYTES):
                block = buffer[: min(_BLOCK_BYTES, tensor.num_bytes - start)]
                at = source.tell()
                if source.readinto(block) != len(block):
                    raise DeltaError(f"{path} is shorter than its header says")
                elements = as_bits(block, tensor.item_bytes)
                changed = [patch.apply(elements, start // tensor.item_bytes) for patch in patches]
                digest.update(block)
                if any(changed) or not in_place:
                    file.seek(at)
                    _write(file, block)
    return digest.hexdigest()


def _patches(tensor: _Tensor, changes: Sequence[Mapping[str, TensorDelta]]) -> list[TensorPatch]:
    own = [each[tensor.name] for each in changes if tensor.name in each]
    try:
        return [delta.patch(tensor.num_bytes // tensor.item_bytes, tensor.item_bytes) for delta in own]
    except DeltaError as error:
        raise DeltaError(f"{tensor.name}: {error}") from error


def _read_header(source: BinaryIO) -> tuple[bytes, list[_Tensor]]:
    """Return the first bytes of a safetensors file, and its tensors in the order of their bytes."""
    length = source.read(_LENGTH_BYTES)
    num_bytes = int.from_bytes(length, "little")
    if len(length) < _LENGTH_BYTES or num_bytes > _MAX_HEADER_BYTES:
        raise DeltaError(f"{source.name} is no safetensors file")
    text = source.read(num_bytes)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        ordered = sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        tensors = [_tensor(name, entry["data_offsets"], entry["shape"]) for name, entry in ordered]
    except (ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"{source.name} has a damaged header: {error!r}") from error
    return length + text, tensors


def _tensor(name: str, offsets: Sequence[int], shape: Sequence[int]) -> _Tensor:
    start, end = offsets
    return _Tensor(name, end - start, (end - start) // max(1, math.prod(shape)) or 1)


def _write(file: BinaryIO, content: memoryview) -> None:
    while content:  # an unbuffered write may be short
        content = content[file.write(content) :]
