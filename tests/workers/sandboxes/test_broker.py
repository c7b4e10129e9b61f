"""The broker of a run's machines: claims, commands, tests, the ends of machines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from chat_tokenizer import chat_tokenizer
from episodes import call, machine_agent, play
from namespaces import HAS_NAMESPACES
from plaudit_reward.machines import KEPT, KeptMachines, RunMachines
from plaudit_reward.providers import ProcessProvider, TaskMachine
from plaudit_reward.scorer import Attempt, Score
from plaudit_reward.served_machines import Nothing, ReleaseRequest, RunRequest
from plaudit_reward.verifier import Keep, VerifierScorer
from plaudit_sandbox.machine import CommandEnd
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.records import Sample
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.training.machines import EndedMachines
from plaudit_workers.training.schedule import TrainerLedger
from waiting import until

from .conftest import CHOICE, Brokers, World

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")


async def bash(made: TaskMachine, command: str) -> CommandEnd:
    return await made.machine.run(["bash", "-c", command], timeout_s=20.0, directory=made.directory)


async def score(machines: RunMachines, world: World, name: str, index: int = 0) -> Score:
    group, extra_info = name.partition("/")[0], world.task.row()["extra_info"]
    sample = Sample(group, index, "sums", "the sum", "done", extra_info=extra_info, machine=name)
    return await VerifierScorer("tests", machines, 8).score(sample, Attempt(30.0))


async def test_a_sample_works_in_its_machine_and_its_tests_score_it(world: World, broker: Brokers) -> None:
    await world.admit("g")
    async with broker():
        rollout, reward = world.machines(), world.machines()
        name, made = await rollout.claim("g", 0, world.task)
        ended = await bash(made, "cat a b; cat > given; echo $(($(cat a) + $(cat b))) > sum; exit 3")
        assert (ended.ending, ended.exit_code, ended.output) == ("exited", 3, "34")
        scored = await score(reward, world, name)
        assert (scored.outcome, scored.value) == ("scored", 1.0)
        assert (await score(reward, world, name)).value == 1.0  # as stored
        await rollout.remove(name)
        assert (world.folders(), await world.held()) == (set(), {})
        with pytest.raises(InfrastructureError, match="is gone"):
            await bash(made, "true")


async def test_claims_wait_for_a_place_in_the_order_of_their_arrival(world: World, broker: Brokers) -> None:
    await world.admit("g", 4)
    async with broker(most=1) as held:
        machines = world.machines()
        first, _ = await machines.claim("g", 0, world.task)
        granted: list[int] = []

        async def claim(index: int) -> None:
            name, made = await machines.claim("g", index, world.task)
            granted.append(index)
            assert made.waited_s > 0
            assert len(await world.held()) == len(world.folders()) == 1
            await machines.remove(name)

        tasks = []
        for number, index in enumerate((2, 3, 1), 1):
            tasks.append(asyncio.create_task(claim(index)))
            await until(lambda number=number: held.free == -number)  # type: ignore[misc]
        await machines.remove(first)
        await asyncio.gather(*tasks)
        assert granted == [2, 3, 1]


async def test_a_sample_that_begins_again_gets_a_new_machine_in_place_of_the_old(world: World, broker: Brokers) -> None:
    await world.admit("g")
    async with broker(most=1):
        dead, machines = world.machines(), world.machines()
        old, lost = await dead.claim("g", 0, world.task)
        await bash(lost, "echo old > sum")
        new, made = await machines.claim("g", 0, world.task)
        assert new != old
        assert (await bash(made, "ls")).output.split() == ["a", "b"]
        assert len(world.folders()) == 1
        with pytest.raises(InfrastructureError, match="is gone"):
            await bash(lost, "true")


async def test_the_machines_of_ended_samples_go(world: World, broker: Brokers) -> None:
    await world.admit("g", 1)
    await world.admit("other", 1)
    async with broker():
        machines = world.machines()
        await machines.claim("g", 0, world.task)
        await machines.claim("other", 0, world.task)
        await world.trainer.close("g", "dropped", "test")
        await until(lambda: len(world.folders()) == 1)
        with pytest.raises(InfrastructureError, match="its sample has ended"):
            await machines.claim("g", 0, world.task)
        await asyncio.to_thread(machines.provider.end)
        assert (world.folders(), await world.held()) == (set(), {})


@pytest.mark.parametrize(("keep", "expected"), [("all", {0: 1.0, 1: 1.0}), ("failed", {1: 1.0}), ("none", {})])
async def test_what_the_job_keeps_of_ended_samples_is_tested_again(
    world: World, broker: Brokers, keep: Keep, expected: dict[int, float]
) -> None:
    await world.admit("g", 3)
    trainer = EndedMachines(world.folder, keep, TrainerLedger(), world.provider())
    async with broker(most=3, keep=keep):
        machines = world.machines()
        claimed = [await machines.claim("g", index, world.task) for index in range(3)]
        for _, made in claimed[:2]:
            await bash(made, "echo $(($(cat a) + $(cat b))) > sum")
        assert (await score(machines, world, claimed[0][0])).value == 1.0
        await machines.remove(claimed[2][0])  # its sample needs no tests
        await world.trainer.close("g", "dropped", "test")
        await trainer.end()
        assert (world.folders(), await world.held()) == (set(), {})
    kept = KeptMachines(world.folder / KEPT, ProcessProvider(CHOICE))
    found = {int(path.name.partition("-")[0]): f"g/{path.name}" for path in kept.folder.glob("g/*")}
    assert {index: (await score(kept, world, name, index)).value for index, name in found.items()} == expected


async def test_a_request_that_comes_again_gets_the_answer_of_the_first(world: World, broker: Brokers) -> None:
    await world.admit("g")
    async with broker():
        name, made = await world.machines().claim("g", 0, world.task)
        request = RunRequest(name, "1", ["bash", "-c", "echo x >> seen; sleep 0.3; cat seen"], 20.0, {}, "/app", b"")
        asked = [world.provider().ask("/v1/run", request, CommandEnd) for _ in range(3)]
        ends = [*await asyncio.gather(*asked), await world.provider().ask("/v1/run", request, CommandEnd)]
        assert {end.output for end in ends} == {"x\n"}
        claims = [await world.provider().claim(Path(name), world.task) for _ in range(2)]
        assert {claim.directory for claim in claims} == {made.directory}
        assert len(world.folders()) == 1


async def test_errors_keep_their_kind(world: World, broker: Brokers) -> None:
    await world.admit("g")
    async with broker() as held:
        machines = world.machines()
        _, made = await machines.claim("g", 0, world.task)
        (next((world.folder / "machines").iterdir()) / "root").rmdir()
        world.task.folder.joinpath("environment/a").write_text("5")
        with pytest.raises(InfrastructureError):
            await bash(made, "true")
        assert 'stage="exec"' in held._series.page().decode()


async def test_nobody_without_the_token_is_answered(world: World, broker: Brokers) -> None:
    async with broker():
        with pytest.raises(InfrastructureError, match="the token is not this run's"):
            await world.provider(token="another").ask("/v1/release", ReleaseRequest(all=True), Nothing)


async def test_a_second_broker_waits_and_then_goes_on_with_the_machines(world: World, broker: Brokers) -> None:
    await world.admit("g")
    async with broker():
        name, made = await world.machines().claim("g", 0, world.task)
        await bash(made, "echo 7 > sum")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6), broker():
                pass
    async with broker():
        assert (await score(world.machines(), world, name)).value == 1.0
        assert await world.provider().ask("/v1/release", ReleaseRequest([name]), Nothing) == Nothing()


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_sample_whose_broker_dies_begins_again_in_another_machine(
    world: World, broker: Brokers, deaths: int
) -> None:
    await world.admit("t-0-1.0")
    processes, machines, tokenizer = AgentProcesses([]), world.machines(), chat_tokenizer()
    agent, extra_info = machine_agent(machines, processes, tokenizer, 60.0), world.task.row()["extra_info"]
    turn = call("bash", command="echo 7 > sum; touch begun; sleep 8")
    playing = asyncio.ensure_future(play(agent, tokenizer, turn, "Done.", extra_info=extra_info))
    seen: set[Path] = set()

    def has_begun() -> bool:
        new = set((world.folder / "machines").glob("*/files/app/begun")) - seen
        seen.update(new)
        return bool(new)

    for _ in range(deaths):
        async with broker():
            await until(lambda: playing.done() or has_begun())
            assert not playing.done(), playing
    async with broker():
        _, body = await playing
        assert body.generation.sandbox is not None
        assert body.generation.sandbox.failed
        assert len(body.generation.turns) == 2 / deaths  # a command that may have had an effect never runs twice
        if deaths == 1:
            assert body.sample.failure is None
            assert (await score(machines, world, body.sample.machine)).value == 1.0
        else:
            assert body.sample.failure is not None
            assert body.sample.failure.outcome == "infra_error"
            assert "lost" in (body.sample.failure.reason or "")
            assert (world.folders(), body.sample.machine) == (set(), "")
    await processes.close()
