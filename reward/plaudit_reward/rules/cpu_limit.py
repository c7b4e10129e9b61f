"""Interrupt a computation after some CPU seconds; works only in the main thread of a child process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_AGAIN_AFTER_S = 0.1
"""Raised where Python ignores exceptions (a finaliser, a callback of the garbage collector) it has to be raised again;
not so soon that a block which it ends has not been left by then."""


class OutOfTimeError(BaseException):
    """The computation used up its CPU seconds. Not an ``Exception``, because mathematical libraries catch those."""


def shown_within(limit_s: float, claim: Callable[[], bool]) -> bool:
    """Return True if the claim is shown within ``limit_s`` CPU seconds."""
    try:
        with cpu_limit(limit_s):
            return claim()
    except OutOfTimeError:
        return False


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Raise ``OutOfTimeError`` inside the block after ``limit_s`` CPU seconds of this process.

    CPU seconds, so that a busy machine does not turn right answers into wrong ones. One call into C (a huge power)
    cannot be interrupted like this; the scorer's time limit kills the process instead.
    """
    before = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, limit_s, _AGAIN_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _out_of_time(_: int, __: FrameType | None) -> NoReturn:
    raise OutOfTimeError
