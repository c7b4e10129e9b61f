"""Tools in a sample's own machine, as a rollout's conversation calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from builders import make_prompt
from chat_tokenizer import chat_tokenizer
from container_images import IMAGE, why_none
from episodes import machine_agent, play
from harbor_tasks import run_machines, write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_job.spec.rollout import AgentSpec, ToolSpec
from plaudit_job.tasks import read_task
from plaudit_reward.machines import RunMachines
from plaudit_reward.providers import ContainerProvider, MachineChoice
from plaudit_reward.scorer import Attempt
from plaudit_reward.verifier import VerifierScorer
from plaudit_wire.messages import SampleBody
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.agents.sandbox_tools import sandbox_tools
from plaudit_workers.rollout.agents.machine_tools import MachineTools, SampleMachine
from waiting import until

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
Play = Callable[..., Coroutine[Any, Any, tuple[SampleBody, list[str]]]]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def bash(command: str) -> str:
    return call("bash", command=command)


@pytest.fixture
async def play_in_machine(tmp_path: Path) -> AsyncIterator[Play]:
    """Play a sample whose policy writes the turns; return its body and the texts that the tools answered."""
    run_machines(tmp_path)
    processes = AgentProcesses([])

    async def played(*turns: str, timeout_s: float = 20.0, disk_mb: int = 64, **changes: Any) -> Any:
        tokenizer = chat_tokenizer()
        agent = machine_agent(run_machines(tmp_path, disk_mb), processes, tokenizer, timeout_s)
        _, body = await play(agent, tokenizer, *turns, "Done.", max_tokens=8000, **changes)
        answers = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
        return body, answers

    yield played
    await processes.close()


async def test_files_and_the_working_folder_stay_between_calls(play_in_machine: Play, tmp_path: Path) -> None:
    body, answers = await play_in_machine(
        bash("mkdir -p /app/src && cd /app/src && echo one > first"),
        bash("pwd; cat first; x=1"),
        bash("cd gone; echo x=$x >&2; exit 3"),
        bash("cat <<'END'\nno end"),
        bash("pwd"),
    )
    assert answers[0] == "(no output)"
    assert answers[1] == "/app/src\none"
    assert answers[2].endswith("x=\n(exit code 3)")
    assert answers[4] == "/app/src"
    assert body.sample.failure is None
    machine = tmp_path / "sandboxes" / body.sample.machine
    assert (machine / "files/app/src/first").read_text() == "one\n"
    assert body.sample.machine.startswith("t-0-1.0/0-")
    calls = [each for turn in body.generation.turns for each in turn.calls]
    assert [each.outcome for each in calls] == ["ok"] * 5
    times = body.generation.sandbox
    assert times is not None
    assert times.num_commands == 5
    assert times.start_s > 0
    assert (times.failed, times.cpus) == (False, 0.0)
    assert times.exec_s + times.wait_s == pytest.approx(sum(each.call_s for each in calls), rel=0.1)
    assert all(each.call_s > 0 for each in calls)


async def test_the_machine_of_a_task_has_the_files_of_its_environment(play_in_machine: Play, tmp_path: Path) -> None:
    folder = write_sum_task(
        tmp_path / "sum", config="[environment]\nworkdir = '/workspace'\nenv = {NAME = '${PLAUDIT_NONE:-given}'}"
    )
    row = read_task(folder).row()
    _, answers = await play_in_machine(
        bash("pwd; cat a b; echo $NAME; ls /tests /solution"), extra_info=row["extra_info"]
    )
    assert answers[0].startswith("/workspace\n34given\n")
    assert answers[0].count("cannot access") == 2


async def test_files_are_read_written_and_edited(play_in_machine: Play) -> None:
    _, answers = await play_in_machine(
        call("write_file", path="src/a.py", content="x = 1\ny = 2\nz = 3\n"),
        call("read_file", path="/app/src/a.py", first_line=2, num_lines=1),
        call("edit_file", path="src/a.py", old="y = 2", new="y = 'é'"),
        call("read_file", path="src/a.py"),
        call("edit_file", path="src/a.py", old=" = ", new=""),
        call("read_file", path="src/b.py"),
        call("write_file", path=7, content=""),
        call("write_file", path="/usr/bin/x", content=""),
    )
    assert answers[:4] == ["written", "y = 2", "edited", "x = 1\ny = 'é'\nz = 3"]
    assert answers[4].startswith("Error: src/a.py holds the text 3 times, not once")
    assert "No such file" in answers[5]
    assert answers[6] == "Error: the argument path is missing or no text"
    assert "Read-only file system" in answers[7]


async def test_an_edit_changes_nothing_else(play_in_machine: Play) -> None:
    _, answers = await play_in_machine(
        bash("printf 'a\\r\\nb' > lines; printf 'a\\xf0\\x9f\\x98 b' > half"),
        call("edit_file", path="lines", old="b", new="c"),
        call("edit_file", path="half", old="b", new="c"),
        bash("od -An -tx1 lines; od -An -tx1 half"),
    )
    assert answers[1:3] == ["edited", "Error: half is too large to edit, or no text in UTF-8: change it with a command"]
    assert answers[3].split() == ["61", "0d", "0a", "63", "61", "f0", "9f", "98", "20", "62"]


async def test_what_the_policy_brings_about_does_not_end_its_sample(play_in_machine: Play) -> None:
    body, answers = await play_in_machine(
        bash("echo begun; sleep 100"),
        bash("head -c 20000000 /dev/zero > big"),
        bash("rm big; kill -9 $$"),
        bash("echo a\0b"),
        bash("echo alive"),
        timeout_s=3.0,
        disk_mb=8,
    )
    assert answers[0] == "begun\n(stopped: it did not end within 3 s)"
    assert answers[1] == "(stopped: your machine has no more disk)"
    assert answers[2] == "(exit code 137)"
    assert "put it into a file" in answers[3]
    assert answers[4] == "alive"
    assert body.sample.failure is None
    assert body.sample.machine


@pytest.mark.containers  # a container of its own takes a second of a core and ten in all
@pytest.mark.skipif(bool(why_none()), reason=why_none())
async def test_a_session_keeps_variables_functions_and_processes(tmp_path: Path) -> None:
    machines = RunMachines(tmp_path, ContainerProvider(MachineChoice(image=IMAGE)))
    described = sandbox_tools(AgentSpec(kind="tools", tools=[ToolSpec(sandbox="session", timeout_seconds=60.0)]))
    shared = MachineTools(machines, described, 1, keeps_variables=True)
    made = SampleMachine(shared, make_prompt("t-0-1.0"), 0)
    async with made:
        try:
            begins = "cd /tmp; x='a\nb'; export y=2; f() { echo f$1; }; sleep 987 > /dev/null 2>&1 & false"
            first = await made.call("bash", {"command": begins})
            second = await made.call(
                "bash", {"command": "echo \"$x\"; sh -c 'echo $y'; f 3; pwd; grep -l 987 /proc/[0-9]*/cmdline | wc -l"}
            )
        finally:
            machines.provider.remove(tmp_path / made.name)
    assert first.text == "(exit code 1)"
    assert second.text.split()[:5] == ["a", "b", "2", "f3", "/tmp"]
    assert int(second.text.split()[5]) >= 1


async def test_calls_of_a_turn_run_in_order(play_in_machine: Play) -> None:
    _, answers = await play_in_machine(
        "".join(bash(f"echo {each} >> log") for each in "abc"), bash("tr -d '\\n' < log")
    )
    assert answers[-1] == "abc"


async def test_a_machine_that_cannot_be_made_ends_the_sample_without_a_score(
    play_in_machine: Play, tmp_path: Path
) -> None:
    folder = write_sum_task(tmp_path / "sum")
    extra_info = read_task(folder).row()["extra_info"]
    (folder / "environment" / "Dockerfile").write_text("FROM scratch")
    body, _ = await play_in_machine(bash("true"), extra_info=extra_info)
    assert body.sample.failure is not None
    assert body.sample.failure.outcome == "data_error"
    assert "has changed since the run read it" in (body.sample.failure.reason or "")
    assert list((tmp_path / "sandboxes").glob("*/*")) == []


async def test_a_task_s_own_limit_ends_its_agent_whose_work_is_tested(play_in_machine: Play, tmp_path: Path) -> None:
    folder = write_sum_task(tmp_path / "sum", config="[agent]\ntimeout_sec = 1.0\n")
    right = bash("echo $((3 + 4)) > sum; sleep 100")
    body, _ = await play_in_machine(right, extra_info=read_task(folder).row()["extra_info"])
    assert (body.sample.failure, body.generation.finish_reason) == (None, "timeout")
    assert body.generation.is_truncated
    score = await VerifierScorer("tests", run_machines(tmp_path), 1).score(body.sample, Attempt(120.0))
    assert score.value == 1.0


async def test_machines_that_fail_are_recorded_with_their_samples(play_in_machine: Play, tmp_path: Path) -> None:
    (tmp_path / "sandboxes" / "t-0-1.0").write_text("in the place of the group's folder")
    body, _ = await play_in_machine(bash("true"))
    assert body.sample.failure is not None
    assert (body.sample.failure.outcome, body.sample.machine) == ("infra_error", "")
    assert body.generation.sandbox is not None
    assert body.generation.sandbox.failed


async def test_a_heartbeat_counts_machines_and_who_waits_for_one(tmp_path: Path) -> None:
    shared = MachineTools(run_machines(tmp_path), [], 1)

    def counted() -> tuple[int, int]:
        return shared.counts.work.held, shared.counts.work.waiting

    async with SampleMachine(shared, make_prompt("t-0-1.0"), 0):
        assert counted() == (1, 0)
        await shared.places.acquire()
        waiting = asyncio.ensure_future(SampleMachine(shared, make_prompt("t-0-1.0"), 1).__aenter__())
        await until(lambda: counted() == (1, 1))
        assert shared.counts.work.oldest_wait_s >= 0
        shared.places.release()
        second = await waiting
        assert counted() == (2, 0)
        assert second.record.claim_s > 0
        await second.__aexit__(None, None, None)
    assert counted() == (0, 0)


async def test_a_sample_that_is_given_up_leaves_no_machine(play_in_machine: Play, tmp_path: Path) -> None:
    playing = asyncio.ensure_future(play_in_machine(bash("touch begun; sleep 100"), timeout_s=100.0))
    began = tmp_path / "sandboxes"
    await until(lambda: list(began.glob("*/*/files/app/begun")), 120.0)
    playing.cancel()
    await asyncio.wait([playing])
    assert list(began.glob("*/*")) == []
