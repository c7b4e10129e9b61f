"""The figures of whole runs: the verdict names the part that was slowed, and events tell what the trainer knows."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import chain, pairwise
from threading import Timer
from typing import Any

import msgspec
import pytest

from plaudit_metrics.sources.steps import Collector, KeptSteps
from plaudit_metrics.sources.stream import decode_event
from plaudit_metrics.statistics.verdict import verdict_over
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_wire.names import Names
from plaudit_wire.records import GroupRecord, SampleRecord, StepRecord
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.training.scripted import ScriptedBackend
from simulated_run import make_plan

STEPS = 4
PAUSE_S = 6.0


@pytest.mark.alike
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("generate_s", "score_s", "update_s", "truth"),
    [(0.8, 0.02, 0.02, "generation"), (0.02, 0.8, 0.02, "reward"), (0.02, 0.02, 1.0, "trainer")],
    ids=["slowed engine", "slowed scorer", "slowed update"],
)
async def test_the_verdict_names_the_part_that_was_slowed(
    simulation: Any, generate_s: float, score_s: float, update_s: float, truth: str, staleness: int
) -> None:
    for number, slower in enumerate((1, 8)):  # on a busy machine everything else can take longer than the slowed part
        simulation.latency_s, simulation.slow_s = slower * generate_s, slower * score_s
        simulation.update_s = lambda groups, seconds=slower * update_s: seconds
        async with simulation.workers():
            done, _ = await simulation.train(make_plan(steps=(number + 1) * STEPS, staleness=staleness))
        assert done
        steps = simulation.steps()[number * STEPS + 1 :]  # the first one waits for the processes to come up
        found = verdict_over(step.statistics for step in steps)
        if found == truth:
            break
    assert found == truth
    for step in steps:
        parts = sum(seconds for key, seconds in step.statistics.items() if key.startswith("wait/"))
        assert parts == pytest.approx(step.statistics["trainer_wait_s"], abs=1e-6)
        # Redis's clock is estimated to half a round trip, which is long on a busy machine.
        assert step.statistics["trainer_wait_s"] <= step.statistics["step_s"] + 0.2
        assert step.statistics["exposed_reward_s"] <= step.statistics["trainer_wait_s"] + 1e-6


@pytest.mark.parametrize(("order", "staleness", "mini_batches"), [("step", 0, 1), ("step", 1, 2), ("ready", 2, 1)])
async def test_from_events_alone_come_the_figures_that_the_trainer_computed_from_its_own_records(
    simulation: Any, order: str, staleness: int, mini_batches: int
) -> None:
    plan = make_plan(steps=4, order=order, staleness=staleness, mini_batches=mini_batches, validate_every=2)
    async with simulation.workers(rollouts=2, reward_workers=2):
        done, _ = await simulation.train(plan)
    assert done
    kept = KeptSteps()
    await feed(simulation, Collector(kept))
    for step in simulation.steps():
        seen = kept.get(step.step)
        assert seen is not None
        assert seen.records_missing == 0
        assert seen.record.statistics
        theirs = {key: step.statistics[key] for key in seen.record.statistics if key != "update_s"}
        assert {key: seen.record.statistics[key] for key in theirs} == pytest.approx(theirs, abs=1e-5)


async def feed(simulation: Any, collector: Collector) -> None:
    """Gives the collector a run's events, the trainer's own figures taken out."""
    transport = await simulation.open()
    entries = await transport.commands.xrange(Names(simulation.name).events)
    await transport.close()
    for record in chain.from_iterable(decode_event(fields) for _, fields in entries):
        match record:
            case SampleRecord() as sample:
                collector.add_sample(sample)
            case GroupRecord() as group:
                collector.add_group(group)
            case StepRecord() as step:
                collector.add_step(msgspec.structs.replace(step, statistics={}))


class Pausing(ScriptedBackend):
    """Stops Redis before the fourth version is announced, for a while."""

    redis_pid = 0

    def publish(self, version: PolicyVersion) -> Announcement:
        if version.number == 4 and self.redis_pid:
            os.kill(self.redis_pid, signal.SIGSTOP)
            Timer(PAUSE_S, os.kill, (self.redis_pid, signal.SIGCONT)).start()
        return super().publish(version)


@pytest.mark.long
@pytest.mark.parametrize("during", ["waits", "publication"])
async def test_a_pause_of_redis_is_named_in_the_steps_record_and_no_interval_is_negative(
    simulation: Any, redis_server: RedisServer, during: str
) -> None:
    assert redis_server.pid is not None
    simulation.policy_class, Pausing.redis_pid = Pausing, redis_server.pid if during == "publication" else 0
    simulation.update_s = lambda groups: 0.02
    stop = asyncio.Event()
    async with simulation.workers():
        trainer = asyncio.create_task(simulation.train(make_plan(steps=100_000), stop))
        await simulation.until_steps(3)
        if during == "waits":
            os.kill(redis_server.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(PAUSE_S)  # the fault itself
            finally:
                os.kill(redis_server.pid, signal.SIGCONT)
        await simulation.until_steps(len(simulation.steps()) + 4)
        stop.set()
        await trainer
    steps = simulation.steps()
    assert [step.verdict for step in steps].count("redis") == 1
    assert sum(step.statistics.get("wait/redis_s", 0.0) for step in steps) == pytest.approx(PAUSE_S, abs=3.0)
    for earlier, later in pairwise(steps):
        assert earlier.opened <= earlier.closed <= later.opened
    assert all(wait.start <= wait.end for step in steps for wait in step.waits)
    whole_s = steps[-1].closed - steps[0].opened
    assert sum(step.statistics["step_s"] for step in steps) <= whole_s
