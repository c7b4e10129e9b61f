"""Redis itself goes away: killed, restarted, full, refused."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from builders import make_body, make_prompt, scored
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Announcement, PolicyVersion, Prompt
from plaudit_wire.redis import OUTAGE, RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import Admission, Commitment, Publication, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import SpillFolder, VolumeError


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", persistence="always") as server:
        yield server


async def opened(server: RedisServer, run: str, **more: Any) -> Transport:
    return await Transport.open(RedisAddress(server.url, server.password), run, **more)


async def led(server: RedisServer, run: str, **more: Any) -> tuple[Transport, TrainerStreams]:
    """A connection, and a trainer on it that has taken over."""
    transport = await opened(server, run, **more)
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    return transport, trainer


async def test_redis_is_killed_and_the_run_goes_on_where_it_was(own_redis: RedisServer, run_name: str) -> None:
    transport, trainer = await led(own_redis, run_name)
    options = ConsumerOptions(block_s=0.05, reclaim_every_s=0.0)
    prompts: Consumer[Any] = Consumer(transport, "prompts", "rollout-0", options)
    samples: Consumer[Any] = Consumer(transport, "samples", "reward-0", options)
    await trainer.admit(make_prompt(n=2))
    [prompt] = await prompts.take(1)
    await publish(transport, prompt, 0, make_body(prompt.payload, 0))
    [held] = await samples.take(1)

    own_redis.kill()
    assert await samples.take(1) == []
    publishing = asyncio.create_task(publish(transport, prompt, 1, make_body(prompt.payload, 1)))
    await asyncio.sleep(0.1)
    assert not publishing.done()
    own_redis.start()
    assert await asyncio.wait_for(publishing, 10) is Publication.published
    assert await commit(transport, held, scored(1.0)) is Commitment.committed
    samples.finished(held)
    [second] = await _first(samples)
    assert second.deliveries == 1
    assert await commit(transport, second, scored(1.0)) is Commitment.committed
    [group] = await trainer.take_ready(1, 8.0)
    assert await trainer.close(group.id, "trained")
    await transport.close()


async def _first(consumer: Consumer[Any]) -> list[Any]:
    for _ in range(50):
        if deliveries := await consumer.take(1):
            return deliveries
    return []


async def test_after_an_outage_nothing_is_claimed_from_others_for_one_lease(
    own_redis: RedisServer, run_name: str
) -> None:
    """Every lease looks lapsed then; its owner renews it first."""
    transport, trainer = await led(own_redis, run_name)
    await trainer.admit(make_prompt())
    options = ConsumerOptions(lease_s=1.0, renew_every_s=0.0, block_s=0.05, reclaim_every_s=0.0)
    owner: Consumer[Prompt] = Consumer(transport, "prompts", "rollout-0", options)
    other: Consumer[Prompt] = Consumer(transport, "prompts", "rollout-1", options)
    assert len(await _first(owner)) == 1
    assert await other.take(1) == []
    own_redis.kill()
    assert await other.take(1) == []
    await asyncio.sleep(1.2)
    own_redis.start()
    assert await other.take(1) == []
    await owner.renew()
    assert await other.take(1) == []
    await transport.close()


async def test_groups_that_redis_lost_are_found_and_the_announcement_is_written_again(
    own_redis: RedisServer, run_name: str
) -> None:
    transport, trainer = await led(own_redis, run_name)
    announcement = Announcement(PolicyVersion(1, 3), "weights/1.3", "digest")
    await trainer.announce(announcement)
    await trainer.admit(make_prompt("t-0-1.0"))
    assert await trainer.missing(["t-0-1.0"]) == []
    await transport.commands.flushall()
    assert await trainer.missing(["t-0-1.0"]) == ["t-0-1.0"]
    assert await transport.announced() == announcement
    assert not await trainer.close("t-0-1.0", "dropped", "lost")
    await transport.close()


async def test_a_group_that_reappears_is_ended_as_it_was_and_never_handed_out(run: Any, transport: Transport) -> None:
    group_id = await run.scored()
    before = {key: await transport.commands.dump(key) async for key in transport.commands.scan_iter("*")}
    [group] = await run.trainer.take_ready(1, 0.0)
    await run.trainer.close(group.id, "trained")
    for key, dumped in before.items():
        await transport.commands.restore(key, 0, dumped, replace=True)
    assert group_id in await run.trainer.open_groups()
    assert await run.trainer.take_ready(1, 0.0) == []
    assert await run.trainer.open_groups() == []
    assert (await run.trainer.counters())["trained"] == 1


async def test_a_full_redis_delays_publication_and_accepts_commands_that_free_memory(
    tmp_path: Path, run_name: str
) -> None:
    with RedisServer(tmp_path, max_memory_bytes=12 << 20) as server:
        transport, trainer = await led(server, run_name)
        options = ConsumerOptions(block_s=0.05)
        prompts: Consumer[Any] = Consumer(transport, "prompts", "rollout-0", options)
        samples: Consumer[Any] = Consumer(transport, "samples", "reward-0", options)
        await trainer.admit(make_prompt("t-0-1.0", n=1))
        await trainer.admit(make_prompt("t-1-1.0", n=1))
        first, second = await prompts.take(2)
        await publish(transport, first, 0, make_body(first.payload, 0))
        await transport.commands.setrange("filler", 8 << 20, b"x")
        await transport.commands.config_set("maxmemory", 6 << 20)
        publishing = asyncio.create_task(publish(transport, second, 0, make_body(second.payload, 0)))
        [delivery] = await samples.take(1)
        assert await commit(transport, delivery, scored(1.0)) is Commitment.committed
        [group] = await trainer.take_ready(1, 8.0)
        assert await trainer.close(group.id, "trained")
        assert not publishing.done()
        await transport.commands.delete("filler")
        assert await asyncio.wait_for(publishing, 30) is Publication.published
        await transport.close()


async def test_large_bodies_lie_on_the_volume_until_the_group_is_closed(
    own_redis: RedisServer, run_name: str, tmp_path: Path
) -> None:
    spill = tmp_path / "bodies"
    transport, trainer = await led(own_redis, run_name, spill=spill)
    prompts: Consumer[Any] = Consumer(transport, "prompts", "rollout-0", ConsumerOptions(block_s=0.05))
    samples: Consumer[Any] = Consumer(transport, "samples", "reward-0", ConsumerOptions(block_s=0.05))
    await trainer.admit(make_prompt(n=3))
    [prompt] = await prompts.take(1)
    tokens = tuple(range(40_000))
    bodies = [make_body(prompt.payload, 0, tokens=tokens), make_body(prompt.payload, 1, text="x" * 300_000)]
    bodies.append(make_body(prompt.payload, 2, tokens=tokens))
    await asyncio.gather(*(publish(transport, prompt, index, body) for index, body in enumerate(bodies)))
    assert len(list(spill.rglob("tensors-0-*"))) == 1
    deliveries = await samples.take(8)
    for delivery in deliveries:
        assert delivery.payload == bodies[delivery.payload.index].sample
        await commit(transport, delivery, scored(1.0))
    next(spill.rglob("tensors-2-*")).write_bytes(b"torn")
    [group] = await trainer.take_ready(1, 8.0)
    assert [sample.body for sample in group.samples] == [*bodies[:2], None]
    assert group.samples[2].scoring.outcome == "infra_error"
    transport.volume = SpillFolder(spill, kept_s=0.0)
    await trainer.close(group.id, "trained")
    assert not any(path.is_file() for path in spill.rglob("*"))
    await transport.close()


async def test_a_large_group_that_reappears_after_its_end_is_closed_again(
    own_redis: RedisServer, run_name: str, tmp_path: Path
) -> None:
    transport, trainer = await led(own_redis, run_name, spill=tmp_path / "bodies")
    async with Consumer[Any](transport, "prompts", "rollout-0", ConsumerOptions(block_s=0.05)) as prompts:
        await trainer.admit(make_prompt(n=1, prompt="long " * 100_000))
        [prompt] = await prompts.take(1)
        await publish(transport, prompt, 0, make_body(prompt.payload, 0))
        async with Consumer[Any](transport, "samples", "reward-0", ConsumerOptions(block_s=0.05)) as samples:
            [sample] = await samples.take(1)
            await commit(transport, sample, scored(1.0))
        kept = {key: await transport.commands.dump(key) async for key in transport.commands.scan_iter("*")}
        [group] = await trainer.take_ready(1, 1.0)
        assert await trainer.close(group.id, "trained")
    for key, dumped in kept.items():
        await transport.commands.restore(key, 0, dumped, replace=True)
    assert await trainer.take_ready(1, 0.0) == []
    assert await trainer.open_groups() == []
    await transport.close()


async def test_a_group_whose_prompt_is_lost_for_good_counts_as_lost(
    own_redis: RedisServer, run_name: str, tmp_path: Path
) -> None:
    transport = await opened(own_redis, run_name)
    transport.volume = SpillFolder(tmp_path / "bodies", kept_s=0.0)
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    prompt = make_prompt(prompt="long " * 100_000)
    await trainer.admit(prompt)
    shutil.rmtree(tmp_path / "bodies" / prompt.group)
    with pytest.raises(VolumeError, match="cannot read"):
        await trainer.read(prompt.group)
    assert await trainer.read(prompt.group) is None
    assert await trainer.close(prompt.group, "dropped", "unknown")
    await transport.close()


async def test_work_that_a_bad_mount_does_not_show_goes_to_another_worker(
    own_redis: RedisServer, run_name: str, tmp_path: Path
) -> None:
    transport = await opened(own_redis, run_name, spill=tmp_path / "bodies")
    unmounted = await opened(own_redis, run_name, spill=tmp_path / "empty" / "bodies")
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    await trainer.admit(make_prompt(prompt="long " * 100_000))
    bad: Consumer[Any] = Consumer(unmounted, "prompts", "rollout-bad", ConsumerOptions(block_s=0.05))
    good: Consumer[Any] = Consumer(transport, "prompts", "rollout-good", ConsumerOptions(block_s=0.05))
    assert await bad.take(1) == []
    assert not bad.readable
    [delivery] = await good.reclaim(1, lease_s=60.0)
    assert (delivery.payload.prompt, delivery.deliveries) == ("long " * 100_000, 1)
    assert await bad.take(1) == []
    await transport.close()
    await unmounted.close()


async def test_a_volume_that_is_away_for_a_moment_buries_nothing(
    own_redis: RedisServer, run_name: str, tmp_path: Path
) -> None:
    spill = tmp_path / "bodies"
    transport, trainer = await led(own_redis, run_name, spill=spill)
    options = ConsumerOptions(block_s=0.05, reclaim_every_s=0.0, unreadable_pause_s=0.0)
    prompts: Consumer[Any] = Consumer(transport, "prompts", "rollout-0", options)
    await trainer.admit(make_prompt(prompt="long " * 100_000))
    spill.rename(tmp_path / "away")
    assert await prompts.take(1) == []
    assert await prompts.take(1) == []
    (tmp_path / "away").rename(spill)
    [delivery] = await prompts.take(1)
    assert delivery.payload.prompt == "long " * 100_000
    assert delivery.deliveries <= 1
    assert await transport.commands.xlen(transport.names.dead) == 0
    await transport.close()


async def test_an_outage_of_redis_is_logged_in_one_sentence(own_redis: RedisServer, run_name: str) -> None:
    with pytest.raises(RefusedError, match="refuses the password"):
        await Transport.open(RedisAddress(own_redis.url, "wrong"), run_name)
    with pytest.raises(RefusedError, match="refuses the password"):
        await Transport.open(RedisAddress(own_redis.url), run_name)
    transport = await opened(own_redis, run_name)
    await transport.commands.config_set("maxmemory-policy", "allkeys-lru")
    await transport.close()
    with pytest.raises(RefusedError, match="Set it to noeviction"):
        await opened(own_redis, run_name)
    own_redis.kill()
    with pytest.raises(RefusedError, match="cannot be reached"):
        await Transport.open(RedisAddress(own_redis.url, own_redis.password), run_name)


@pytest.mark.parametrize("refuse", [("replicaof", "127.0.0.1", "1"), ("config_set", "min-replicas-to-write", 1)])
async def test_leases_survive_a_time_in_which_redis_refuses_writes(
    own_redis: RedisServer, run_name: str, refuse: tuple[Any, ...]
) -> None:
    """READONLY and NOREPLICAS: the renewals fail, go on afterwards, and nothing is claimed from a living worker."""
    transport, trainer = await led(own_redis, run_name)
    await trainer.admit(make_prompt())
    leases = ConsumerOptions(lease_s=0.6, renew_every_s=0.1, block_s=0.02, reclaim_every_s=0.0)
    admin = own_redis_client(own_redis)
    async with (
        Consumer[Prompt](transport, "prompts", "rollout-0", leases) as owner,
        Consumer[Prompt](transport, "prompts", "rollout-1", leases) as other,
    ):
        [held] = await owner.take(1)
        await getattr(admin, refuse[0])(*refuse[1:])
        for _ in range(20):
            assert await other.take(1) == []
        await (admin.replicaof("NO", "ONE") if refuse[0] == "replicaof" else admin.config_set(refuse[1], 0))
        for _ in range(40):
            assert await other.take(1) == []
        assert not held.lost.is_set()
    assert (await trainer.counters()).get("redelivered:prompts", 0) == 0
    await admin.aclose()
    await transport.close()


def own_redis_client(server: RedisServer) -> Any:
    return RedisAddress(server.url, server.password).client(timeout_s=5.0, retries=0)


async def test_a_worker_that_was_full_during_an_outage_claims_nothing_from_the_living(
    own_redis: RedisServer, run_name: str
) -> None:
    """It does not read while it is full: only its renewals notice the outage."""
    transport, own = await opened(own_redis, run_name), await opened(own_redis, run_name)
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    await trainer.admit(make_prompt())
    never = ConsumerOptions(lease_s=0.5, renew_every_s=1e6, block_s=0.02, reclaim_every_s=0.0)
    owner: Consumer[Prompt] = Consumer(transport, "prompts", "rollout-0", never)
    often = ConsumerOptions(lease_s=0.5, renew_every_s=0.05, block_s=0.02, reclaim_every_s=0.0)
    async with Consumer[Prompt](own, "prompts", "rollout-1", often) as full:
        [held] = await owner.take(1)
        assert await full.take(1) == []
        own_redis.kill()
        await asyncio.sleep(0.6)
        own_redis.start()
        assert await full.take(1) == []
        await owner.renew()
        assert not held.lost.is_set()
    await own.close()
    await transport.close()


async def test_an_unexpected_failure_of_the_renewals_ends_the_consumer(own_redis: RedisServer, run_name: str) -> None:
    """A background task that dies is seen at once, not when the leases have lapsed."""
    transport, trainer = await led(own_redis, run_name)
    await trainer.admit(make_prompt())

    async def work() -> None:
        async with Consumer[Prompt](transport, "prompts", "rollout-0", ConsumerOptions(renew_every_s=0.02)) as consumer:
            assert len(await consumer.take(1)) == 1
            await transport.commands.execute_command("ACL", "SETUSER", "default", "-fcall")
            await asyncio.Event().wait()

    with pytest.raises(ResponseError, match="permissions"):
        await asyncio.wait_for(work(), 10)
    await transport.close()


async def test_a_process_opens_its_streams_on_a_full_redis(tmp_path: Path, run_name: str) -> None:
    with RedisServer(tmp_path, max_memory_bytes=12 << 20) as server:
        admin = own_redis_client(server)
        await admin.setrange("filler", 8 << 20, b"x")
        await admin.config_set("maxmemory", 4 << 20)
        transport = await opened(server, run_name)
        await (await opened(server, run_name)).close()
        assert await transport.commands.exists(transport.names.samples)
        await transport.close()
        await admin.aclose()


async def test_a_refusal_as_read_only_closes_the_connection(own_redis: RedisServer, run_name: str) -> None:
    """After a failover behind one address old connections stay with the replica; a new one reaches the new master."""
    transport, trainer = await led(own_redis, run_name)
    admin = own_redis_client(own_redis)
    before = {client["id"] for client in await admin.client_list()}
    await admin.replicaof("127.0.0.1", "1")
    admitting = asyncio.create_task(trainer.admit(make_prompt()))
    await asyncio.sleep(0.1)
    await admin.replicaof("NO", "ONE")
    assert await asyncio.wait_for(admitting, 10) is Admission.admitted
    last = [client["id"] for client in await admin.client_list() if client["cmd"] == "fcall"]
    assert last
    assert before.isdisjoint(last)
    await admin.aclose()
    await transport.close()


async def test_an_entry_that_is_gone_before_it_is_read_ends_no_trainer(own_redis: RedisServer, run_name: str) -> None:
    """Redis answers a blocked reader without entries if the transaction that added one also deleted it."""
    transport, trainer = await led(own_redis, run_name)
    admin = own_redis_client(own_redis)
    for ending in ("redis.call('XDEL', KEYS[1], id)", "redis.call('DEL', KEYS[1])"):
        taking = asyncio.create_task(trainer.take_ready(1, 5.0))
        while not any("xread" in client["cmd"] for client in await admin.client_list(_type="normal")):
            await asyncio.sleep(0.01)
        await admin.eval(
            f"local id = redis.call('XADD', KEYS[1], '*', 'group', 'g') {ending}", 1, transport.names.ready
        )
        assert await asyncio.wait_for(taking, 10) == []
    await admin.aclose()
    await transport.close()


class _FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock runs 300 times as fast."""

    def time(self) -> float:
        return super().time() * 300


