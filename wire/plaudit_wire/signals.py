"""Names of signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGSEGV`` or ``SIGRTMIN+6``; Python names only two of the real-time ones."""
    try:
        return signal.Signals(number).name
    except ValueError:
        pass
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number}"
