"""Serve requests in a separate process, so that the forward pass does not share the interpreter's lock with them.

In one process, HTTP, JSON and tokenising compete with a pass that acquires the lock at every operation. So the process
that has loaded the model forks one that serves requests, as torch's DataLoader forks its workers: the parent keeps
OpenMP and the GPU, and memory is shared. When one of them ends, so does the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from plaudit_model_server.batcher import Forward, ForwardError, Logits, Occupy

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Front = Callable[[Forward, Occupy, int | None], int]
"""Serves requests and returns the exit code. Arguments: the forward pass and the move of the weights (both raise
``ForwardError``), and a descriptor that becomes readable when the computing process has ended (None: this process
computes)."""


def with_front(front: Front, forward: Forward, occupy: Occupy) -> int:
    """Run ``front`` in a child process, where ``fork`` is safe, and ``forward`` and ``occupy`` here at its requests.

    Forwards SIGTERM and SIGINT to the front. Returns the front's exit code; 1 when a pass failed.
    """
    if sys.platform != "linux":  # frameworks of macOS do not survive a fork
        return front(forward, occupy, None)
    here, there = multiprocessing.Pipe()
    alive, holds_alive = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        here.close()
        os.close(holds_alive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        computing = _Remote(there)
        _end_with(lambda: front(computing.forward, computing.occupy, alive))
    there.close()
    os.close(alive)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: _stop(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    failed = _compute(here, forward, occupy)
    here.close()  # a further request of the front fails: this process has stopped computing
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 1 if failed else code if code >= 0 else 128 - code


def _stop(front: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(front, signal.SIGTERM)


def _end_with(work: Callable[[], int]) -> None:
    """End this process without running the exit handlers of the other one."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _compute(front: Connection, forward: Forward, occupy: Occupy) -> bool:
    """Compute until the front has ended or a call fails; return True if one failed."""
    while True:
        try:
            asked = front.recv()
        except (EOFError, OSError):
            return False
        try:
            answer: Any = None
            if isinstance(asked, bool):
                occupy(asked)
            else:
                answer = forward(asked)
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        try:
            front.send(answer)
        except OSError:
            return False
        if isinstance(answer, str):
            return True


class _Remote:
    """Call the computing process from the front; one call at a time."""

    def __init__(self, computing: Connection) -> None:
        self._computing = computing

    def forward(self, sequences: Sequence[Sequence[int]]) -> list[Logits]:
        logits: list[Logits] = self._answer(sequences)
        return logits

    def occupy(self, device: bool) -> None:
        self._answer(device)

    def _answer(self, asked: Sequence[Sequence[int]] | bool) -> Any:
        try:
            self._computing.send(asked)
            answer = self._computing.recv()
        except (EOFError, OSError) as error:
            raise ForwardError("the computing process has ended") from error
        if isinstance(answer, str):
            raise ForwardError(answer)
        return answer


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
_KEPT_BYTES = 1 << 30
_SWITCH_S = 1e-4


def tune() -> None:
    """Keep freed memory, and make threads switch quickly; each is worth a tenth of the server's speed on a CPU.

    The tensors of one pass are as large as those of the previous one. By default glibc returns each to the kernel and
    requests new zeroed pages. Also, torch releases the interpreter's lock at every operation: the forward pass would
    wait for it, up to Python's 5 ms, each time that the event loop is busy.
    """
    sys.setswitchinterval(_SWITCH_S)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's; musl has none
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def spare_collector() -> None:
    """Exclude all existing objects from garbage collection; call it once the model is loaded.

    Otherwise each full collection would stop the process for the tenth of a second that torch's modules take.
    """
    gc.collect()
    gc.freeze()
