"""The supervisor on this machine and on a real Ray: what it starts again, what ends a run, what stopping means."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import waiting
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.plan import LaunchSettings, ProcessPlan, Role
from plaudit_workers.launch.supervisor import LocalProcesses, Processes, Supervisor
from plaudit_workers.launch.transport import RedisAccess
from plaudit_workers.process import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, ProcessEnding
from waiting import runs

HERE = os.pathsep.join([str(Path(__file__).parent), str(Path(waiting.__file__).parent)])
"""The ``PYTHONPATH`` of the processes: the folders of this file and of what it imports."""


def on_ray() -> Processes:
    from plaudit_workers.launch.ray_processes import RayProcesses

    return RayProcesses()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.engines)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Processes]:
    """Makes where processes run."""
    if request.param == "local":
        monkeypatch.setenv("PYTHONPATH", HERE)
        return LocalProcesses
    request.getfixturevalue("ray_cluster")
    return on_ray


def plan(folder: Path, role: Role, function: str) -> ProcessPlan:
    context = LaunchSettings("test", folder, RedisAccess(RedisAddress("redis://127.0.0.1:1/0"), folder))
    environment = context.environment(role, role) | {"PYTHONPATH": HERE}
    return ProcessPlan(f"{role}-0", role, 0.5, 0, serve=f"roles_for_tests:{function}", environment=environment)


async def supervise(
    place: Callable[[], Processes], folder: Path, max_restarts: int = 2, **functions: str
) -> tuple[ProcessEnding, Supervisor]:
    """Runs the roles, each a process with the function of that name, until the run ends."""
    plans: dict[Role, list[ProcessPlan]] = {role: [plan(folder, role, name)] for role, name in functions.items()}
    supervisor = Supervisor(plans, place(), max_restarts=max_restarts, steps_closed=lambda: 0)
    try:
        await supervisor.start()
        ending = await asyncio.wait_for(supervisor.until_done(), 200)
    finally:
        await supervisor.stop()
    return ending, supervisor


async def test_the_run_ends_with_its_trainer_and_the_others_are_asked_to_stop(
    place: Callable[[], Processes], tmp_path: Path
) -> None:
    ending, supervisor = await supervise(place, tmp_path, reward="lasts", trainer="trains")
    assert ending == ProcessEnding(EXIT_DONE)
    assert (tmp_path / "lasts.stopped").exists()
    assert supervisor.restarts == {}


async def test_a_killed_process_is_started_again(place: Callable[[], Processes], tmp_path: Path) -> None:
    ending, supervisor = await supervise(place, tmp_path, trainer="dies_twice")
    assert ending.code == EXIT_DONE
    assert supervisor.restarts == {"trainer": 2}
    assert len((tmp_path / "dies_twice.starts").read_text().splitlines()) == 3


async def test_a_process_that_always_crashes_fails_the_run_and_names_itself(
    place: Callable[[], Processes], tmp_path: Path
) -> None:
    ending, _ = await supervise(place, tmp_path, max_restarts=1, reward="crashes", trainer="lasts")
    assert ending.code == EXIT_FAILED
    assert "reward-0 died 2 times" in ending.message
    assert re.search(
        r"reward\.log: ValueError: broken on purpose \(roles_for_tests\.py:\d+ in crashes\)$", ending.message
    )
    assert "broken on purpose" in (tmp_path / "logs" / "reward.log").read_text()


async def test_a_refusal_ends_the_run_with_its_message_and_no_restart(
    place: Callable[[], Processes], tmp_path: Path
) -> None:
    ending, supervisor = await supervise(place, tmp_path, reward="refuses", trainer="lasts")
    assert ending == ProcessEnding(EXIT_REFUSED, "reward-0: spec.example: 'x' is wrong; write 'y'")
    assert supervisor.restarts == {}


async def test_a_failed_job_is_not_started_again(place: Callable[[], Processes], tmp_path: Path) -> None:
    ending, _ = await supervise(place, tmp_path, trainer="fails")
    assert ending == ProcessEnding(EXIT_FAILED, "trainer: too many failed scores")


async def test_a_stop_lets_the_trainer_finish(place: Callable[[], Processes], tmp_path: Path) -> None:
    supervisor = Supervisor(
        {"trainer": [plan(tmp_path, "trainer", "lasts")]}, place(), max_restarts=0, steps_closed=lambda: 0
    )
    try:
        await supervisor.start()
        while not (tmp_path / "lasts.starts").exists():
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(supervisor.stop_trainer(), 30) == ProcessEnding(EXIT_DONE)
        assert (tmp_path / "lasts.stopped").exists()
    finally:
        await supervisor.stop()


async def test_an_immediate_stop_waits_for_no_process(place: Callable[[], Processes], tmp_path: Path) -> None:
    supervisor = Supervisor(
        {"reward": [plan(tmp_path, "reward", "lasts")]}, place(), max_restarts=0, steps_closed=lambda: 0
    )
    await supervisor.start()
    while not (tmp_path / "lasts.starts").exists():
        await asyncio.sleep(0.05)
    pid = int((tmp_path / "logs" / "reward.pid").read_text())
    await supervisor.stop(at_once=True)
    while runs(pid):
        await asyncio.sleep(0.05)
    assert not (tmp_path / "lasts.stopped").exists()


async def test_a_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from plaudit_workers.launch.supervisor import LocalProcesses
from test_supervisor import supervise

asyncio.run(supervise(LocalProcesses, Path({str(tmp_path)!r}), reward="lasts", trainer="lasts"))
"""
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": HERE})
    logs = [tmp_path / "logs" / f"{role}.pid" for role in ("reward", "trainer")]
    while not all(log.exists() and log.read_text() for log in logs):
        await asyncio.sleep(0.05)
    run.kill()
    await run.wait()
    while any(runs(int(log.read_text())) for log in logs):
        await asyncio.sleep(0.05)
    assert not (tmp_path / "lasts.stopped").exists()


