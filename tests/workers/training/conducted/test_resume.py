"""Trainers that die anywhere, a Redis that loses keys: every prompt is trained, none twice in the surviving line."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from plaudit_job.spec.rollout import SkipSolvedSpec
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.sources.sample_schema import FOLDER, samples_file
from plaudit_wire.errors import RefusedError
from plaudit_workers.data_facts import DataFacts, FileFacts, accept
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream import trainer as ready
from plaudit_workers.stream.groups import Group, read_groups
from plaudit_workers.stream.trainer import StaleIncarnationError
from plaudit_workers.stream.transport import Transport
from simulated_run import make_plan, positions
from waiting import until

# A trainer that is killed does not close its connections.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def assert_whole(simulation: Any, policy: Any, num_prompts: int, num_steps: int) -> None:
    """What an undisturbed run would have left, and a ledger that adds up."""
    trained = [group for update in policy.trained for group in update]
    assert len(trained) == len(set(trained))
    assert sorted(position for update in positions(policy) for position in update) == list(range(num_prompts))
    ledger = simulation.ledger()
    assert ledger["problems"] == []
    assert (ledger["trained"], ledger["open"]) == (num_prompts, 0)
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"]
    assert [(step.step, step.num_groups) for step in simulation.steps()] == [
        (step, num_prompts // num_steps) for step in range(1, num_steps + 1)
    ]


async def trained_through_kills(
    simulation: Any, plan: Any, chance: random.Random, kills: int, life_s: tuple[float, float]
) -> tuple[bool, Any]:
    """Kill up to so many trainers, each after a random time, then train to the end; see ``Simulation.train``."""
    for _ in range(kills):
        if await simulation.killed(plan, chance.uniform(*life_s)):
            break
    done, policy = await simulation.train(plan)
    return done, policy


@pytest.mark.parametrize(
    ("staleness", "mini_batches", "order"),
    [
        pytest.param(0, 1, "step", marks=pytest.mark.long),
        pytest.param(0, 4, "step", marks=pytest.mark.long),
        (1, 4, "step"),
        pytest.param(2, 1, "step", marks=pytest.mark.long),
        (2, 4, "ready"),
    ],
)
async def test_a_trainer_that_is_killed_repeatedly_trains_the_same_samples_as_an_undisturbed_one(
    simulation: Any, staleness: int, mini_batches: int, order: str
) -> None:
    plan = make_plan(steps=8, staleness=staleness, mini_batches=mini_batches, order=order, checkpoint_every_steps=3)
    seeds: dict[int, set[int]] = defaultdict(set)

    def update_s(groups: Sequence[Group]) -> float:
        for group in groups:
            seeds[group.prompt.position].add(group.prompt.seed)
        return 0.03

    simulation.update_s = update_s
    simulation.slow_s = 0.1
    chance = random.Random(staleness * 10 + mini_batches)
    async with simulation.workers():
        done, policy = await trained_through_kills(simulation, plan, chance, 4, (0.1, 1.2))
    assert done
    trained = [group for update in policy.trained for group in update]
    assert len(trained) == len(set(trained))
    assert sorted(position for update in positions(policy) for position in update) == list(range(32))
    assert [len(drawn) for drawn in seeds.values()] == [1] * 32, "a step that is repeated draws the same numbers"
    assert len(set().union(*seeds.values())) == 32
    ledger = simulation.ledger()
    assert (ledger["problems"], ledger["trained"], ledger["open"]) == ([], 32, 0)
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"]
    steps = simulation.steps()
    assert [step.step for step in steps] == list(range(1, 9))
    assert all(step.statistics["reward_pipeline/staleness/max"] <= staleness for step in steps)
    transport = await simulation.open()
    counters = await transport.commands.hgetall(transport.names.counters)
    await transport.close()
    assert {name: int(counters[name.encode()]) for name in ("admitted", "trained", "dropped")} == {
        name: ledger[name] for name in ("admitted", "trained", "dropped")
    }


@pytest.mark.long
@pytest.mark.parametrize(("staleness", "order"), [(0, "step"), (1, "step"), (2, "ready")])
async def test_a_killed_trainer_that_replaces_groups_trains_every_position_once_or_drops_it_by_name(
    simulation: Any, staleness: int, order: str
) -> None:
    simulation.varied = {position for position in range(200) if position % 3}
    plan = make_plan(
        steps=8, staleness=staleness, order=order, mini_batches=2, max_replaced=8, checkpoint_every_steps=3
    )
    simulation.update_s = lambda groups: 0.03
    chance = random.Random(staleness)
    async with simulation.workers():
        done, policy = await trained_through_kills(simulation, plan, chance, 4, (0.1, 1.0))
    assert done
    trained = [position for update in positions(policy) for position in update]
    assert len(trained) == len(set(trained)) == 32
    # Every position below the newest one was trained, or dropped because its scores are equal.
    assert {position for position in range(max(trained)) if position % 3} <= set(trained)
    assert set(trained) <= simulation.varied
    ledger = simulation.ledger()
    assert (ledger["problems"], ledger["trained"], ledger["open"]) == ([], 32, 0)
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"]
    assert [step.step for step in simulation.steps()] == list(range(1, 9))


async def test_a_step_that_was_interrupted_twice_has_all_its_samples_and_no_time_between_its_trainers(
    simulation: Any,
) -> None:
    plan, loop = make_plan(steps=3, mini_batches=4), asyncio.get_running_loop()
    between_s, began = 1.0, time.monotonic()
    async with simulation.workers():
        for updates in (5, 1):  # stopped in the first update of step 2, then in its second
            stop, left = asyncio.Event(), iter(range(updates, 0, -1))

            def update_s(groups: Sequence[Group], stop: asyncio.Event = stop, left: Any = left) -> float:
                if next(left, 0) == 1:
                    loop.call_soon_threadsafe(stop.set)
                return 0.02

            simulation.update_s = update_s
            done, _ = await simulation.train(plan, stop)
            assert not done
            await asyncio.sleep(between_s)  # the pause itself
        simulation.update_s = lambda groups: 0.0
        done, _ = await simulation.train(plan)
    assert done
    trained_s, series = time.monotonic() - began - 2 * between_s, RunSeries()
    for record in simulation.steps():
        series.count_step(record, records_missing=0)
        figures, stopped_s = record.statistics, record.statistics.get("stopped_s", 0.0)
        assert stopped_s >= (2 * between_s if record.step == 2 else 0.0)
        assert figures["trainer_wait_s"] <= figures["step_s"] == figures["timing_s/step"]
        assert figures["step_s"] == pytest.approx(record.closed - record.opened - stopped_s)
        rows = pq.read_table(samples_file(simulation.folder / FOLDER, record.step, record.incarnation)).to_pylist()
        stored = sorted((int(row["group"].split("-")[1]), row["index"]) for row in rows)
        positions = range(record.step * 4 - 4, record.step * 4)
        assert stored == [(position, index) for position in positions for index in range(4)]
        assert {row["incarnation"] for row in rows} == ({1, 2, 3} if record.step == 2 else {record.incarnation})
    sums = {sample.name: sample.value for family in series.registry.collect() for sample in family.samples}
    assert sums["plaudit_step_wait_seconds_sum"] <= sums["plaudit_step_seconds_sum"] <= trained_s


@pytest.mark.long
async def test_a_trainer_process_that_gets_sigkill_loses_nothing(simulation: Any) -> None:
    plan = {"steps": 12, "staleness": 1, "mini_batches": 2, "checkpoint_every_steps": 3}
    settings = {"plan": plan, "update_s": 0.08}
    chance = random.Random(7)
    async with simulation.workers():
        for steps in (1, 5):
            trainer = await simulation.trainer_process(settings)
            await simulation.until_steps(steps)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            trainer.kill()
            await trainer.wait()
        last = await simulation.trainer_process(settings)
        assert await last.wait() == 0
    checkpoint = simulation.folder / "checkpoints" / "step-000012"
    trained = [group for update in json.loads((checkpoint / "trained.json").read_text()) for group in update]
    assert sorted(int(group.split("-")[1]) for group in trained) == list(range(48))
    assert len({group.split("-")[2].split(".")[0] for group in trained}) > 1
    ledger = simulation.ledger()
    assert (ledger["problems"], ledger["trained"], ledger["open"]) == ([], 48, 0)
    assert [step.step for step in simulation.steps()] == list(range(1, 13))


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_redis_that_forgets_everything_costs_only_time(simulation: Any, staleness: int) -> None:
    plan = make_plan(steps=5, staleness=staleness)
    simulation.slow_s = 0.4
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(plan))
        await simulation.until_steps(2)
        await until(simulation.has_open_groups)
        await simulation.rewind([])
        done, policy = await training
    assert done
    assert_whole(simulation, policy, 20, 5)
    assert simulation.ledger()["dropped:lost"] > 0


async def test_a_redis_that_forgets_everything_while_no_trainer_lives_costs_only_time(simulation: Any) -> None:
    plan = make_plan(steps=5, staleness=1)
    simulation.slow_s = 0.3
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(plan))
        await simulation.until_steps(2)
        training.cancel()
        await asyncio.wait([training])
        await simulation.rewind([])
        done, policy = await simulation.train(plan)
    assert done
    trained = [group for update in policy.trained for group in update]
    assert sorted(position for update in positions(policy) for position in update) == list(range(20))
    # The incarnation is higher than before although Redis has forgotten it.
    assert {group.split("-")[2].split(".")[0] for group in trained} <= {"1", "2"}
    assert trained[-1].split("-")[2].startswith("2.")
    assert simulation.ledger()["problems"] == []


async def test_groups_that_reappear_with_an_old_state_of_redis_are_not_trained_again(simulation: Any) -> None:
    plan = make_plan(steps=6, staleness=1)
    simulation.slow_s = 0.3
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(plan))
        await simulation.until_steps(1)
        old = await simulation.state()
        await simulation.until_steps(3)
        await simulation.rewind(old)
        done, policy = await training
    assert done
    assert_whole(simulation, policy, 24, 6)


async def test_a_group_that_is_not_ready_any_more_when_it_is_read_is_trained_when_it_is_again(
    simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis comes back with an older state between the two looks with which a group is taken."""
    old: list[bytes] = []
    rewound = asyncio.Event()

    async def read_after_rewind(
        transport: Transport, groups: Sequence[tuple[str, int]], *, taken: bool
    ) -> list[Group | None]:
        if rewound.is_set() or len(simulation.steps()) < 2:
            pass
        elif any(transport.names.group(group).encode() in old for group, _ in groups):
            await simulation.rewind(old)
            rewound.set()
        else:
            old[:] = await simulation.state()
        return await read_groups(transport, groups, taken=taken)

    monkeypatch.setattr(ready, "read_groups", read_after_rewind)
    simulation.slow_s = 0.3
    async with simulation.workers():
        done, policy = await simulation.train(make_plan(steps=6, staleness=1))
    assert done
    assert rewound.is_set()
    assert_whole(simulation, policy, 24, 6)


