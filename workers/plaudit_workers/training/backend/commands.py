"""Rank 0 says what to do, the other ranks do it too: collective calls need all of them.

Built by ``policy.build_policy`` where there is more than one rank. A command is the name of a method and its argument,
broadcast from rank 0. A rank that dies closes its connections: the others' next collective call raises, and their
processes end with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.trained_policy import Probe, TrainedPolicy

CLOSE: Final = "close"
_CPU = torch.device("cpu")


class Leader:
    """Rank 0's ``Policy``: each call is first sent to the followers.

    Args:
        policy: rank 0's part.
        group: by which commands travel.
    """

    def __init__(self, policy: TrainedPolicy, group: dist.ProcessGroup | None) -> None:
        self._policy = policy
        self._group = group

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """See ``Policy.update``."""
        self._send("update", batch)
        return self._policy.update(batch)

    def logprobs(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """See ``Policy.logprobs``."""
        self._send("logprobs", batch)
        return self._policy.logprobs(batch)

    def hold_proximal(self, version: PolicyVersion) -> None:
        """See ``Policy.hold_proximal``."""
        self._send("hold_proximal", version)
        self._policy.hold_proximal(version)

    def full_state(self) -> dict[str, Tensor]:
        """See ``Policy.full_state``."""
        self._send("full_state")
        return self._policy.full_state()

    def probe(self) -> Probe:
        """See ``Policy.probe``."""
        self._send("probe")
        return self._policy.probe()

    def files(self) -> dict[str, bytes]:
        """See ``Policy.files``."""
        return self._policy.files()

    def state_dict(self) -> dict[str, Any]:
        """See ``Policy.state_dict``."""
        self._send("state_dict")
        return self._policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Policy.load_state_dict``. Tensors travel one by one, straight into the shards."""
        optimizer = {key: value for key, value in state["optimizer"].items() if key != "moments"}
        self._send("load_state_dict", {"rng": state["rng"], "optimizer": optimizer})
        self._policy.load_state_dict(state)

    def close(self) -> None:
        """See ``Policy.close``."""
        self._send(CLOSE)
        self._policy.close()

    def _send(self, name: str, *arguments: Any) -> None:
        dist.broadcast_object_list([(name, arguments)], src=0, device=_CPU, group=self._group)


class Follower:
    """The part of every rank but 0.

    Args:
        policy: this rank's part.
        group: by which commands travel.
    """

    def __init__(self, policy: TrainedPolicy, group: dist.ProcessGroup | None) -> None:
        self._policy = policy
        self._group = group
        self._commands: dict[str, Callable[..., Any]] = {
            "update": policy.update,
            "logprobs": policy.logprobs,
            "hold_proximal": policy.hold_proximal,
            "full_state": policy.full_state,
            "probe": policy.probe,
            "state_dict": policy.state_dict,
            "load_state_dict": policy.load_state_dict,
        }

    def follow(self) -> None:
        """Does what rank 0 does, until rank 0 closes its policy.

        Raises:
            RuntimeError: rank 0, or another rank, is gone.
        """
        while (command := self._receive())[0] != CLOSE:
            name, arguments = command
            self._commands[name](*arguments)
        self._policy.close()

    def _receive(self) -> tuple[str, tuple[Any, ...]]:
        slot: list[Any] = [None]
        dist.broadcast_object_list(slot, src=0, device=_CPU, group=self._group)
        command: tuple[str, tuple[Any, ...]] = slot[0]
        return command