async def test_all_roles_start_anew_when_their_template_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)
    plans = {role: [plan(tmp_path, role, "lasts")] for role in ("metrics", "reward")}
    supervisor = Supervisor(plans, LocalProcesses(), max_restarts=1, steps_closed=lambda: 0)
    pids = [tmp_path / "logs" / f"{role}.pid" for role in plans]
    try:
        await supervisor.start()
        while not all(file.exists() and file.read_text() for file in pids):
            await asyncio.sleep(0.05)
        first = [int(file.read_text()) for file in pids]
        os.kill(int(Path(f"/proc/{first[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        while any(file.read_text() in {"", f"{pid}\n"} for file, pid in zip(pids, first, strict=True)):
            await asyncio.sleep(0.05)
        assert not any(map(runs, first))
        assert supervisor.restarts == {"metrics-0": 1, "reward-0": 1}
    finally:
        await supervisor.stop()


async def test_a_process_has_its_own_name_session_and_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)
    with_secret = replace(plan(tmp_path, "reward", "describes_itself"), secrets={"JUDGE_KEY": "sk-secret-of-the-judge"})
    plans = {"reward": [with_secret], "metrics": [plan(tmp_path, "metrics", "describes_itself")]}
    processes = LocalProcesses()
    try:
        for each in (plan for of_role in plans.values() for plan in of_role):  # the other after the one with a secret
            assert await processes.run(each, each.secrets) == ProcessEnding(EXIT_DONE)
    finally:
        await processes.close()
    reward, metrics = (json.loads((tmp_path / f"{name}.described").read_text()) for name in ("reward-0", "metrics-0"))
    assert (reward["comm"], metrics["comm"]) == ("reward-0", "metrics-0")
    assert reward["leads_session"]
    assert metrics["leads_session"]
    assert (reward["variable"], metrics["variable"]) == ("sk-secret-of-the-judge", None)
    assert not reward["in_environ"]  # where other programs of the user read
    assert reward["descriptors"] == metrics["descriptors"]
