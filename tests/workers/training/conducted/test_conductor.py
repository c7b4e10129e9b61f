"""Whole runs under every schedule: what is trained, when, on what, and what is written down of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pyarrow.parquet
import pytest

from plaudit_wire.errors import JobFailedError
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.scripted import ScriptedBackend
from simulated_run import make_plan, positions


@pytest.mark.alike
@pytest.mark.parametrize(
    ("staleness", "mini_batches", "order"),
    [(0, 1, "step"), (0, 4, "step"), (1, 1, "step"), (1, 4, "step"), (2, 4, "step"), (1, 1, "ready"), (2, 4, "ready")],
)
async def test_a_run_trains_every_prompt_once_within_its_staleness(
    simulation: Any, staleness: int, mini_batches: int, order: str
) -> None:
    plan = make_plan(steps=5, staleness=staleness, mini_batches=mini_batches, order=order)
    async with simulation.workers():
        done, policy = await simulation.train(plan)
    assert done
    trained = positions(policy)
    assert sorted(position for update in trained for position in update) == list(range(5 * 4))
    assert all(len(update) == 4 // mini_batches for update in trained)
    if order == "step":
        steps = [chain(*trained[i : i + mini_batches]) for i in range(0, len(trained), mini_batches)]
        by_step = [sorted(step) for step in steps]
        assert by_step == [list(range(4 * step, 4 * step + 4)) for step in range(5)]
    closed = simulation.steps()
    assert [step.step for step in closed] == [1, 2, 3, 4, 5]
    assert all(0 <= step.statistics["reward_pipeline/staleness/max"] <= staleness for step in closed)
    assert (simulation.ledger()["trained"], simulation.ledger()["open"]) == (20, 0)
    assert simulation.ledger()["problems"] == []


@pytest.mark.parametrize(("staleness", "order"), [(0, "step"), (1, "step"), (2, "ready")])
async def test_groups_with_equal_scores_are_dropped_by_name_and_others_take_their_place(
    simulation: Any, staleness: int, order: str
) -> None:
    simulation.varied = {position for position in range(100) if position % 3}
    plan = make_plan(steps=5, staleness=staleness, mini_batches=2, order=order, max_replaced=8)
    async with simulation.workers():
        done, policy = await simulation.train(plan)
    assert done
    trained = [position for update in positions(policy) for position in update]
    assert len(trained) == len(set(trained)) == 20
    assert set(trained) <= simulation.varied
    ledger = simulation.ledger()
    assert (ledger["trained"], ledger["open"], ledger["problems"]) == (20, 0, [])
    assert ledger["admitted"] == 20 + ledger["dropped:zero_variance"]
    steps = simulation.steps()
    assert sum(step.statistics.get("training/groups_replaced", 0) for step in steps) == ledger["dropped:zero_variance"]
    assert all(step.statistics["training/groups"] == 4 for step in steps)


async def test_a_step_replaces_no_more_groups_than_the_bound(simulation: Any) -> None:
    async with simulation.workers():
        done, policy = await simulation.train(make_plan(steps=3, staleness=1, max_replaced=2))
    assert done
    assert sum(len(update) for update in positions(policy)) == 12
    ledger = simulation.ledger()
    assert (ledger["admitted"], ledger["dropped:zero_variance"]) == (18, 6)


async def test_one_step_off_policy_scores_the_next_step_while_this_one_trains(simulation: Any) -> None:
    simulation.latency_s, simulation.update_s = 0.3, lambda groups: 0.6
    async with simulation.workers():
        await simulation.train(make_plan(steps=4, staleness=1))
    later = simulation.steps()[1:]
    # The slowest of a step's 16 samples takes nearly 0.3 s: under an update of 0.6 s nothing is left to wait for.
    assert sum(step.statistics["trainer_wait_s"] for step in later) < 0.4


async def test_waits_name_the_groups_that_ended_them_and_count_as_reward_time(simulation: Any) -> None:
    simulation.slow_s = 2.0
    async with simulation.workers():
        await simulation.train(make_plan(steps=3))
    for step in simulation.steps():
        (wait,) = step.waits
        names = {f"t-{position}-1.0" for position in range(4 * (step.step - 1), 4 * step.step)}
        assert set(wait.awaited) <= names
        assert wait.awaited
        assert step.opened <= wait.start <= wait.end <= step.closed
        assert step.statistics["exposed_reward_s"] > 0.5 * step.statistics["trainer_wait_s"]


async def test_a_step_leaves_its_samples_as_parquet_and_its_checkpoint(simulation: Any) -> None:
    async with simulation.workers():
        await simulation.train(make_plan(steps=3))
    rows = pyarrow.parquet.read_table(simulation.folder / "samples" / "step-000002-i1.parquet").to_pylist()
    assert {row["position"] for row in rows} == {4, 5, 6, 7}
    assert all(row["end"] == "trained" and row["score"] == row["position"] for row in rows)
    kept = sorted(path.name for path in (simulation.folder / "checkpoints").glob("step-*"))
    assert kept == ["step-000002", "step-000003"]
    assert sorted(path.name for path in (simulation.folder / "weights").iterdir())[-1] == "1.3"


async def test_groups_that_cannot_be_scored_are_dropped_with_their_reason_and_the_step_closes_without_them(
    simulation: Any,
) -> None:
    simulation.broken = {1, 4, 6}
    async with simulation.workers():
        _, policy = await simulation.train(make_plan(steps=2, mini_batches=2))
    assert sorted(position for update in positions(policy) for position in update) == [0, 2, 3, 5, 7]
    ledger = simulation.ledger()
    assert (ledger["admitted"], ledger["trained"], ledger["dropped:too_few_scored"]) == (8, 5, 3)
    outcomes = [step.statistics["reward_pipeline/outcome/data_error"] for step in simulation.steps()]
    assert outcomes == [4.0, 8.0]


async def test_a_step_whose_scores_failed_is_tried_again_and_trained_once_the_scorers_work(simulation: Any) -> None:
    simulation.broken_file.touch()
    plan = make_plan(steps=2, mini_batches=2, staleness=1, retry_pauses_s=(0.4, 0.4, 0.4))
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(plan))
        transport = await simulation.open()
        while not await transport.commands.hexists(transport.names.counters, "dropped:too_many_failed"):
            await asyncio.sleep(0.02)
        await transport.close()
        simulation.broken_file.unlink()
        done, policy = await training
    assert done
    assert sorted(position for update in positions(policy) for position in update) == list(range(8))
    ledger = simulation.ledger()
    assert ledger["dropped:too_many_failed"] == ledger["admitted"] - 8 > 0
    first = simulation.steps()[0]
    assert first.statistics["training/retries"] >= 1
    pauses = [wait for wait in first.waits if wait.cause == "pause"]
    assert len(pauses) == first.statistics["training/retries"]
    assert all(wait.awaited == [] for wait in pauses)
    assert sum(wait.end - wait.start for wait in pauses) == pytest.approx(0.4 * len(pauses), abs=0.1)


async def test_a_job_whose_scores_never_work_fails_for_good_and_can_be_resumed(simulation: Any) -> None:
    simulation.broken_file.touch()
    plan = make_plan(steps=2, retry_pauses_s=(0.05, 0.1, 0.15))
    async with simulation.workers():
        with pytest.raises(JobFailedError, match=r"step 1 not trained: 100% .* after 4 tries .* mine: 16 × Conn"):
            await simulation.train(plan)
        assert simulation.ledger()["dropped:too_many_failed"] == 16
        simulation.broken_file.unlink()
        done, policy = await simulation.train(plan)
    assert done
    assert sorted(position for update in positions(policy) for position in update) == list(range(8))


async def test_a_step_in_which_every_score_is_a_data_error_fails_the_job_at_once_with_the_reasons(
    simulation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    simulation.broken = set(range(8))
    reason = r"mine: 16 × ValueError: could not convert string to float: 'no number' \(rewards.py:11 in compute_score\)"
    async with simulation.workers():
        with pytest.raises(JobFailedError, match=f"step 1 not trained: 100% .* after 1 try .*{reason}.*--resume"):
            await simulation.train(make_plan(steps=2, retry_pauses_s=(600.0,)))
    assert "step not trained" in caplog.text


async def test_a_job_whose_scorers_skip_every_sample_fails_with_the_reason(simulation: Any) -> None:
    simulation.skipped = set(range(100))
    words = r"step 2 not trained: its scorers skipped every sample\. 16 × .* returned None\. .* 2 steps in a row"
    async with simulation.workers():
        with pytest.raises(JobFailedError, match=words):
            await simulation.train(make_plan(steps=2))
        simulation.skipped = set(range(8))
        done, policy = await simulation.train(make_plan(steps=4))
    assert done
    assert sorted(position for update in positions(policy) for position in update) == list(range(8, 16))


async def test_a_job_whose_scorers_skip_what_does_not_fail_fails_as_well(simulation: Any) -> None:
    simulation.broken, simulation.skipped = {0}, set(range(1, 100))
    async with simulation.workers():
        with pytest.raises(JobFailedError, match=r"its scorers skipped or failed every sample\. 12 × .* returned None"):
            await simulation.train(make_plan(steps=1))


async def test_the_heartbeat_gives_the_reason_and_time_of_the_next_try(simulation: Any) -> None:
    simulation.broken = {0, 1, 2}
    transport = await simulation.open()
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(make_plan(steps=1, retry_pauses_s=(600.0,))))
        async with asyncio.timeout(20):
            while not (problems := [record.problem for record in await transport.workers() if record.problem]):
                await asyncio.sleep(0.05)
        training.cancel()
        await asyncio.wait([training])
    await transport.close()
    (problem,) = problems
    assert problem.startswith("step 1 not trained: 75% of its samples have no score, next try in 600 s. mine: 12 × Val")


@pytest.mark.parametrize("on_none", ["ignore", "mask"])
async def test_samples_that_their_scorer_skips_do_not_count_as_failed(simulation: Any, on_none: str) -> None:
    simulation.on_none, simulation.skipped = on_none, {0, 1, 2}
    async with simulation.workers():
        done, policy = await simulation.train(make_plan(steps=2, retry_pauses_s=(600.0,)))
    assert done
    assert sorted(position for update in positions(policy) for position in update) == [3, 4, 5, 6, 7]
    assert simulation.ledger()["dropped:too_few_scored"] == 3
    assert "training/retries" not in simulation.steps()[0].statistics


async def test_a_trainer_stopped_within_a_step_continues_there_later(simulation: Any) -> None:
    plan = make_plan(steps=3, mini_batches=4)
    stop = asyncio.Event()

    def update_s(groups: Any) -> float:
        if groups[0].prompt.step == 2:
            stop.set()
        return 0.01

    simulation.update_s = update_s
    simulation.slow_s = 0.3
    async with simulation.workers():
        done, first = await simulation.train(plan, stop)
        assert not done
        assert 4 < len(first.trained) < 8
        done, second = await simulation.train(plan)
    assert done
    assert second.trained[: len(first.trained)] == first.trained
    assert sorted(position for update in positions(second) for position in update) == list(range(12))
    assert [(step.step, step.num_samples) for step in simulation.steps()] == [(1, 16), (2, 16), (3, 16)]
    assert simulation.ledger()["problems"] == []


async def test_no_more_groups_are_open_than_the_schedule_allows(simulation: Any) -> None:
    transport = await simulation.open()
    most = 0
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(make_plan(steps=6, staleness=1, mini_batches=2)))
        while not training.done():
            most = max(most, await transport.commands.zcard(transport.names.open))
            await asyncio.sleep(0.005)
        await training
    await transport.close()
    assert most == 8


class _Diverging(ScriptedBackend):
    """Ends the run at its third update, as a trainer does that discards too many."""

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        if len(self.trained) == 2:
            raise JobFailedError("5 updates in a row were discarded")
        return super().update(groups) | {"actor/skipped_updates": 1.0}


async def test_a_job_whose_updates_are_discarded_fails_and_its_groups_can_be_trained_again(simulation: Any) -> None:
    simulation.policy_class = _Diverging
    plan = make_plan(steps=2, mini_batches=2)
    async with simulation.workers():
        with pytest.raises(JobFailedError, match="discarded"):
            await simulation.train(plan)
        assert [step.statistics["actor/skipped_updates"] for step in simulation.steps()] == [2.0]
        simulation.policy_class = ScriptedBackend
        done, policy = await simulation.train(plan)
    assert done
    assert sorted(position for update in positions(policy) for position in update) == list(range(8))
