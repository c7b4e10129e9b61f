"""What Redis holds of the groups of a session, and how many of them one call acknowledges."""

from __future__ import annotations

from plaudit_wire.messages import Service
from plaudit_wire.records import Sample
from plaudit_workers.stream.calls import Submission
from plaudit_workers.stream.groups import read_group
from plaudit_workers.stream.sessions import StreamSession, encoded_group
from plaudit_workers.stream.transport import Transport

BYTES = 100_000


async def opened(
    transport: Transport, name: str, *, group_scorers: bool = False, kept_share: float = 0.0
) -> StreamSession:
    service = Service("j", ["s"], group_scorers, 0.0, 2000, kept_share=kept_share)
    session = StreamSession(transport, name, service, 3600.0)
    await session.open()
    return session


async def test_redis_holds_a_submitted_sample_once_unless_its_group_is_read_later(transport: Transport) -> None:
    for name, how, times in (
        ("plain", {}, 1),
        ("scored-in-groups", {"group_scorers": True}, 2),
        ("kept", {"kept_share": 1.0}, 2),
    ):
        session = await opened(transport, name, **how)
        group, before = session.group_id("a"), await num_bytes(transport)
        sample = Sample(group, 0, "d", "p", "x" * BYTES)
        assert await session.submit_many([encoded_group(group, [sample])]) == [Submission.submitted]
        assert times - 0.1 < (await num_bytes(transport) - before) / BYTES < times + 0.4
        if times > 1:
            read = await read_group(transport, group)
            assert read is not None
            assert [each.body.sample for each in read.samples if each.body] == [sample]


async def test_one_call_acknowledges_all_results_of_a_session(transport: Transport) -> None:
    session = await opened(transport, "many")
    groups = [session.group_id(str(number)) for number in range(1001)]
    await session.submit_many([encoded_group(group, [Sample(group, 0, "d", "p", "r")]) for group in groups])
    while await transport.commands.zcard(transport.names.open):
        await session.clean_up()  # their deadline has passed
    results = []
    while len(results) < len(groups):
        results += [(result.group, result.entry) for result in await session.read(512, 0.0)]
    await session.acknowledge([*results, results[0], ("s:many:unknown", "0-1")])
    assert await session.groups() == set()
    assert await transport.commands.xlen(transport.names.session("many", "results")) == 0
    assert await transport.commands.hget(transport.names.counters, "returned") == b"1001"
    again = [encoded_group(group, [Sample(group, 0, "d", "p", "r")]) for group in groups[::500]]
    assert await session.submit_many(again) == [Submission.returned] * 3


async def num_bytes(transport: Transport) -> int:
    keys = [key async for key in transport.commands.scan_iter(f"{transport.names.prefix}*")]
    return sum([await transport.commands.memory_usage(key, samples=0) or 0 for key in keys])