async def test_a_redis_that_is_killed_and_loads_its_file_again_loses_nothing(
    simulation: Any, tmp_path: Any, redis_server: RedisServer
) -> None:
    with RedisServer(tmp_path / "redis", persistence="always") as server:
        simulation.server = server
        simulation.slow_s = 0.3
        async with simulation.workers():
            training = asyncio.create_task(simulation.train(make_plan(steps=5, staleness=1)))
            await simulation.until_steps(1)
            server.kill()
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.start)
            done, policy = await training
    assert done
    simulation.server = redis_server
    assert_whole(simulation, policy, 20, 5)


async def test_a_trainer_that_was_replaced_leaves_and_trains_nothing_more(simulation: Any) -> None:
    plan = make_plan(steps=6, staleness=1)
    simulation.slow_s = 0.2
    async with simulation.workers():
        first = asyncio.create_task(simulation.train(plan))
        await simulation.until_steps(2)
        second = asyncio.create_task(simulation.train(plan))
        with pytest.raises(StaleIncarnationError, match="later trainer than incarnation 1"):
            await first
        done, policy = await second
    assert done
    assert_whole(simulation, policy, 24, 6)


async def test_a_checkpoint_that_a_replaced_trainer_saved_after_its_successor_began_does_not_count(
    simulation: Any, tmp_path: Path
) -> None:
    """The successor continued from step 2 and died before it saved a checkpoint of its own."""
    late = simulation.folder / "checkpoints" / "step-000004"
    async with simulation.workers():
        await simulation.train(make_plan(steps=4))
        late.rename(tmp_path / "late")
        successor = asyncio.create_task(simulation.train(make_plan(steps=6, checkpoint_every_steps=100)))
        async with asyncio.timeout(30):
            while simulation.steps()[-1].incarnation == 1:
                await asyncio.sleep(0.01)
        successor.cancel()
        await asyncio.wait([successor])
        (tmp_path / "late").rename(late)
        done, policy = await simulation.train(make_plan(steps=6))
    assert done
    assert_whole(simulation, policy, 24, 6)


