"""Names of signals, also of those that Python has no name for."""

from __future__ import annotations

import signal

from plaudit_wire.frames import signal_name


def test_every_signal_has_a_name() -> None:
    assert [signal_name(number) for number in (9, 11, 34, 40, 64)] == [
        "SIGKILL",
        "SIGSEGV",
        "SIGRTMIN",
        "SIGRTMIN+6",
        "SIGRTMAX",
    ]
    assert all(signal_name(number) for number in range(1, signal.NSIG))
    assert signal_name(32) == "signal 32"
