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
from plaudit_workers.training.model.sharding import Ranks
from plaudit_workers.training.model.weight_offer import WeightOffer

_GATHERED_BYTES = 1024
"""Size of the messages that ``gather`` collects."""


class OptimizerProgress(msgspec.Struct, frozen=True):
    """The part of a checkpoint that every rank needs; tensors follow one by one, directly into the shards."""

    random_state: bytes
    """Of torch's generator on the CPU."""
    updates: int
    """Updates made so far."""
    steps: dict[str, int]
    """Parameter name → updates applied to it."""


ARGUMENTS: dict[str, Any] = {
    "update": TrainingBatch,
    "logprobs": TrainingBatch,
    "hold_proximal": PolicyVersion,
    "offer": WeightOffer,
    "full_state": None,
    "probe": None,
    "state_dict": None,
    "restore": OptimizerProgress,
    "close": None,
}
"""Command → type of its argument."""


class CommandError(Exception):
    """A rank received bytes that are not a command."""


class Commands:
    """The broadcast of commands from rank 0.

    Args:
        ranks: this process's place.
    """

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
        """Return the message of each rank, of at most 1,020 bytes; a collective call within a command."""
        if self._ranks.world_size == 1:
            return [message]
        framed = len(message).to_bytes(4, "big") + message
        own = torch.frombuffer(bytearray(framed.ljust(_GATHERED_BYTES, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(self._ranks.world_size)]
        dist.all_gather(gathered, own, group=self._ranks.commands)
        received = [each.numpy().tobytes() for each in gathered]
        return [each[4 : 4 + int.from_bytes(each[:4], "big")] for each in received]

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
