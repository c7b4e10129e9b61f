"""``isolation: thread``: run works that block on the network, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.isolation.child.call import perform
from plaudit_reward.isolation.messages import Channel, Drop, Started, Work

_STACK_BYTES = 1 << 20
"""With hundreds of threads, the default of 8 MiB each is address space that containers may count."""


def run_threads(function: UserFunction, channel: Channel, slots: int) -> None:
    """Run works until the pool closes the connection (``EOFError``), at most ``slots`` at a time."""
    threading.stack_size(_STACK_BYTES)
    waiting: SimpleQueue[Work] = SimpleQueue()
    dropped: set[int] = set()
    idle = threading.Semaphore(0)
    num_threads = 0
    while True:
        for message in channel.receive():
            if isinstance(message, Drop):
                dropped.update(message.ids)
            elif isinstance(message, Work):
                waiting.put(message)
                if not idle.acquire(blocking=False) and num_threads < slots:
                    num_threads += 1
                    arguments = (function, channel, waiting, dropped, idle)
                    threading.Thread(target=_work, args=arguments, daemon=True).start()


def _work(
    function: UserFunction,
    channel: Channel,
    waiting: SimpleQueue[Work],
    dropped: set[int],
    idle: threading.Semaphore,
) -> None:
    thread = threading.get_native_id()
    while True:
        work = waiting.get()
        if work.id not in dropped:
            channel.send([Started(work.id, thread, time.process_time(), time.thread_time())])
            channel.send([perform(function, work)])
        dropped.discard(work.id)
        idle.release()
