"""Settings of the C library and the interpreter; each is worth a tenth of the server's speed on a CPU."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
_KEPT_BYTES = 1 << 30
_SWITCH_S = 1e-4


def tune() -> None:
    """Keeps freed memory, and lets threads take turns quickly.

    The tensors of one pass are as large as those of the last. By default glibc gives each back to the kernel and asks
    for zeroed pages anew. And torch lets the interpreter's lock go at every operation: the forward pass would wait for
    it, up to Python's 5 ms, each time that the event loop is busy.
    """
    sys.setswitchinterval(_SWITCH_S)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's; musl has none
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def spare_collector() -> None:
    """To be called once the model is loaded: what exists by then stays, and is never looked at for garbage again.

    Else each full collection would hold everything up for the tenth of a second that torch's modules take.
    """
    gc.collect()
    gc.freeze()
