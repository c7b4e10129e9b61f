"""Requests in a process of their own, so that the forward pass does not share the interpreter's lock with them.

In one process HTTP, JSON and tokenising take turns with a pass that asks for the lock at every operation. So the
process that has loaded the model forks one that answers requests, as torch's DataLoader forks its workers: what has
used OpenMP and the GPU stays where it was, and memory is shared. Both end when either does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from plaudit_reward.model_server.batcher import Forward, ForwardError, Logits

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Front = Callable[[Forward, int | None], int]
"""Answers requests, given what computes them (raises ``ForwardError``) and a descriptor that is readable once nobody
does so any more (None: it is computed here); returns the exit code."""


def with_front(front: Front, forward: Forward) -> int:
    """Runs ``front`` in a process of its own, where there is a safe ``fork``, and ``forward`` here when it asks.

    SIGTERM and SIGINT are passed on to the front.

    Returns:
        The front's exit code; 1 when a pass failed.
    """
    if sys.platform != "linux":  # frameworks of macOS do not survive a fork
        return front(forward, None)
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
        _end_with(lambda: front(_Remote(there), alive))
    there.close()
    os.close(alive)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: _stop(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    failed = _compute(here, forward)
    here.close()  # a front that asks once more learns that nobody computes
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 1 if failed else code if code >= 0 else 128 - code


def _stop(front: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(front, signal.SIGTERM)


def _end_with(work: Callable[[], int]) -> None:
    """Ends this process without what the other one would do at its end."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _compute(front: Connection, forward: Forward) -> bool:
    """Computes until the front is gone; returns whether a pass failed, which is the end too."""
    while True:
        try:
            sequences = front.recv()
        except (EOFError, OSError):
            return False
        try:
            answer: Any = forward(sequences)
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
    """The forward pass, seen from the front."""

    def __init__(self, computing: Connection) -> None:
        self._computing = computing

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Logits]:
        try:
            self._computing.send(sequences)
            answer: list[Logits] | str = self._computing.recv()
        except (EOFError, OSError) as error:
            raise ForwardError("the process that computes is gone") from error
        if isinstance(answer, str):
            raise ForwardError(answer)
        return answer