def prompts_of(simulation: Any) -> dict[int, str]:
    """Position → prompt of the groups that were trained."""
    table = pq.read_table([str(path) for path in sorted((simulation.folder / "samples").glob("*.parquet"))])
    groups = table.select(["group", "prompt", "end"]).to_pylist()
    return {int(row["group"].split("-")[1]): row["prompt"] for row in groups if row["end"] == "trained"}


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_a_killed_run_that_skips_solved_prompts_trains_those_of_an_undisturbed_one(
    simulation: Any, redis_server: RedisServer, run_name: str, tmp_path: Any, staleness: int
) -> None:
    """Rewards are the row's number, 0 to 5: rows 3, 4 and 5 are solved at every visit, and skipped from the third."""
    rule = SkipSolvedSpec(threshold=3.0, min_visits=2)
    plan = make_plan(steps=10, staleness=staleness, skip_solved=rule, checkpoint_every_steps=3)
    simulation.num_rows = 6
    simulation.update_s = lambda groups: 0.03
    chance = random.Random(staleness)
    async with simulation.workers():
        done, _ = await trained_through_kills(simulation, plan, chance, 3, (0.2, 0.9))
    assert done
    other = type(simulation)(redis_server, f"{run_name}-other", tmp_path / "other")
    other.num_rows = 6
    async with other.workers():
        done, _ = await other.train(plan)
    await other.rewind([])
    assert done

    prompts = prompts_of(other)
    assert sorted(prompts) == list(range(40))
    assert prompts_of(simulation) == prompts
    rows = [int(prompts[position].split()[1]) % 6 for position in range(40)]
    assert rows.count(4) == rows.count(5) < rows.count(0)
    assert {3, 4, 5}.isdisjoint(rows[-8:])
    assert other.steps()[-1].statistics["training/prompts_solved"] == 3


