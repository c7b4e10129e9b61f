"""Ctrl-C and SIGTERM under ``plaudit run``."""

import asyncio
import io
import os
import signal

from rich.console import Console

from plaudit_workers.launch.live import Interrupt


def test_a_signal_handler_that_a_library_installed_is_replaced() -> None:
    stream, received = io.StringIO(), []

    async def run() -> None:
        interrupt = Interrupt(Console(file=stream), saves=lambda: False)
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))  # as ray.init does
        interrupt.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(interrupt.stop.wait(), 5)
        assert interrupt.at_once

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert received == []
    assert stream.getvalue() == "stopping …\n"