def test_an_outage_of_many_minutes_ends_no_process(tmp_path: Path, run_name: str) -> None:
    server = RedisServer(tmp_path)

    async def start() -> Transport:
        opening = asyncio.create_task(opened(server, run_name, stop=asyncio.Event()))
        await asyncio.sleep(310)
        assert not opening.done()
        await asyncio.to_thread(server.start)
        transport = await opening
        server.kill()
        beating = asyncio.create_task(transport.recreate_groups())
        await asyncio.sleep(310)
        assert not beating.done()
        await asyncio.to_thread(server.start)
        await beating
        await transport.close()

    with asyncio.Runner(loop_factory=_FastLoop) as runner:
        try:
            runner.run(start())
        finally:
            server.stop()


async def test_a_tls_server_that_restarts_during_the_handshake_is_an_outage(run_name: str) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        address = RedisAddress(f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        opening = asyncio.create_task(Transport.open(address, run_name, stop=asyncio.Event()))
        await asyncio.sleep(0.2)
        assert not opening.done()
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)


async def test_a_server_that_never_answers_the_password_is_an_outage(run_name: str) -> None:
    """It accepts connections: a timeout of the connection alone would not end the wait."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()
            await reader.read()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        client = RedisAddress(url, "word").client(timeout_s=None, retries=0)
        client.connection_pool.connection_kwargs["socket_connect_timeout"] = 0.2
        with pytest.raises(OUTAGE):
            await client.ping()
        await client.aclose()
