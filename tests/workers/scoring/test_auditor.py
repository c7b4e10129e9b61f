"""Auditors score drawn groups of stored samples once, when there is room, through kills and resumes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from builders import make_body, make_prompt
from plaudit_job.spec.rewards import RewardSpec
from plaudit_metrics.sources.audits import audits_file, drift_file, is_audited, read_audits, read_drift, run_audits
from plaudit_metrics.sources.sample_schema import samples_file
from plaudit_metrics.statistics.audits import AuditedGroup, drift_figures
from plaudit_wire.records import LEASE_S, GroupRecord, ScorerRecord, ScoringRecord, Stamps
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.service.auditor import Auditor, open_auditor
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.service.worker import ScoringOptions, ScoringWorker
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.groups import Group, GroupSample
from plaudit_workers.stream.transport import Transport
from waiting import until

SOURCE = """
import time
def reward(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
def audit(data_source, solution_str, ground_truth, extra_info=None, seen=""):
    with open(seen, "a") as file:
        file.write(solution_str + "\\n")
    time.sleep(0.02)
    if solution_str.endswith("-1 bad"):
        raise ValueError("unreadable")
    return float(len(solution_str))
"""


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """The responses that auditors have been asked about, one a line."""
    path = tmp_path / "seen.txt"
    path.touch()
    return path


@pytest.fixture
def make_audit(make_reward: Callable[..., RewardSpec], seen: Path) -> Callable[..., RewardSpec]:
    def make(**audit: Any) -> RewardSpec:
        auditor = {"name": "honest", "function": "audit", "arguments": {"seen": str(seen)}, "timeoutSeconds": 60}
        auditor["audit"] = audit
        return make_reward([{"name": "paid", "function": "reward"}, auditor], SOURCE, workers={"processes": 2})

    return make


def stored(
    folder: Path,
    step: int,
    names: Sequence[str],
    incarnation: int = 1,
    begun_by: int = 0,
    bad: str = "",
    scorers: dict[str, ScorerRecord] | None = None,
) -> None:
    """Store a step of groups of two samples, as the trainer does."""
    groups, records = [], {}
    for name in names:
        prompt = make_prompt(name, 2, step=step)
        samples = [
            GroupSample(
                index,
                Stamps(admitted=1.0, committed=2.0),
                make_body(prompt, index, f"{name}-{index}{bad}"),
                scoring=ScoringRecord("scored", 1.0, scorers=scorers or {}),
            )
            for index in range(2)
        ]
        groups.append(Group(name, "ready", prompt, samples, incarnation, 1.0, 1.8, 1.9))
        records[name] = GroupRecord(name, "train", step, "trained", 2, 2, 1.0, 2.0)
    store_groups(folder / "samples", step, incarnation, groups, records, begun_by)


@pytest.fixture
def auditing(transport: Transport, redis_server: RedisServer, run_name: str) -> Callable[..., Any]:
    """A running auditor of its own; it stops with the context."""

    @asynccontextmanager
    async def run(
        reward: RewardSpec, folder: Path, worker: str = "reward-0", has_room: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[Auditor]:
        auditor = await open_auditor(reward, BuildContext(reward, worker), transport, folder)
        stop = asyncio.Event()
        running = asyncio.create_task(auditor.run(stop, has_room))
        try:
            yield auditor
        finally:
            stop.set()
            await running

    return run


def names_of(groups: Sequence[AuditedGroup]) -> list[str]:
    return sorted(each.group for each in groups)


async def test_drawn_groups_are_audited_once_by_two_workers(
    make_audit: Callable[..., RewardSpec], auditing: Callable[..., Any], tmp_path: Path, seen: Path
) -> None:
    names = [f"t-{number}-1.0" for number in range(12)]
    drawn = [name for name in names if is_audited(name, 1, 0.5, 1)]
    assert 0 < len(drawn) < len(names)
    stored(tmp_path, 1, names)
    reward = make_audit(share=0.5).model_copy(update={"timeout_seconds": 0.001})  # of a sample, not of an audit
    async with auditing(reward, tmp_path), auditing(reward, tmp_path, "reward-1"):
        await until(lambda: len(run_audits(tmp_path)) == len(drawn))
    audits = run_audits(tmp_path)
    assert names_of(audits) == sorted(drawn)
    for group in audits:
        assert [(each.score, each.audits["honest"].value) for each in group.samples] == [
            (1.0, float(len(f"{group.group}-{index}"))) for index in range(2)
        ]
    assert sorted(seen.read_text().split()) == sorted(f"{name}-{index}" for name in drawn for index in range(2))


async def test_an_auditor_waits_for_room_and_takes_the_newest_step_first(
    make_audit: Callable[..., RewardSpec], auditing: Callable[..., Any], tmp_path: Path, seen: Path
) -> None:
    for step in (1, 2, 3, 4):
        stored(tmp_path, step, [f"t-{step}-1.0"])
    room, asked = False, 0

    def has_room() -> bool:
        nonlocal asked
        asked += 1
        return room

    async with auditing(make_audit(share=1, everySteps=2), tmp_path, has_room=has_room):
        await until(lambda: asked > 3)
        assert not seen.read_text()
        room = True
        await until(lambda: len(run_audits(tmp_path)) == 2)
    steps = [line[:3] for line in seen.read_text().split()]
    assert steps[0] == "t-4"
    assert sorted(steps) == ["t-2", "t-2", "t-4", "t-4"]


async def test_a_failing_auditor_is_one_more_result(
    make_audit: Callable[..., RewardSpec], auditing: Callable[..., Any], tmp_path: Path
) -> None:
    stored(tmp_path, 1, ["t-1-1.0"], bad=" bad")
    stored(tmp_path, 2, ["t-2-1.0"])
    async with auditing(make_audit(share=1), tmp_path):
        await until(lambda: len(run_audits(tmp_path)) == 2)
    failed, good = run_audits(tmp_path)
    assert [each.audits["honest"].outcome for each in failed.samples] == ["scored", "data_error"]
    assert "unreadable" in str(failed.samples[1].audits["honest"].reason)
    assert all(each.audits["honest"].is_scored for each in good.samples)


async def test_a_group_of_a_dead_worker_is_audited_when_its_lease_has_lapsed(
    make_audit: Callable[..., RewardSpec], auditing: Callable[..., Any], transport: Transport, tmp_path: Path
) -> None:
    stored(tmp_path, 1, ["t-1-1.0", "t-2-1.0"])
    lease = transport.names.audit_lease("t-1-1.0")
    await transport.commands.set(lease, "reward-dead")
    async with auditing(make_audit(share=1), tmp_path):
        await until(lambda: names_of(run_audits(tmp_path)) == ["t-2-1.0"])
        await transport.commands.delete(lease)
        await until(lambda: names_of(run_audits(tmp_path)) == ["t-1-1.0", "t-2-1.0"])


async def test_a_worker_that_was_frozen_for_longer_than_its_lease_writes_nothing(
    make_audit: Callable[..., RewardSpec],
    auditing: Callable[..., Any],
    transport: Transport,
    tmp_path: Path,
    seen: Path,
) -> None:
    stored(tmp_path, 1, ["t-1-1.0", "t-2-1.0"])
    lease = transport.names.audit_lease("t-1-1.0")

    async def taken() -> bool:
        return await transport.commands.get(lease) == b"reward-0"

    async with auditing(make_audit(share=1), tmp_path):
        await until(taken, every_s=0.001)
        await transport.commands.set(lease, "reward-1")
        await until(lambda: names_of(run_audits(tmp_path)) == ["t-2-1.0"])
    assert "t-1-1.0-0" in seen.read_text()
    assert await transport.commands.get(lease) == b"reward-1"


async def test_a_group_that_ends_its_workers_becomes_poison(
    make_audit: Callable[..., RewardSpec],
    auditing: Callable[..., Any],
    transport: Transport,
    tmp_path: Path,
    seen: Path,
) -> None:
    stored(tmp_path, 1, ["t-1-1.0"])
    await transport.commands.hset(transport.names.audit_attempts, "t-1-1.0", 3)
    async with auditing(make_audit(share=1), tmp_path):
        await until(lambda: len(run_audits(tmp_path)) == 1)
    (group,) = run_audits(tmp_path)
    assert {each.audits["honest"].outcome for each in group.samples} == {"poison"}
    assert not seen.read_text()


async def test_workers_that_end_in_order_make_no_group_poison_and_audit_groups_of_several_steps_at_once(
    make_reward: Callable[..., RewardSpec], auditing: Callable[..., Any], transport: Transport, tmp_path: Path
) -> None:
    names = [f"t-{step}-1.0" for step in (1, 2, 3)]
    for step, name in enumerate(names, start=1):
        stored(tmp_path, step, [name])
    source = """
import asyncio
from pathlib import Path
async def audit(data_source, solution_str, ground_truth, extra_info=None, gate=""):
    while not Path(gate).exists():
        await asyncio.sleep(0.01)
    return 1.0
"""
    gate = tmp_path / "gate"
    auditor = {"name": "slow", "function": "audit", "arguments": {"gate": str(gate)}, "audit": {"share": 1}}
    reward = make_reward([{"name": "correct", "kind": "rule"}, auditor], source)

    async def begun() -> bool:
        return await transport.commands.hmget(transport.names.audit_attempts, names) == [b"1"] * 3

    for _ in range(4):
        async with auditing(reward, tmp_path):
            await until(begun)
    gate.touch()
    async with auditing(reward, tmp_path):
        await until(lambda: len(run_audits(tmp_path)) == 3)
    outcomes = {each.audits["slow"].outcome for group in run_audits(tmp_path) for each in group.samples}
    assert outcomes == {"scored"}


async def test_audits_of_an_interrupted_step_count_again_and_those_of_a_lost_future_do_not(
    make_audit: Callable[..., RewardSpec], auditing: Callable[..., Any], tmp_path: Path, seen: Path
) -> None:
    stored(tmp_path, 1, ["t-1-1.0"])
    stored(tmp_path, 2, ["t-2-1.0"])
    reward = make_audit(share=1)
    async with auditing(reward, tmp_path):
        await until(lambda: len(run_audits(tmp_path)) == 2)
    stored(tmp_path, 1, ["t-3-1.0"], incarnation=2, begun_by=1)  # its file begins with the first trainer's group
    async with auditing(reward, tmp_path):
        await until(lambda: len(run_audits(tmp_path)) == 2)
    assert names_of(run_audits(tmp_path)) == ["t-1-1.0", "t-3-1.0"]
    assert sorted(seen.read_text().split()) == sorted(f"t-{n}-1.0-{i}" for n in (1, 2, 3) for i in (0, 1))


async def test_a_line_that_a_kill_has_cut_is_audited_again(
    make_audit: Callable[..., RewardSpec], auditing: Callable[..., Any], tmp_path: Path
) -> None:
    stored(tmp_path, 1, ["t-1-1.0", "t-2-1.0"])
    path = audits_file(tmp_path, samples_file(tmp_path / "samples", 1, 1))
    reward = make_audit(share=1)
    async with auditing(reward, tmp_path):
        await until(lambda: len(run_audits(tmp_path)) == 2)
    whole = path.read_bytes()
    for cut in range(1, len(whole), 37):
        path.write_bytes(whole[:cut])
        assert len(read_audits([path])) == whole[:cut].count(b"\n")
    path.write_bytes(whole[: len(whole) // 2 + 5])
    async with auditing(reward, tmp_path):
        # An auditor that was stopped behind its line may have left the group's lease, which lapses.
        await until(lambda: len(run_audits(tmp_path)) == 2, within_s=LEASE_S + 20)


async def test_a_reward_worker_audits_beside_its_work_and_the_reward_does_not_change(
    make_audit: Callable[..., RewardSpec],
    make_feed: Callable[..., Any],
    redis_server: RedisServer,
    run_name: str,
    tmp_path: Path,
) -> None:
    stored(tmp_path, 1, [f"t-{number}-1.0" for number in range(100, 104)])
    reward = make_audit(share=1)
    feed = make_feed(reward)
    await feed.publish([["one", "two"]])
    transport = await Transport.open(RedisAddress(redis_server.url, redis_server.password), run_name)
    worker = ScoringWorker(
        "reward-0",
        transport,
        await build_pipeline(reward, "reward-0"),
        ScoringOptions(consumer=ConsumerOptions(block_s=0.05)),
        auditor=await open_auditor(reward, BuildContext(reward, "reward-0"), transport, tmp_path),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    try:
        (group,) = (await feed.ready(1)).values()
        await until(lambda: len(run_audits(tmp_path)) == 4)
    finally:
        stop.set()
        await running
        await transport.close()
    assert [set(sample.scoring.scorers) for sample in group.samples] == [{"paid"}, {"paid"}]
    assert [sample.scoring.value for sample in group.samples] == [1.0, 1.0]


DRIFTING = """
from pathlib import Path
def judge(data_source, solution_str, ground_truth, extra_info=None, mood=""):
    return float(Path(mood).read_text())
"""


async def test_a_watched_scorer_is_asked_again_about_the_same_samples(
    make_reward: Callable[..., RewardSpec], auditing: Callable[..., Any], tmp_path: Path
) -> None:
    mood = tmp_path / "mood"
    mood.write_text("0.8")
    judge = {"name": "judge", "function": "judge", "arguments": {"mood": str(mood)}}
    reward = make_reward([{**judge, "drift": {"samples": 3, "everySteps": 2}}], DRIFTING)
    scorers = {"judge": ScorerRecord("scored", 0.5)}
    for step in (1, 2, 3):
        stored(tmp_path, step, [f"t-{step}-1.0", f"t-{step + 10}-1.0"], scorers=scorers)
    async with auditing(reward, tmp_path), auditing(reward, tmp_path, "reward-1"):
        await until(lambda: read_drift(drift_file(tmp_path)))
        mood.write_text("0.1")
        stored(tmp_path, 4, ["t-4-1.0"], scorers=scorers)
        await until(lambda: len(read_drift(drift_file(tmp_path))) == 2)
    assert [(each.step, each.pairs, each.failed) for each in read_drift(drift_file(tmp_path))] == [
        (2, [(0.5, 0.8)] * 3, 0),
        (4, [(0.5, 0.1)] * 3, 0),
    ]
    figures = drift_figures(read_drift(drift_file(tmp_path)), 5)
    assert figures["drift/judge/value"] == pytest.approx(-0.4)
    assert figures["drift/judge/value_high"] < 0
    assert drift_figures(read_drift(drift_file(tmp_path)), 3)["drift/judge/value"] == pytest.approx(0.3)
