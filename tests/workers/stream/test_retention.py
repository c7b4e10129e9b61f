"""The keys of a finished run in an external Redis expire; those of a run that is started again do not."""

from __future__ import annotations

from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import TrainerStreams, expire_run, keep_run
from plaudit_workers.stream.transport import Transport


async def test_all_keys_of_a_finished_run_expire_and_stay_when_it_is_started_again(
    transport: Transport, address: RedisAddress, run_name: str
) -> None:
    other = await Transport.open(address, f"{run_name}-other")
    for each in (transport, other):
        await TrainerStreams(each, StreamLimits(max_open_groups=4)).take_over()
    await keep_run(transport)
    await expire_run(transport, 1000)
    ages = await times_to_live(transport)
    assert len(ages) > 2
    assert all(990 < age <= 1000 for age in ages.values())
    assert set((await times_to_live(other)).values()) == {-1}
    await keep_run(transport)
    assert set((await times_to_live(transport)).values()) == {-1}
    async for key in other.commands.scan_iter(f"{other.names.prefix}*"):
        await other.commands.unlink(key)
    await other.close()


async def test_a_redis_user_that_may_not_expire_keys_does_not_fail_the_run(
    redis_server: RedisServer, transport: Transport, run_name: str
) -> None:
    await transport.commands.hset(transport.names.counters, "trained", "1")
    rules = ["on", ">pass", f"~plaudit:{{{run_name}}}:*", "+@all", "-expire"]
    await transport.commands.execute_command("ACL", "SETUSER", "strict", *rules)
    strict = await Transport.open(RedisAddress(redis_server.url, "pass", username="strict"), run_name)
    await expire_run(strict, 1000)
    assert set((await times_to_live(transport)).values()) == {-1}
    await strict.close()
    await transport.commands.execute_command("ACL", "DELUSER", "strict")


async def times_to_live(transport: Transport) -> dict[bytes, int]:
    """Return the seconds that each key of the run has left; -1: for ever."""
    keys = [key async for key in transport.commands.scan_iter(f"{transport.names.prefix}*")]
    return {key: await transport.commands.ttl(key) for key in keys}
