"""Report what a run waits for, where that takes longer than a few seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

REPORTED_AFTER_S = 3.0
"""A wait that is shorter is not worth a line."""


@contextmanager
def reported_wait(console: Console, what: str) -> Iterator[None]:
    """Print ``waiting for <what> …`` once the body has taken ``REPORTED_AFTER_S``."""
    timer = threading.Timer(REPORTED_AFTER_S, lambda: console.out(f"waiting for {what} …", highlight=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
