"""Tune the C library and the interpreter; each setting is worth a tenth of the server's speed on a CPU."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
_KEPT_BYTES = 1 << 30
_SWITCH_S = 1e-4


def tune() -> None:
    """Keep freed memory, and make threads switch quickly.

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
