"""Ranks of a trainer, each a process that is forked by a server which has imported torch and transformers.

Importing them takes a process four seconds of a core, more than most ranks compute.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from plaudit_workers.launch.redis import free_port

Program = Callable[..., None]
"""Called with the folder and the arguments, ``RANK`` and ``WORLD_SIZE`` in its environment."""

_SERVER = multiprocessing.get_context("forkserver")
# Modules outside of packages would be left out: the server's path is Python's own.
_SERVER.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2", "plaudit_workers.training.backend"])
_WITHIN_S = 240.0


def start_ranks(program: Program, folder: Path, world_size: int, *arguments: object) -> list[BaseProcess]:
    """Start the ranks of one trainer; what one writes to standard error is in the folder (``errors_in``)."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    shared |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks: list[BaseProcess] = [
        _SERVER.Process(
            target=_run,
            args=(program, (folder, *arguments), shared | {"RANK": str(rank)}, folder / f"errors-{world_size}-{rank}"),
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _run(program: Program, arguments: Sequence[object], environment: Mapping[str, str], errors: Path) -> None:
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    torch.set_num_threads(1)
    program(*arguments)


def exit_codes(ranks: Sequence[BaseProcess], within_s: float = _WITHIN_S) -> list[int | None]:
    """Wait for the ranks to end, and end those that have not within this time; they count as None."""
    try:
        deadline = time.monotonic() + within_s
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0.0))
        return [rank.exitcode for rank in ranks]
    finally:
        end_ranks(ranks)


def end_ranks(ranks: Sequence[BaseProcess]) -> None:
    """Kill those that still run."""
    for rank in ranks:
        rank.kill()
        rank.join()


def errors_in(folder: Path) -> list[str]:
    """Return what the ranks wrote to standard error."""
    return [path.read_text() for path in sorted(folder.glob("errors-*"))]


def run_ranks(program: Program, folder: Path, world_size: int, *arguments: object) -> None:
    """Run the ranks of one trainer to their end, which is a good one."""
    assert exit_codes(start_ranks(program, folder, world_size, *arguments)) == [0] * world_size, errors_in(folder)
