"""``isolation: process``: one work after the other, in the main thread (where ``signal.alarm`` of user code works)."""

from __future__ import annotations

import time
from collections import deque

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.isolation.call import Resolve, perform
from plaudit_reward.isolation.messages import Channel, Drop, Dropped, FromChild, FromPool, Started, Work

_LOOK_UP_AFTER_S = 0.002
"""A work that took longer may have been overtaken by a message that takes waiting works away."""


def run_sequential(function: UserFunction, channel: Channel, resolve: Resolve | None = None) -> None:
    """Runs works until the pool is gone (``EOFError``).

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
        report = [perform(function, work, resolve)]
        if time.monotonic() - began > _LOOK_UP_AFTER_S:
            report += _take_in(channel.receive(wait=False), waiting)


def _take_in(messages: list[FromPool], waiting: deque[Work]) -> list[FromChild]:
    """Takes works in and out of ``waiting``; gives what is to be told of it."""
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
