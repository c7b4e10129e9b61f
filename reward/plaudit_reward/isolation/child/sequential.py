"""``isolation: process``: run works one by one in the main thread, where ``signal.alarm`` of user code works."""

from __future__ import annotations

import time
from collections import deque

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.isolation.child.call import Resolve, perform
from plaudit_reward.isolation.messages import Channel, Drop, Dropped, FromChild, FromPool, Started, Work

_LOOK_UP_AFTER_S = 0.002
"""After a work that took longer, messages that drop waiting works are read before the next."""


def run_sequential(function: UserFunction, channel: Channel, resolve: Resolve | None = None) -> None:
    """Run works until the pool closes the connection (``EOFError``).

    The result of one work travels with the start of the next: one system call a sample.
    """
    waiting: deque[Work] = deque()
    report: list[FromChild] = []
    while True:
        if not waiting:
            if report:
                channel.send(report)
                report = []
            report += _take_in(channel.receive(), waiting)
            continue
        work = waiting.popleft()
        channel.send([*report, Started(work.id)])
        began = time.monotonic()
        report = [perform(function, work, resolve, alone=True)]
        if time.monotonic() - began > _LOOK_UP_AFTER_S:
            report += _take_in(channel.receive(wait=False), waiting)


def _take_in(messages: list[FromPool], waiting: deque[Work]) -> list[FromChild]:
    """Add works to ``waiting`` and remove dropped ones; return the messages about it."""
    dropped: list[int] = []
    for message in messages:
        if isinstance(message, Work):
            waiting.append(message)
        elif isinstance(message, Drop):
            unwanted = set(message.ids)
            dropped += [work.id for work in waiting if work.id in unwanted]
            kept = [work for work in waiting if work.id not in unwanted]
            waiting.clear()
            waiting.extend(kept)
    return [Dropped(dropped)] if dropped else []