async def test_rewards_near_the_largest_float_end_no_trainer_that_skips_solved_prompts(simulation: Any) -> None:
    largest = "import sys\n\ndef compute_score(solution_str, ground_truth, **_):\n    return sys.float_info.max\n"
    (simulation.folder / "rewards.py").write_text(largest)
    async with simulation.workers():
        done, _ = await simulation.train(make_plan(steps=2, skip_solved=SkipSolvedSpec(threshold=1.0, min_visits=1)))
    assert done
    assert simulation.steps()[-1].statistics["training/prompts_solved"] > 0


async def test_a_run_goes_on_from_another_runs_checkpoint(
    simulation: Any, redis_server: RedisServer, run_name: str, tmp_path: Any
) -> None:
    async with simulation.workers():
        await simulation.train(make_plan(steps=2, staleness=1))
    other = type(simulation)(redis_server, f"{run_name}-other", tmp_path / "other")
    plan = make_plan(steps=4, resume_from=str(simulation.folder / "checkpoints" / "step-000002"))
    async with other.workers():
        done, policy = await other.train(plan)
    await other.rewind([])
    assert done
    assert sorted(position for update in positions(policy) for position in update) == list(range(16))
    assert other.ledger()["trained"] == 8
    assert [step.step for step in other.steps()] == [3, 4]


DATA = [DataFacts([FileFacts("train.jsonl", rows, f"{rows}")]) for rows in (1000, 2000)]


@pytest.mark.long
async def test_a_run_from_another_runs_checkpoint_begins_other_data_at_its_beginning(
    simulation: Any, redis_server: RedisServer, run_name: str, tmp_path: Any
) -> None:
    simulation.data_facts = DATA[0]
    async with simulation.workers():
        await simulation.train(make_plan(steps=2))
    for number, facts in enumerate(DATA):
        other = type(simulation)(redis_server, f"{run_name}-{number}", tmp_path / f"other-{number}")
        other.data_facts = facts
        plan = make_plan(steps=4, resume_from=str(simulation.folder / "checkpoints" / "step-000002"))
        async with other.workers():
            await other.train(plan)
            await other.train(make_plan(steps=5, resume_from=plan.resume_from))  # resumes its own checkpoint
        await other.rewind([])
        trained = sorted(int(text.split()[1]) for text in prompts_of(other).values())
        assert trained == (list(range(12)) if number else list(range(8, 20)))


async def test_a_run_with_changed_data_is_refused_until_it_is_accepted(simulation: Any) -> None:
    simulation.data_facts = DATA[0]
    async with simulation.workers():
        await simulation.train(make_plan(steps=2))
        simulation.data_facts = DATA[1]
        with pytest.raises(RefusedError, match=r"train\.jsonl has 2,000 rows; it had 1,000.*--accept-data-change"):
            await simulation.train(make_plan(steps=4))
        accept(simulation.folder, DATA[1])
        done, _ = await simulation.train(make_plan(steps=4))
    assert done
    assert [step.step for step in simulation.steps()] == [1, 2, 3, 4]


async def test_a_run_whose_recorded_checkpoint_is_missing_is_refused_and_goes_on_once_it_is_back(
    simulation: Any, tmp_path: Any
) -> None:
    async with simulation.workers():
        await simulation.train(make_plan(steps=2))
        await simulation.train(make_plan(steps=2))  # records that it continued from step 2
        checkpoint = simulation.folder / "checkpoints" / "step-000002"
        checkpoint.rename(tmp_path / "backup")
        with pytest.raises(RefusedError, match=r"continued from the checkpoint of version 1\.2 .* there is none"):
            await simulation.train(make_plan(steps=3))
        (tmp_path / "backup").rename(checkpoint)
        done, policy = await simulation.train(make_plan(steps=3))
    assert done
    assert_whole(simulation, policy, 12, 3)
