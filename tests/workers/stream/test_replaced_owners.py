"""A replaced trainer or session client stays replaced: repeated calls, a Redis that lost everything."""

from __future__ import annotations

import asyncio

import pytest

from plaudit_wire.messages import Announcement, PolicyVersion, Service
from plaudit_workers.stream.calls import SessionTakenError, StreamLimits, take_over
from plaudit_workers.stream.sessions import StreamSession
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

SERVICE = Service(job="j", scorers=["s"], group_scorers=False, group_deadline_s=900.0, room=10)


async def test_a_late_copy_of_an_answered_takeover_replaces_nobody(transport: Transport) -> None:
    first, second = take_over(0), take_over(0)
    run = transport.scripts.run
    assert [await run(call) for call in (first, second, first, second)] == [1, 2, 1, 2]
    calls = [take_over(0) for _ in range(40)]
    assert [await run(call) for call in calls] == list(range(3, 43))
    assert await run(calls[30]) == 33
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    assert await trainer.take_over() == 43
    await run(calls[-1])
    await trainer.announce(Announcement(PolicyVersion(43, 0), "weights/43.0", "abc"))


async def test_after_redis_lost_everything_the_client_that_opened_last_owns_a_session(transport: Transport) -> None:
    old, new = (StreamSession(transport, "same", SERVICE, 3600.0) for _ in range(2))
    for _ in range(3):
        await old.open()
    await lose_everything(transport)
    await new.open()
    with pytest.raises(SessionTakenError):
        await old.acknowledge([])
    await new.acknowledge([])
    await old.open()
    with pytest.raises(SessionTakenError):
        await new.acknowledge([])


async def test_tasks_of_one_client_that_notice_a_loss_together_do_not_replace_each_other(transport: Transport) -> None:
    session = StreamSession(transport, "same", SERVICE, 3600.0)
    await session.open()

    async def keep_alive() -> None:
        for _ in range(20):
            await session.keep()

    await lose_everything(transport)
    await asyncio.gather(*(keep_alive() for _ in range(8)))


async def lose_everything(transport: Transport) -> None:
    """Delete what Redis holds of the run; other tests use the same server."""
    async for key in transport.commands.scan_iter(f"{transport.names.prefix}*", count=1000):
        await transport.commands.unlink(key)
