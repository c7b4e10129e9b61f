"""``kind: verifier``: tests of a task in the machine that a sample's agent left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from harbor_tasks import run_machines, sample_with_machine, write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_reward.machines import RunMachines
from plaudit_reward.scorer import Attempt, Score
from plaudit_reward.verifier import VerifierScorer, is_kept
from plaudit_sandbox.machine import Machine
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.records import Sample
from waiting import until

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")


@pytest.fixture
def machines(tmp_path: Path) -> RunMachines:
    return run_machines(tmp_path)


async def bash(machine: Machine, command: str) -> None:
    await machine.run(["bash", "-c", command], timeout_s=20.0)


async def verified(machines: RunMachines, sample: Sample, limit_s: float = 30.0) -> Score:
    return await VerifierScorer("tests", machines, 2).score(sample, Attempt(limit_s))


async def test_the_reward_numbers_and_output_of_the_tests_become_the_score(
    machines: RunMachines, tmp_path: Path
) -> None:
    test = """echo checking; echo '{"reward": 0.5, "value": 3, "speed": 2.5}' > /logs/verifier/reward.json"""
    sample, machine = sample_with_machine(machines, write_sum_task(tmp_path / "task", test))
    score = await verified(machines, sample)
    assert (score.outcome, score.value) == ("scored", 0.5)
    assert (score.extra["value"], score.extra["speed"], score.extra["output"]) == (3.0, 2.5, "checking")
    assert score.extra["verify_s"] > 0
    assert not is_kept("failed", machine.folder)


async def test_further_numbers_are_bounded_as_those_of_a_function(machines: RunMachines, tmp_path: Path) -> None:
    numbers = "{'reward': 1, 'k' * 100_000: 2} | {str(number): number for number in range(9000)}"
    test = f"python3 -c \"import json; json.dump({numbers}, open('/logs/verifier/reward.json', 'w'))\""
    score = await verified(machines, sample_with_machine(machines, write_sum_task(tmp_path / "task", test))[0])
    assert score.value == 1.0
    assert len(msgspec.json.encode(score)) < 10_000


async def test_samples_of_a_task_earn_what_their_own_machines_hold(machines: RunMachines, tmp_path: Path) -> None:
    task = write_sum_task(tmp_path / "task")
    right, machine = sample_with_machine(machines, task, 0)
    wrong, _ = sample_with_machine(machines, task, 1)
    await bash(machine, "cd /app; echo $(($(cat a) + $(cat b))) > sum")
    assert [(await verified(machines, each)).value for each in (right, wrong)] == [1.0, 0.0]


async def test_separate_tests_judge_the_artifacts_in_a_machine_as_it_was_at_the_beginning(
    machines: RunMachines, tmp_path: Path
) -> None:
    config = "artifacts = ['/app/sum']\n[verifier]\nenvironment_mode = 'separate'"
    test = 'if [ "$(cat sum)" = $(($(cat a) + $(cat b))) ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
    task = write_sum_task(tmp_path / "task", test, config)
    right, machine = sample_with_machine(machines, task, 0)
    changes, other = sample_with_machine(machines, task, 1)
    nothing, _ = sample_with_machine(machines, task, 2)
    await bash(machine, "echo 7 > sum; rm a")
    await bash(other, "echo 1 > a; echo 1 > b; echo 2 > sum; echo 1 > /logs/verifier/reward.txt")
    assert [(await verified(machines, each)).value for each in (right, changes, nothing)] == [1.0, 0.0, 0.0]


async def test_a_second_delivery_gets_the_same_verdict(machines: RunMachines, tmp_path: Path) -> None:
    test = "echo 0.$RANDOM$RANDOM > /logs/verifier/reward.txt"
    sample, _ = sample_with_machine(machines, write_sum_task(tmp_path / "task", test))
    first = await verified(machines, sample)
    assert await verified(machines, sample) == first


@pytest.mark.parametrize(
    ("test", "config", "outcome", "reason"),
    [
        ("exit 1", "", "data_error", "wrote neither"),
        ("sleep 60", "[verifier]\ntimeout_sec = 0.3", "timeout", "did not end within 0.3 s"),
        ("echo nan > /logs/verifier/reward.txt", "", "data_error", "no finite number"),
    ],
)
async def test_tests_without_a_reward_are_no_zero(
    machines: RunMachines, tmp_path: Path, test: str, config: str, outcome: str, reason: str
) -> None:
    sample, machine = sample_with_machine(machines, write_sum_task(tmp_path / "task", test, config))
    score = await verified(machines, sample)
    assert (score.outcome, score.value) == (outcome, None)
    assert reason in (score.reason or "")
    assert is_kept("failed", machine.folder)


async def test_the_scorers_own_limit_ends_the_tests(machines: RunMachines, tmp_path: Path) -> None:
    sample, _ = sample_with_machine(machines, write_sum_task(tmp_path / "task", "sleep 60"))
    assert (await verified(machines, sample, limit_s=0.3)).outcome == "timeout"


async def test_a_machine_that_is_gone_is_an_infrastructure_failure(machines: RunMachines, tmp_path: Path) -> None:
    sample, machine = sample_with_machine(machines, write_sum_task(tmp_path / "task"))
    machine.remove()
    with pytest.raises(InfrastructureError, match="is gone"):
        await verified(machines, sample)
    assert not machine.folder.exists()


async def test_only_a_samples_own_machine_counts(machines: RunMachines, tmp_path: Path) -> None:
    task = write_sum_task(tmp_path / "task")
    sample, _ = sample_with_machine(machines, task, 0)
    other, _ = sample_with_machine(machines, task, 1)
    for name in (other.machine, "../task/0-ab", "t-0-1.0/../t-0-1.0/0-ab", ""):
        with pytest.raises(DataError, match=r"not its own|has no machine"):
            await verified(machines, msgspec.structs.replace(sample, machine=name))


async def test_a_task_that_changed_during_the_run_gives_no_reward(machines: RunMachines, tmp_path: Path) -> None:
    task = write_sum_task(tmp_path / "task")
    sample, _ = sample_with_machine(machines, task)
    changed = msgspec.structs.replace(sample, extra_info={**sample.extra_info, "digest": "0" * 64})
    with pytest.raises(DataError, match="has changed since the run read it"):
        await verified(machines, changed)


ATTACKS = {
    "a reward of its own": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a link to a reward": "mkdir -p /logs/verifier; echo 1 > /app/r; ln -sf /app/r /logs/verifier/reward.json",
    "a verdict": 'for f in / /app /tmp; do echo \'{"outcome":"scored","value":1}\' > $f/verdict-tests.json; done',
    "tests of its own": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "a shell's start": "echo 'cat() { echo 7; }' | tee /root/.bashrc /root/.profile /root/.bash_env",
    "programs in its path": "mkdir -p /root/bin; printf '#!/bin/sh\\necho 7' > /root/bin/cat; chmod +x /root/bin/cat",
    "a daemon": "(while :; do echo 1 > /logs/verifier/reward.txt; done) & disown; sleep 0.1",
    "a full disk": "head -c 100000000 /dev/zero > /app/big",
    "no end": "echo > /app/sum; sleep 300",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_earns_nothing(machines: RunMachines, tmp_path: Path, attack: str) -> None:
    sample, machine = sample_with_machine(machines, write_sum_task(tmp_path / "task"))
    await machine.run(["bash", "-c", ATTACKS[attack]], timeout_s=2.0)
    score = await verified(machines, sample)
    assert (score.outcome, score.value) == ("scored", 0.0)


WORKER = """
import asyncio, sys
from pathlib import Path
import msgspec
from plaudit_reward.machines import RunMachines
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_reward.scorer import Attempt
from plaudit_reward.verifier import VerifierScorer
from plaudit_wire.records import Sample
sample = msgspec.json.decode(sys.argv[2], type=Sample)
scorer = VerifierScorer("tests", RunMachines(Path(sys.argv[1]), ProcessProvider(MachineChoice())), 1)
asyncio.run(scorer.score(sample, Attempt(600.0)))
"""


async def test_a_worker_killed_in_the_middle_leaves_the_tests_to_the_next_one(
    machines: RunMachines, tmp_path: Path
) -> None:
    """The first run of the tests changes the sum and waits for ever; the second one finds what the agent left."""
    test = 'before=$(cat sum); echo 9 > sum; [ -e slow ] && sleep 600; echo "0.$before" > /logs/verifier/reward.txt'
    sample, machine = sample_with_machine(machines, write_sum_task(tmp_path / "task", test))
    await bash(machine, "echo 7 > sum; touch slow")
    command = [sys.executable, "-c", WORKER, str(machines.folder), msgspec.json.encode(sample).decode()]
    worker = subprocess.Popen(command)  # noqa: ASYNC220 (it begins at once)
    try:
        copies = f".{machine.folder.name}-verify-*/machine/files/app/sum"
        await until(lambda: any(path.read_text() == "9\n" for path in machine.folder.parent.glob(copies)), 120.0)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert is_kept("failed", machine.folder)
    await bash(machine, "rm slow")
    assert (await verified(machines, sample)).value == 0.7
    assert [path.name for path in machine.folder.parent.iterdir()] == [machine.folder.name]
