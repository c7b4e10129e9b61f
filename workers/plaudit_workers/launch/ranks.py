"""``python -m plaudit_workers.launch.ranks``: run the ranks of one pod, each as a process of its own.

Reads ``NODE_RANK`` (index of this pod), ``LOCAL_WORLD_SIZE`` (ranks here), ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``; starts ``python -m plaudit_workers.training`` with ``RANK`` and ``LOCAL_RANK``. The ranks share
collectives, so the first that fails ends the others; its exit code becomes this process's, so that the
pod's exit code is the trainer's (torchrun would turn every code into 1).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_LOOK_EVERY_S = 0.2
_ENDS_WITHIN_S = 10.0
"""After one has failed the others hang in a collective and have nothing to save."""
_MODULE = "plaudit_workers.training"


def environments(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each rank of this pod."""
    ranks_here, node = int(environment["LOCAL_WORLD_SIZE"]), int(environment["NODE_RANK"])
    return [
        {**environment, "RANK": str(node * ranks_here + local), "LOCAL_RANK": str(local)} for local in range(ranks_here)
    ]


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the ranks to their end and forward SIGTERM to all of them.

    Return 0 when all ended with 0, else the code of the first that did not (128 + the signal that killed it).
    """
    ranks = [subprocess.Popen(command, env=each) for each in environments(environment)]

    def forward(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            _end(ranks)
            return failed if failed > 0 else 128 - failed
        if None not in codes:
            return 0
        time.sleep(_LOOK_EVERY_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    end = time.monotonic() + _ENDS_WITHIN_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    raise SystemExit(run([sys.executable, "-m", _MODULE], os.environ))
