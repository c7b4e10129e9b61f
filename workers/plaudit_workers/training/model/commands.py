"""Send the calls of rank 0's model to the other ranks, because collective operations need all of them.

A command is the name of a method of ``PolicyModel`` and its argument. It travels as msgpack in a broadcast from rank 0,
never as pickle: a rank that receives something else fails instead of running it. A rank that dies closes its
connections, so the next collective operation of the others raises and their processes end.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.batches.batch import TrainingBatch
from plaudit_workers.training.model.sharding import Ranks, gather_bytes
from plaudit_workers.training.model.weight_offer import WeightOffer
from plaudit_workers.training.shards.index import StateProgress
from plaudit_workers.training.shards.weight_image import WeightForm

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


class CommandError(Exception):
    """Report that a rank received bytes that are not a command."""


class Commands:
    """Broadcast commands from rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def send(self, name: str, argument: object = None) -> None:
        """Broadcast a command from rank 0, where there are several; every public method of the model begins with it."""
        self._ranks.use_device()
        if self._ranks.rank == 0 and self._ranks.world_size > 1:
            self._broadcast(encode_command(name, argument))

    def receive(self) -> tuple[str, Any]:
        """Wait for rank 0's next command.

        Raises:
            CommandError: rank 0 sent something else.
            RuntimeError: rank 0, or another rank, is gone.
        """
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
    """Decode what ``encode_command`` made.

    Raises:
        CommandError: the content is not a command.
    """
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
