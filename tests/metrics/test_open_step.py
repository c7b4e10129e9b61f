"""What the open step waits for, as the API, ``plaudit top`` and the page say it while it lasts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from rich.console import Console

from metrics_process import MetricsProcess
from plaudit_metrics.service.answers import Ages, open_step, verdict_detail
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.sources.snapshot import RunSnapshot, StreamDepth, take_snapshot
from plaudit_metrics.terminal.overview import MetricsService
from plaudit_metrics.terminal.top import frame
from plaudit_wire.names import CONSUMER_GROUPS, Names, Stream
from plaudit_wire.records import VALIDATES, GroupRecord, SandboxWork, ScorerWork, StepRecord, WorkerRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.transport import Transport
from stepped_clock import SteppedClock
from waiting import until

CLOSED = [StepRecord(step=124, incarnation=1, opened=970.0, closed=1000.0, num_samples=64, num_groups=8, statistics={})]
TRAINER = WorkerRecord("trainer-0", "trainer", started=900.0)
REWARD = WorkerRecord("reward-0", "reward", 64, 64, scorers={"quick": ScorerWork(0, 0.0), "slow": ScorerWork(64, 47.0)})
SCORING = {"samples": StreamDepth(in_flight=64, oldest_in_flight_s=47.0)}
PROMPTS = {"prompts": StreamDepth(in_flight=8, oldest_in_flight_s=31.0)}
UNREAD = {"samples": StreamDepth(undelivered=12, oldest_undelivered_s=30.0)}


def seen(*workers: WorkerRecord, streams: dict[str, StreamDepth] | None = None, **more: Any) -> RunSnapshot:
    states = {("reward", "busy"): sum(worker.role == "reward" for worker in workers), ("rollout", "busy"): 1}
    states |= more.pop("states", {})
    return RunSnapshot(time=1045.0, worker_records=workers, workers=states, streams=streams or {}, **more)


SILENT = ((WorkerRecord("reward-1", "reward", 16, 16), 11.0),)
THROTTLED = WorkerRecord("reward-0", "reward", 64, 64, scorers={"judge": ScorerWork(64, 0.0)})
LIMITED = WorkerRecord("reward-0", "reward", 64, 64, scorers={"judge": ScorerWork(64, 6.0, waiting=62)})
UPDATING = WorkerRecord("trainer-0", "trainer", started=900.0, doing="updates the policy")
FROZEN = ((WorkerRecord("trainer-0", "trainer", doing="updates the policy"), 9.0),)
STARTING = [WorkerRecord(f"rollout-{n}", "rollout", 64, 64, ready=False) for n in range(3)]
LOST = ((WorkerRecord("trainer-0", "trainer"), 9.0),)
IDLE = WorkerRecord("reward-0", "reward", 64, 64, scorers={"quick": ScorerWork(0, 0.0)})
NO_REWARD = {("reward", "busy"): 0}
NO_ROLLOUT = {("rollout", "busy"): 0}
GROUPS = {"groups": StreamDepth(undelivered=3, oldest_undelivered_s=9.0)}
QUICK = WorkerRecord("r", "reward", scorers={"quick": ScorerWork(2, 0.02), "judge": ScorerWork(62, 0.0, waiting=62)})
BROKEN = msgspec.structs.replace(QUICK, circuits_open=["judge"])
LOADING = [WorkerRecord(f"rollout-{n}", "rollout", 64, 64, loading="1.4" if n == 0 else "") for n in range(8)]
IDLE_LOADS = WorkerRecord("rollout-1", "rollout", 64, 0, loading="1.4")
ADMITTED = {"prompts": StreamDepth(undelivered=8, oldest_undelivered_s=3.0)}
FAR = WorkerRecord("reward-0", "reward", 64, 64, reply_s=0.95)


def rollout(**about: Any) -> WorkerRecord:
    return WorkerRecord("rollout-0", "rollout", 64, 64, version="1.3", **about)


def machines(waiting: int, starting: int) -> WorkerRecord:
    """A rollout of which 50 samples are in their agents."""
    work = SandboxWork(8, starting, waiting, 40.0 if waiting else 0.0)
    return rollout(in_agents=50, sandboxes=work)


FAILING = WorkerRecord("trainer-0", "trainer", started=900.0, problem="step 125 not trained: 80% have no score")


@pytest.mark.parametrize(
    ("snapshot", "waits_for", "text"),
    [
        (seen(TRAINER, REWARD, streams=SCORING), "scorer", "64 calls of slow in flight, the oldest 47 s"),
        (seen(TRAINER, THROTTLED, streams=SCORING), "limiter", "64 calls of judge waiting for limits"),
        (seen(TRAINER, LIMITED, streams=SCORING), "limiter", "62 of 64 calls of judge wait for a limit of the scorer"),
        (
            seen(TRAINER, REWARD, silent=SILENT),
            "silent-reward",
            "reward-1 with 16 entries in work has sent no heartbeat",
        ),
        (
            seen(TRAINER, streams=UNREAD),
            "reward-queue",
            "12 finished samples wait for a reward worker, and none is ready",
        ),
        (seen(TRAINER, streams=PROMPTS), "generation", "8 prompts are with rollouts, the oldest for 31 s"),
        (seen(FAILING, streams=PROMPTS), "unscored", "step 125 not trained: 80% have no score"),
        (seen(TRAINER), "trainer", "the trainer is at work"),
        (seen(UPDATING, streams=PROMPTS), "trainer", "the trainer updates the policy"),
        (seen(TRAINER, rollout(in_agents=40), streams=PROMPTS), "tools", "40 samples of 64 wait for tools"),
        (
            seen(TRAINER, machines(12, 30), streams=PROMPTS),
            "sandboxes",
            "12 samples wait for a machine, the oldest 40",
        ),
        (seen(TRAINER, machines(0, 30), streams=PROMPTS), "sandboxes", "30 machines start"),
        (seen(TRAINER, machines(2, 3), streams=PROMPTS), "tools", "50 samples of 64 wait for tools"),
        (seen(TRAINER, rollout(in_agents=2), streams=PROMPTS), "generation", "8 prompts are with rollouts"),
        (seen(TRAINER, rollout(loading="1.4"), streams=PROMPTS), "weights", "1 rollout of 1 loads new weights"),
        (seen(TRAINER, REWARD, streams=SCORING | PROMPTS), "generation", "8 prompts are with rollouts"),
        (seen(TRAINER, silent=FROZEN), "silent-trainer", "trainer-0, which updates the policy, has sent no"),
        (seen(TRAINER, FAR, streams=PROMPTS), "redis-slow", "Redis takes 0.95 s for a reply to reward-0"),
        (seen(TRAINER, reply_s=0.95, streams=PROMPTS), "redis-slow", "Redis takes 0.95 s for a reply, and"),
        (seen(TRAINER, reply_s=0.3, streams=PROMPTS), "generation", "8 prompts are with rollouts"),
        (seen(TRAINER, states=NO_ROLLOUT, streams=PROMPTS), "generation", "8 prompts are with rollouts, of which none"),
        (seen(TRAINER, states=NO_REWARD, streams=SCORING), "scorer", "64 finished samples are with reward workers, of"),
        (
            seen(TRAINER, IDLE, streams=SCORING),
            "scorer",
            "64 finished samples are with reward workers, the oldest for 47",
        ),
        (
            seen(TRAINER, IDLE, streams=GROUPS),
            "reward-queue",
            "3 groups wait for a free reward worker, the oldest for 9",
        ),
        (seen(IDLE), "silent-trainer", "no trainer is ready"),
        (seen(TRAINER, *STARTING), "trainer", "the trainer is at work"),  # and others of their role live
        (seen(TRAINER, *STARTING, states=NO_ROLLOUT), "starting", "not ready yet: rollout-0, rollout-1 and 1 more"),
        (seen(silent=LOST), "silent-trainer", "trainer-0, for which scored groups wait, has sent no heartbeat for 9"),
        (seen(TRAINER, QUICK, streams=SCORING), "limiter", "62 of 62 calls of judge wait for a limit"),
        (seen(TRAINER, BROKEN, streams=SCORING), "endpoint", "62 calls of judge wait until its endpoint, which failed"),
        (seen(TRAINER, *LOADING, streams=PROMPTS), "generation", "8 prompts are with rollouts"),
        (seen(TRAINER, IDLE_LOADS, rollout(in_agents=40), streams=PROMPTS), "tools", "40 samples of 64 wait for tools"),
        (seen(TRAINER, IDLE_LOADS, streams=ADMITTED), "weights", "1 rollout of 1 loads new weights"),
    ],
)
def test_the_open_step_says_what_it_waits_for(snapshot: RunSnapshot, waits_for: str, text: str) -> None:
    said = open_step(snapshot, CLOSED, 1000.0)
    assert said["waits_for"] == waits_for
    assert said["text"].startswith(f"step 125, open for 45 s: {text}")


@pytest.mark.parametrize(("version", "step"), [("1.124", 125), ("2.120", 121), ("2.125", 125), ("", 125)])
def test_a_trainer_that_took_over_goes_on_from_its_checkpoint(version: str, step: int) -> None:
    trainer = msgspec.structs.replace(TRAINER, version=version)
    assert open_step(seen(trainer), CLOSED, 1010.0)["step"] == step


@pytest.mark.parametrize(
    ("staleness", "admitted_s", "waits_for"),
    [(1, 31.0, "scorer"), (1, 60.0, "generation"), (2, 60.0, "scorer"), (2, 76.0, "generation")],
)
def test_prompts_of_later_steps_are_not_awaited(staleness: int, admitted_s: float, waits_for: str) -> None:
    """With ``maxStaleness`` those of the open step were admitted before it opened, 45 s ago.

    With 2 a whole step of 30 s before that.
    """
    prompts = {"prompts": StreamDepth(in_flight=8, oldest_in_flight_s=admitted_s)}
    snapshot = seen(TRAINER, REWARD, streams=SCORING | prompts)
    assert open_step(snapshot, CLOSED, 1000.0, max_staleness=staleness)["waits_for"] == waits_for
    validating = seen(msgspec.structs.replace(TRAINER, doing=VALIDATES), REWARD, streams=SCORING | prompts)
    assert open_step(validating, CLOSED, 1000.0, max_staleness=staleness)["waits_for"] == "generation"
    between = open_step(seen(msgspec.structs.replace(TRAINER, doing=VALIDATES)), CLOSED, 1000.0)
    assert between["text"] == "step 125, open for 45 s: the trainer validates; nothing is in work"


def test_nothing_is_said_of_what_silent_processes_did() -> None:
    """Their calls were 47 s old in heartbeats that are 11 s old, and less than 20 s: they still count as live."""
    frozen = open_step(seen(TRAINER, REWARD, silent=((REWARD, 11.0),), streams=SCORING), CLOSED, 1000.0)
    assert frozen["text"].endswith("lost; 64 finished samples are with reward workers, the oldest for 47 s")
    said = open_step(seen(TRAINER, REWARD, silent=SILENT * 2, all_silent_s=11.0, streams=SCORING), CLOSED, 1000.0)
    lost = "no process of the run has sent a heartbeat for 11 s: they are lost, or cut off from Redis"
    assert (said["waits_for"], said["text"]) == ("silent", f"step 125, open for 45 s: {lost}")


@pytest.mark.parametrize("after_s", [0.5, 20.0])
def test_heartbeats_are_not_missed_while_redis_did_not_respond(after_s: float) -> None:
    """The outage of 15 s ended just now, or before the silence began."""
    silent = ((REWARD, 16.0),)
    snapshot = seen(TRAINER, REWARD, silent=silent, streams=SCORING)
    assert snapshot.without_outage(15.0, after_s).silent == (() if after_s < 16.0 else silent)


@pytest.mark.parametrize(("open_for_s", "waits_for"), [(0.4, "scorer"), (4.0, "redis-slow"), (45.0, "scorer")])
def test_slow_replies_hold_no_step_that_is_much_longer_or_shorter(open_for_s: float, waits_for: str) -> None:
    """Ten replies of 0.5 s do not explain that a step of usually 0.7 s is open for 45 s; nor do they fit into one."""
    short = [msgspec.structs.replace(CLOSED[0], opened=999.3)]
    snapshot = seen(TRAINER, REWARD, streams=SCORING, reply_s=0.5)
    for closed in (short, []):
        assert open_step(snapshot, closed, 1045.0 - open_for_s)["waits_for"] == waits_for


@pytest.mark.parametrize(
    ("trainers", "said"),
    [((TRAINER,), "for the trainer, the oldest for 21 s"), ((), "for a trainer, and none is ready, the oldest")],
)
def test_scored_groups_that_nobody_takes_wait_for_the_trainer(trainers: tuple[WorkerRecord, ...], said: str) -> None:
    ready = {"ready": StreamDepth(undelivered=4, oldest_undelivered_s=21.0)}
    found = open_step(seen(*trainers, streams=ready), CLOSED, 1000.0)
    assert found["waits_for"] == "trainer"
    assert f"4 scored groups wait {said}" in found["text"]


@pytest.mark.parametrize(("role", "stream"), [("rollout", "prompts"), ("reward", "samples"), ("reward", "groups")])
async def test_a_lost_process_is_awaited_until_others_have_taken_over_what_it_held(
    role: Literal["rollout", "reward"], stream: Stream, redis_server: RedisServer, run_name: str
) -> None:
    """Its last heartbeat says little: it held other work then, and is remembered for two minutes."""
    transport = await Transport.open(RedisAddress(redis_server.url, redis_server.password), run_name)
    keys, redis = Names(run_name), transport.commands
    await transport.beat(WorkerRecord("lost", role, 64, 64))
    await redis.zincrby(keys.workers, -30.0, "lost")
    assert (await take_snapshot(redis, keys)).silent == ()
    key, group = keys.stream(stream), CONSUMER_GROUPS[stream]
    for _ in range(3):
        await redis.xadd(key, {"id": "x"})
    await redis.xreadgroup(group, "lost", {key: ">"}, count=2)
    await redis.zincrby(keys.workers, -270.0, "lost")  # minutes later nobody else has taken it over
    ((worker, silent_s),) = (await take_snapshot(redis, keys)).silent
    assert worker.busy == 2
    assert silent_s == pytest.approx(300.0, abs=10.0)
    await redis.xautoclaim(key, group, "another", 0)
    assert (await take_snapshot(redis, keys)).silent == ()
    await transport.close()


def test_a_validation_group_that_ends_opens_no_step_and_step_0_has_no_verdict() -> None:
    series, group = RunSeries(), GroupRecord("v-1", "validation", 0, "evaluated", 2, 2, 1000.0, closed=1040.0)
    series.count_step(CLOSED[0], records_missing=0)
    series.show_group(group)
    assert series.opened == 1000.0
    first = msgspec.structs.replace(CLOSED[0], step=0, verdict="trainer")
    assert verdict_detail([first])["step"] is None


def test_a_service_has_no_step() -> None:
    said = open_step(seen(REWARD, streams=SCORING), [], None)
    assert (said["step"], said["text"]) == (None, "64 calls of slow in flight, the oldest 47 s")


def test_redis_that_is_away_explains_everything_else() -> None:
    said = open_step(seen(TRAINER, REWARD, streams=SCORING), CLOSED, 1000.0, Ages(12.0, 12.0))
    assert (
        said["text"] == "step 125, open for 57 s: Redis has not responded for 12 s, and every process of the run waits"
    )


@pytest.mark.long
async def test_a_paused_redis_is_named_and_no_worker_looks_alive(run_name: str, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    service = MetricsProcess(server, run_name, tmp_path / "run", {})
    await service.start()
    try:
        await until(lambda: service.get("queues"), within_s=30)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)

        async def named() -> bool:
            return bool((await service.get("queues"))["open"]["waits_for"] == "redis")

        await until(named, within_s=30, every_s=0.2)
        queues = await service.get("queues")
        assert queues["workers"] == []
        console = Console(width=100, record=True)
        overview = MetricsService(service.url).read()
        console.print(frame(overview))
        assert "now: Redis has not responded" in console.export_text()
    finally:
        os.kill(server.pid or 0, signal.SIGCONT)
        await service.kill()
        server.stop()


@pytest.mark.skipif(not SteppedClock.available(), reason="needs a C compiler")
async def test_the_step_is_as_old_as_before_when_the_clock_of_redis_is_set(run_name: str, tmp_path: Path) -> None:
    """Stamps of the trainer follow Redis's clock from its next step on, and a clock set back they follow slowly.

    A trainer that is new after that is known as such, and so is its silence.
    """
    clock, series = SteppedClock(tmp_path), RunSeries()
    with clock.preloaded(), RedisServer(tmp_path / "redis") as server:
        transport = await Transport.open(RedisAddress(server.url, server.password), run_name)
        started = await transport.now()
        await transport.beat(WorkerRecord("trainer-0", "trainer", started=started - 30.0))
        for set_to_s in (0.0, 1200.0, -1200.0):
            clock.step(set_to_s)
            snapshot = await take_snapshot(transport.commands, Names(run_name))
            series.show_snapshot(snapshot)
            assert snapshot.time - (series.opened or 0.0) == pytest.approx(30.0, abs=10.0)
            assert bool(snapshot.workers) == (set_to_s == 0.0)  # who lives sends another heartbeat
        resumed = WorkerRecord("trainer-1", "trainer", started=await transport.now(), doing="updates the policy")
        await transport.beat(resumed)  # by this clock it began before the one that it follows
        series.show_snapshot(await take_snapshot(transport.commands, Names(run_name)))
        assert series.registry.get_sample_value("plaudit_trainer_started_timestamp_seconds") == resumed.started
        assert series.opened == resumed.started
        await transport.commands.zincrby(Names(run_name).workers, -10.0, "trainer-1")
        ((silent, _),) = (await take_snapshot(transport.commands, Names(run_name))).silent
        assert silent.worker == "trainer-1"
        closed = StepRecord(1, 1, started, started, 64, 8, {})  # a stamp of the clock before, 20 minutes ahead
        series.count_step(closed, records_missing=0)
        snapshot = await take_snapshot(transport.commands, Names(run_name))
        series.show_snapshot(snapshot)
        assert 0.0 <= snapshot.time - (series.opened or 0.0) < 10.0
        await transport.close()
