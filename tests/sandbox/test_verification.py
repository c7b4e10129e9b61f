"""Tests in the machine that an agent left behind: right rewards, and no reward for what an agent plants."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from machine_attacks import (
    ARTIFACT_ATTACKS,
    ATTACKS,
    CONTAINS_TEST,
    HONEST_LINKS,
    HONEST_LINKS_TEST,
    LINK_ATTACKS,
    SEPARATE_TEST,
    TEST,
)
from namespaces import HAS_NAMESPACES
from plaudit_sandbox.machine import Machine, MachineLimits, SeparateTests
from plaudit_sandbox.verification import Verdict, verify
from plaudit_wire.errors import DataError

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tmp_path.chmod(0o755)
    return Machine(tmp_path / "one", MachineLimits(memory_bytes=128 << 20, disk_bytes=24 << 20))


def verified(
    machine: Machine, test: str = TEST, *, timeout_s: float = 60.0, separate: SeparateTests | None = None
) -> Verdict:
    tests = machine.folder.parent / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    given = {"GIVEN": "yes"}
    return asyncio.run(verify(machine, tests, timeout_s=timeout_s, environment=given, separate=separate))


def agent(machine: Machine, command: str) -> None:
    asyncio.run(machine.run(["bash", "-c", command], timeout_s=10.0))


def test_a_right_answer_is_rewarded_and_a_wrong_one_not(machine: Machine) -> None:
    assert verified(machine).reward == 0.0
    agent(machine, "echo 42 > /app/answer")
    right = verified(machine)
    assert (right.outcome, right.reward, right.reason) == ("scored", 1.0, "")
    assert right.executed.output == "the answer is judged\n"


def test_the_machine_stays_as_the_agent_left_it(machine: Machine) -> None:
    agent(machine, "echo 42 > /app/answer")
    eats = TEST + "rm -rf /app/* /root/* /tmp/*\n"
    assert [verified(machine, eats).reward for _ in range(2)] == [1.0, 1.0]
    assert not list(machine.folder.parent.glob(".*verify*"))


@pytest.mark.alike
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_agent_plants_earns_nothing(machine: Machine, attack: str) -> None:
    agent(machine, attack)
    found = verified(machine)
    assert (found.outcome, found.reward) == ("scored", 0.0), found


@pytest.mark.alike
@pytest.mark.parametrize("attack", LINK_ATTACKS)
def test_a_link_to_what_only_the_tests_have_is_no_answer(machine: Machine, attack: str) -> None:
    agent(machine, attack)
    found = verified(machine, CONTAINS_TEST)
    assert (found.outcome, found.reward) == ("scored", 0.0), found


def test_links_to_all_else_stay(machine: Machine) -> None:
    agent(machine, HONEST_LINKS)
    assert verified(machine, HONEST_LINKS_TEST).reward == 1.0


def separate(machine: Machine, given: Path | None = None) -> SeparateTests:
    return SeparateTests(["/logs/artifacts", "/app/out"], machine.limits, "/app", given)


def test_separate_tests_find_the_artifacts_and_nothing_else_of_the_agent(machine: Machine, tmp_path: Path) -> None:
    (given := tmp_path / "given" / "out").mkdir(parents=True)
    (given / "old").write_text("of the task")
    (given.parent / "data").write_text("of the task")
    agent(
        machine,
        "echo planted | tee /root/planted /tmp/planted /app/planted /app/data; mkdir -p /var/planted /logs/verifier; "
        "echo 1 > /logs/verifier/reward.txt; mkdir -p /app/out/deep /logs/artifacts; echo 42 > /app/out/deep/found; "
        "ln -s deep/found /app/out/answer; ln /app/out/deep/found /app/twin; echo log > /logs/artifacts/log; "
        "chmod 0 /app/out/deep",
    )
    test = SEPARATE_TEST + "cat /app/data /logs/artifacts/log; ls /app/out; find / -name planted 2>/dev/null"
    for _ in range(2):
        found = verified(machine, test, separate=separate(machine, given.parent))
        assert (found.reward, found.executed.output) == (1.0, "of the tasklog\nanswer\ndeep\n"), found
    assert verified(machine, SEPARATE_TEST).reward == 0.0


@pytest.mark.parametrize("attack", ARTIFACT_ATTACKS)
def test_artifacts_that_deceive_earn_nothing(machine: Machine, attack: str) -> None:
    agent(machine, attack)
    found = verified(machine, SEPARATE_TEST, separate=separate(machine))
    assert (found.outcome, found.reward) == ("scored", 0.0), found


@pytest.mark.parametrize(
    ("test", "reward", "further"),
    [
        (
            'echo \'{"reward": 0.25, "speed": 3, "size": -1.5}\' > /logs/verifier/reward.json',
            0.25,
            {"speed": 3.0, "size": -1.5},
        ),
        ("echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 0}' > /logs/verifier/reward.json", 0.0, {}),
        ("printf ' -0.5\\n\\n' > /logs/verifier/reward.txt; exit 7", -0.5, {}),
        ("[ $GIVEN = yes ] && [ $HOME = /run ] && echo 1 > /logs/verifier/reward.txt", 1.0, {}),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(
    machine: Machine, test: str, reward: float, further: dict[str, float]
) -> None:
    found = verified(machine, test)
    assert (found.outcome, found.reward, found.rewards) == ("scored", reward, further)


@pytest.mark.parametrize(
    "test",
    [
        "#!/bin/bash -e\necho 1 > /logs/verifier/reward.txt; false; echo 0 > /logs/verifier/reward.txt",
        "#!/usr/bin/env -S bash -e\necho 1 > /logs/verifier/reward.txt; false; echo 0 > /logs/verifier/reward.txt",
        "#!/usr/bin/env python3\nprint(1, file=open('/logs/verifier/reward.txt', 'w'))",
        '#!/bin/sh\n[ "$BASH_VERSION" ] || echo 1 > /logs/verifier/reward.txt',
        '#!\n[ "$BASH_VERSION" ] && echo 1 > /logs/verifier/reward.txt',
    ],
)
def test_tests_run_by_the_interpreter_that_they_name(machine: Machine, test: str) -> None:
    assert verified(machine, test).reward == 1.0


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 3", "wrote neither /logs/verifier/reward.json nor reward.txt (test.sh ended with exit code 3)"),
        ("echo nan > /logs/verifier/reward.txt", "reward.txt holds 'nan' and no finite number"),
        ("echo '[1]' > /logs/verifier/reward.json", "reward.json is no object of numbers with 'reward' among them"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", "reward.json is no object of numbers"),
        (
            "echo '{\"reward\": 1e999}' > /logs/verifier/reward.json",
            "reward.json: holds a number beyond the largest of 64 bits",
        ),
        ("printf '%0.s[' $(seq 99999) > /logs/verifier/reward.json", "reward.json:"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "reward.txt is no file"),
        ("rmdir /logs/verifier; echo 1 > /app/reward.txt; ln -s /app /logs/verifier", "/logs/verifier is no folder"),
        ("mkfifo /logs/verifier/reward.txt", "reward.txt is no file"),
        ("mkdir /logs/verifier/reward.json", "reward.json is no file"),
        ("head -c 2000000 /dev/zero > /logs/verifier/reward.txt", "reward.txt is no file of at most 1 MiB"),
    ],
)
def test_a_reward_that_cannot_be_read_is_an_error_and_no_zero(machine: Machine, test: str, reason: str) -> None:
    found = verified(machine, test)
    assert (found.outcome, found.reward) == ("data_error", None)
    assert reason in found.reason


def test_tests_that_hang_end_as_a_timeout_and_a_full_machine_as_zero(machine: Machine) -> None:
    hung = verified(machine, "sleep 60", timeout_s=0.5)
    assert (hung.outcome, hung.reason) == ("timeout", "the tests did not end within 0.5 s")
    agent(machine, "ln -s /dev/null /app/null; ln -s answer /app/other; mkdir /app/d; ln -s ../development /app/d/e")
    assert verified(machine, "sleep 60", timeout_s=0.5).outcome == "timeout"
    full = verified(machine, "for i in 1 2 3 4; do head -c 9000000 /dev/zero > /tmp/$i; done; sleep 60")
    assert (full.outcome, full.reward) == ("scored", 0.0)
    assert "the machine's limit of disk" in full.reason


@pytest.mark.parametrize(
    "attack",
    [
        "mkfifo answer",
        "mkfifo pipe; ln pipe answer",
        "ln -s /dev/zero answer",
        "mkdir d; ln -s ../.. d/up; ln -s d/up/dev/zero answer",
        "mkdir x; ln -s /tmp x/d; ln -s x/d/../dev/zero answer",
        "ln -s /proc/self/fd/1 answer",
    ],
)
def test_a_file_at_which_tests_wait_for_ever_earns_zero_and_no_mask(machine: Machine, attack: str) -> None:
    agent(machine, attack)
    found = verified(machine, timeout_s=1.0)
    assert (found.outcome, found.reward) == ("scored", 0.0), found
    assert not found.reason or "a named pipe, or a link to /dev" in found.reason


@pytest.mark.parametrize(("depth", "name"), [(20, "d" * 250), pytest.param(3000, "d", marks=pytest.mark.long)])
def test_a_tree_too_deep_to_copy_earns_zero_and_is_removed(machine: Machine, depth: int, name: str) -> None:
    agent(machine, f'python3 -c \'import os\nfor _ in range({depth}): os.mkdir("{name}"); os.chdir("{name}")\'')
    deep = verified(machine, "echo 1 > /logs/verifier/reward.txt")
    assert (deep.outcome, deep.reward) == ("scored", 0.0)
    machine.remove()
    assert [path.name for path in machine.folder.parent.iterdir()] == ["tests"]


def test_tests_can_neither_be_changed_while_they_run_nor_make_anybody_wait(machine: Machine) -> None:
    tests = machine.folder.parent / "tests"
    tests.mkdir()
    os.mkfifo(tests / "pipe")
    assert verified(machine, "touch /tests/new 2>/dev/null || echo 1 > /logs/verifier/reward.txt").reward == 1.0


def test_tests_that_only_their_owner_may_read_run_all_the_same(machine: Machine) -> None:
    (tests := machine.folder.parent / "tests").mkdir(mode=0o700)
    (tests / "test.sh").touch(mode=0o600)
    agent(machine, "echo 42 > /app/answer")
    assert verified(machine).reward == 1.0
    assert (tests / "test.sh").stat().st_mode & 0o777 == 0o600


def test_a_task_without_tests_is_the_data_s_fault(machine: Machine) -> None:
    with pytest.raises(DataError, match=r"has no test\.sh"):
        asyncio.run(verify(machine, machine.folder.parent, timeout_s=1.0))
