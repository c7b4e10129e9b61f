from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from builders import make_prompt
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import Admission, StreamLimits
from plaudit_workers.stream.trainer import StaleIncarnationError, TrainerStreams
from plaudit_workers.stream.transport import Transport


async def test_training_and_validation_groups_have_bounds_of_their_own(run: Any) -> None:
    trainer = (await run.start(max_open_groups=1, max_open_validation_groups=1)).trainer
    assert await trainer.admit(make_prompt("t-0-2.0")) is Admission.admitted
    assert await trainer.admit(make_prompt("t-1-2.0")) is Admission.full
    assert await trainer.admit(make_prompt("v-0-2.0", split="validation")) is Admission.admitted
    assert await trainer.admit(make_prompt("v-1-2.0", split="validation")) is Admission.full
    await trainer.close("t-0-2.0", "dropped", "run_ended")
    assert await trainer.admit(make_prompt("t-1-2.0")) is Admission.admitted


async def test_a_group_id_is_used_once(run: Any) -> None:
    prompt = make_prompt()
    assert await run.trainer.admit(prompt) is Admission.admitted
    assert await run.trainer.admit(prompt) is Admission.duplicate
    await run.trainer.close(prompt.group, "dropped", "run_ended")
    assert await run.trainer.admit(prompt) is Admission.duplicate
    assert (await run.trainer.counters())["admitted"] == 1


async def test_nothing_is_admitted_above_the_share_of_memory(tmp_path: Path, run_name: str) -> None:
    with RedisServer(tmp_path, max_memory_bytes=16 << 20) as server:
        transport = await Transport.open(RedisAddress(server.url, server.password), run_name)
        trainer = TrainerStreams(transport, StreamLimits(max_open_groups=10))
        await trainer.take_over()
        assert await trainer.admit(make_prompt("t-0-1.0")) is Admission.admitted
        await transport.commands.setrange("filler", 12 << 20, b"x")
        await asyncio.sleep(0.02)  # the share of memory is at most 10 ms old
        assert await trainer.admit(make_prompt("t-1-1.0")) is Admission.memory
        await transport.commands.delete("filler")
        await asyncio.sleep(0.02)
        assert await trainer.admit(make_prompt("t-1-1.0")) is Admission.admitted
        await transport.close()


async def test_a_trainer_that_was_replaced_is_refused_everywhere(run: Any, transport: Transport) -> None:
    group = await run.scored()
    old, limits = run.trainer, StreamLimits(max_open_groups=4)
    new = TrainerStreams(transport, limits)
    assert await new.take_over() == 2
    announcement = Announcement(PolicyVersion(1, 1), "weights/1.1", "")
    for attempt in (
        old.admit(make_prompt("t-9-1.0")),
        old.take_ready(8, 0.0),
        old.close(group, "dropped", "run_ended"),
        old.announce(announcement),
        old.restore({"admitted": 9}, 3),
    ):
        with pytest.raises(StaleIncarnationError, match="incarnation 1"):
            await attempt
    assert await transport.announced() is None
    assert [taken.id for taken in await new.take_ready(8, 0.0)] == [group]
    assert (await new.counters())["admitted"] == 1


async def test_an_incarnation_is_higher_than_any_that_a_checkpoint_knows(run: Any, transport: Transport) -> None:
    await transport.commands.delete(transport.names.state)
    assert await TrainerStreams(transport, StreamLimits(max_open_groups=1)).take_over(floor=7) == 8


async def test_the_trainer_writes_its_incarnation_again_where_redis_lost_it(run: Any, transport: Transport) -> None:
    new = TrainerStreams(transport, StreamLimits(max_open_groups=1))
    await new.take_over()
    await transport.commands.delete(transport.names.state)
    await new.restore({"admitted": 3, "dropped:lost": 1}, 5)
    with pytest.raises(StaleIncarnationError):
        await run.trainer.restore({}, 0)
    assert await new.counters() == {"admitted": 3, "dropped:lost": 1, "duplicates": 0}


async def test_restoring_a_ledger_leaves_no_old_counter_of_it(run: Any, transport: Transport) -> None:
    group = await run.scored()
    await run.trainer.close(group, "dropped", "run_ended")
    await transport.recreate_groups()
    await run.trainer.restore({"admitted": 2, "trained": 2}, 4)
    counters = await run.trainer.counters()
    of_ledger = {name: n for name, n in counters.items() if n and not name.startswith("events:")}
    assert of_ledger == {"admitted": 2, "trained": 2}
    assert await transport.commands.hget(transport.names.state, "step") == b"4"
