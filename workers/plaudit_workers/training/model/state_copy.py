"""Copy the policy's state to host memory and write it beside the next updates, each rank its rows.

``Commands`` sends the calls of rank 0's model to the other ranks, because collective operations need all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.sharding import Ranks, gather_bytes, own_rows, saved_rows
from plaudit_workers.training.model.weight_offer import WeightOffer
from plaudit_workers.weights.files import ShardReader, TensorRows, host_copy, write_rows
from plaudit_workers.weights.image import WeightForm
from plaudit_workers.weights.index import INDEX_FILE, ShardedTensor, ShardError, ShardIndex, StateProgress, merged

ARGUMENTS: dict[str, Any] = {
    "update": TrainingBatch,
    "logprobs": TrainingBatch,
    "divergences": TrainingBatch,
    "free_memory": None,
    "hold_proximal": PolicyVersion,
    "offer": WeightOffer,
    "write_weights": str,
    "copy_weights": None,
    "write_copied": WeightForm,
    "probe": None,
    "copy_state": None,
    "load": str,
    "restore": StateProgress,
    "close": None,
}
"""Command → type of its argument."""


class WriteReport(msgspec.Struct, frozen=True):
    """Report that a rank has written its file, or failed to."""

    error: str = ""
    tensors: dict[str, ShardedTensor] = {}


class StateCopy:
    """Hold this rank's rows of a state, in host memory.

    The step continues as soon as the copy is made. Threads of the ranks then write: rank 0 sends the folder, each rank
    writes one file, and rank 0 collects their tables into the index. They meet in a process group of their own, so they
    never wait for a command.

    Args:
        tensors: the state by name, the same names on every rank; sharded or whole.
    """

    def __init__(self, ranks: Ranks, tensors: Mapping[str, Tensor], progress: StateProgress) -> None:
        self._ranks = ranks
        self._rows = [
            TensorRows(name, host_copy(rows), first_row, tuple(tensors[name].shape))
            for name, rows, first_row in saved_rows(tensors, ranks.rank)
        ]
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._begun = False

    def write(self, folder: Path) -> None:
        """Write the state of all ranks. On rank 0, in any thread; the others have to ``follow``.

        Args:
            folder: an empty one, on a volume that all ranks share.

        Raises:
            ShardError: a rank could not write its rows.
            OSError: this rank could not.
        """
        self._begun = True
        self._gather(str(folder).encode())
        reports = [msgspec.msgpack.decode(each, type=WriteReport) for each in self._gather(self._write_own(folder))]
        errors = [report.error for report in reports if report.error]
        if errors:
            raise ShardError("; ".join(errors))
        index = ShardIndex(self._progress, merged(report.tensors for report in reports))
        (folder / INDEX_FILE).write_bytes(index.encoded())

    def abandon(self) -> None:
        """Release the other ranks, if ``write`` was never called."""
        if not self._begun:
            self._begun = True
            self._gather(b"")

    def follow(self) -> None:
        """Write this rank's rows in a thread, when rank 0 writes."""
        self._thread = threading.Thread(target=self._follow, name="checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread of ``follow``."""
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        if folder := self._gather(b"")[0]:
            self._gather(self._write_own(Path(folder.decode())))

    def _write_own(self, folder: Path) -> bytes:
        rank = self._ranks.rank
        name = f"rank-{rank:05d}-of-{self._ranks.world_size:05d}.safetensors"
        try:
            report = WriteReport(tensors=write_rows(folder / name, self._rows))
        except OSError as error:  # reported to rank 0, which ends the run
            report = WriteReport(f"rank {rank}: {error}")
        self._rows.clear()
        return msgspec.msgpack.encode(report)

    def _gather(self, message: bytes) -> list[bytes]:
        return gather_bytes(message, self._ranks.world_size, self._ranks.saving)


def refuse_other_tensors(index: ShardIndex, tensors: Mapping[str, Tensor]) -> None:
    """Check that a stored state has these tensors, in these shapes; raise ``ShardError`` if it has not."""
    for name, tensor in tensors.items():
        stored = index.tensors.get(name)
        if stored is None:
            raise ShardError(f"{name} is missing")
        if stored.shape != tuple(tensor.shape):
            raise ShardError(f"{name} has the shape {list(stored.shape)}, the model's has {list(tensor.shape)}")


@torch.no_grad()
def read_own_rows(reader: ShardReader, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's rows of the tensors; no other rows are read."""
    for name, tensor in tensors.items():
        rows, first_row = own_rows(tensor)
        if rows.numel():
            rows.copy_(reader.rows(name, first_row, rows.shape[0] if rows.dim() else 1))


class CommandError(Exception):
    """Report that a rank received bytes that are not a command."""


class Commands:
    """Broadcast commands from rank 0: the name of a method of ``PolicyModel`` and its argument.

    A command travels as msgpack, never as pickle: a rank that receives something else fails instead of running it. A
    rank that dies closes its connections, so the next collective operation of the others raises and their processes
    end.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def send(self, name: str, argument: object = None) -> None:
        """Broadcast a command from rank 0, where there are several; every public method of the model begins with it."""
        self._ranks.use_device()
        if self._ranks.rank == 0 and self._ranks.world_size > 1:
            self._broadcast(encode_command(name, argument))

    def receive(self) -> tuple[str, Any]:
        """Wait for rank 0's next command; raise ``CommandError`` for anything else, ``RuntimeError`` if it is gone."""
        self._ranks.use_device()
        return decode_command(self._broadcast(b""))

    def gather(self, message: bytes) -> list[bytes]:
        """Return the message of each rank; a collective call within a command."""
        return gather_bytes(message, self._ranks.world_size, self._ranks.commands)

    def _broadcast(self, content: bytes) -> bytes:
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self._ranks.commands)
        buffer = torch.frombuffer(bytearray(content or int(size)), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._ranks.commands)
        return buffer.numpy().tobytes()


def encode_command(name: str, argument: object = None) -> bytes:
    """Encode a command as msgpack: ``[name, argument]``; arrays as ``[dtype, bytes]``."""
    return msgspec.msgpack.encode([name, argument], enc_hook=_encode_array)


def decode_command(content: bytes) -> tuple[str, Any]:
    """Decode what ``encode_command`` made; raise ``CommandError`` if the content is not a command."""
    try:
        name, argument = msgspec.msgpack.decode(content, type=tuple[str, msgspec.Raw])
        return name, msgspec.msgpack.decode(argument, type=ARGUMENTS[name], dec_hook=_decode_array)
    except (msgspec.MsgspecError, KeyError) as error:
        raise CommandError(f"rank 0 sent no command of the trainer: {error}") from error


def _encode_array(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"{type(array).__name__} is no plain data")
    return [array.dtype.str, array.tobytes()]


def _decode_array(_: type, encoded: Any) -> Any:
    dtype, content = encoded
    return np.frombuffer(content, np.dtype(dtype))
