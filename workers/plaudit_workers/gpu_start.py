"""Start engines on a shared GPU one after the other. Used by rollouts and the servers of models under ``plaudit run``.

vLLM measures its memory as the change of what is free on the whole device: an engine that starts beside another one
counts the other's memory as its own, and gets a smaller cache for the whole run.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import IO

GPU_SHARE = "PLAUDIT_GPU_SHARE"
"""Variable with this process's share of its GPU's memory, where ``plaudit run`` lets processes share one."""
_LOOK_EVERY_S = 0.2


def shares_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if other processes of the run use this one's GPUs too."""
    return GPU_SHARE in environment


@asynccontextmanager
async def alone_on_gpu(run: str, environment: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Hold the GPUs of this process within the context, if it shares them; wait until no other process does."""
    devices = environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if shares_gpu(environment) else []
    with ExitStack() as stack:
        for device in sorted(devices):  # all processes in the same order
            path = Path(tempfile.gettempdir(), f"plaudit-{run}-gpu-{device}.lock")
            await _locked(stack.enter_context(_opened(path)))
        yield


def _opened(path: Path) -> IO[bytes]:
    return path.open("wb")


async def _locked(file: IO[bytes]) -> None:
    """Return once this process has the lock, which ends with it."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOOK_EVERY_S)
