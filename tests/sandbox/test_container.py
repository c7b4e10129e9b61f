"""Machines in containers of a real engine: what they keep, what ends them, and what an agent's tricks earn."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from container_images import IMAGE, why_none
from machine_attacks import (
    ARTIFACT_ATTACKS,
    ATTACKS,
    CONTAINS_TEST,
    HONEST_LINKS,
    HONEST_LINKS_TEST,
    LINK_ATTACKS,
    NO_START,
    PROGRAM_ATTACKS,
    SEPARATE_TEST,
    TEST,
)
from plaudit_sandbox.container import ContainerMachine, ContainerSettings
from plaudit_sandbox.container_engine import find_engine
from plaudit_sandbox.machine import CommandEnd, MachineLimits, SeparateTests
from plaudit_sandbox.verification import Verdict, verify
from plaudit_wire.errors import DataError, InfrastructureError
from waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.skipif(bool(why_none()), reason=why_none())]
LIMITS = MachineLimits(
    memory_bytes=128 << 20, disk_bytes=24 << 20, processes=48, file_bytes=16 << 20, output_bytes=2000
)


@pytest.fixture
def machine() -> Iterator[ContainerMachine]:
    made = ContainerMachine.new(find_engine(), ContainerSettings(IMAGE), LIMITS)
    yield made
    made.remove()


def bash(machine: ContainerMachine, command: str, timeout_s: float = 60.0, **more: object) -> CommandEnd:
    return asyncio.run(machine.run(["bash", "-c", command], timeout_s=timeout_s, **more))  # type: ignore[arg-type]


def verified(machine: ContainerMachine, folder: Path, test: str = TEST, *, timeout_s: float = 60.0) -> Verdict:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    return asyncio.run(verify(machine, tests, timeout_s=timeout_s, environment={"GIVEN": "yes"}))


def test_files_and_processes_stay_from_command_to_command(machine: ContainerMachine, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("of the task")
    machine.upload(tmp_path, "/app")
    first = bash(machine, "echo kept > a; nohup sleep 987 >/dev/null 2>&1 & echo started; cat given; exit 3")
    assert (first.ending, first.exit_code) == ("exited", 3)
    assert sorted(first.output.split()) == ["of", "started", "task", "the"]
    second = bash(machine, "cat a -; pwd; grep -l 987 /proc/[0-9]*/cmdline | wc -l", stdin=b"read\n")
    assert second.output.split()[:3] == ["kept", "read", "/app"]
    assert int(second.output.split()[3]) >= 1


@pytest.mark.parametrize(
    "command",
    [
        "mount -t tmpfs none /mnt",
        "rmdir /tests || mv /tests /t || touch /tests/planted",
        "mv /logs /l || umount /logs",
        "unshare --mount true",
        "mknod /tmp/disk b 254 0",
        "exec 3<>/dev/tcp/127.0.0.1/22",
        "test $(ls /sys/class/net | grep -vc '^lo$') != 0",
        "echo b > /proc/sysrq-trigger",
        "head -c 20000000 /dev/zero > /tmp/large",
    ],
)
def test_what_a_container_must_not_do_fails(machine: ContainerMachine, command: str) -> None:
    assert bash(machine, command).exit_code != 0


def test_a_container_stops_at_its_limits_and_goes_on(machine: ContainerMachine) -> None:
    time = bash(machine, "echo kept > /root/a; sleep 60", timeout_s=2.0)
    memory = bash(machine, 'exec python3 -c "x = bytearray(256 << 20); import time; time.sleep(60)"')
    disk = bash(machine, "for i in 1 2 3 4; do head -c 8000000 /dev/zero > /var/$i; done; sleep 60")
    assert (time.ending, memory.ending, disk.ending) == ("timeout", "memory", "disk")
    bash(machine, "rm -f /var/[0-9]")
    bomb = bash(machine, "for i in $(seq 99); do sleep 60 & done; echo survived")
    assert "survived" not in bomb.output or "fork" in bomb.output
    bash(machine, "kill -9 -1")
    assert bash(machine, "cat /root/a").output == "kept\n"


def test_a_right_answer_is_rewarded_however_often_it_is_verified(machine: ContainerMachine, tmp_path: Path) -> None:
    assert verified(machine, tmp_path).reward == 0.0
    bash(machine, "echo 42 > /app/answer")
    eats = TEST + "rm -rf /app/* /root/*\n"
    rewards = [verified(machine, tmp_path, eats) for _ in range(2)]
    assert [(found.outcome, found.reward, found.executed.output) for found in rewards] == [
        ("scored", 1.0, "the answer is judged\n")
    ] * 2


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_agent_plants_earns_nothing(machine: ContainerMachine, tmp_path: Path, attack: str) -> None:
    bash(machine, attack, timeout_s=20.0)
    found = verified(machine, tmp_path)
    assert found.reward == 0.0, found
    assert found.outcome in ("scored", "tampered")


def test_a_container_that_its_agent_lets_not_start_again_is_no_error(machine: ContainerMachine, tmp_path: Path) -> None:
    assert bash(machine, NO_START).exit_code == 0
    find_engine().call("kill", machine.name)
    refused = bash(machine, "true")
    assert (refused.exit_code, refused.output.startswith("no program can be started: ")) == (126, True), refused
    found = verified(machine, tmp_path)
    assert (found.outcome, found.reward) == ("tampered", 0.0), found


def test_a_container_that_no_engine_starts_is_an_error(machine: ContainerMachine) -> None:
    bash(machine, NO_START)
    find_engine().call("kill", machine.name)
    too_small = ContainerMachine(find_engine(), machine.name, machine.settings, replace(LIMITS, memory_bytes=1024))
    with pytest.raises(InfrastructureError, match="executable file"):
        bash(too_small, "true")


@pytest.mark.parametrize("attack", PROGRAM_ATTACKS)
def test_replaced_programs_are_an_outcome_of_their_own(machine: ContainerMachine, tmp_path: Path, attack: str) -> None:
    bash(machine, attack, timeout_s=20.0)
    bash(machine, "true", timeout_s=20.0)  # whether a further program can start there or not
    found = verified(machine, tmp_path)
    assert (found.outcome, found.reward) == ("tampered", 0.0), found


def test_what_an_honest_agent_changes_is_no_tampering(machine: ContainerMachine, tmp_path: Path) -> None:
    bash(
        machine,
        "echo 42 | tee /answer.txt /app/answer $'/app/a\nb'; mkdir -p /etc/nginx /data; touch /etc/nginx/x /data/x; "
        "echo 'them:x:1001:' >> /etc/group; mkdir -p /etc/ssl/certs; echo x > /etc/ssl/certs/mine.pem; "
        "python3 -c 'import json, unittest, http.client'",
    )
    assert verified(machine, tmp_path).reward == 1.0


@pytest.mark.alike
@pytest.mark.parametrize("attack", LINK_ATTACKS)
def test_a_link_to_what_only_the_tests_have_is_no_answer(
    machine: ContainerMachine, tmp_path: Path, attack: str
) -> None:
    bash(machine, attack)
    found = verified(machine, tmp_path, CONTAINS_TEST)
    is_text = "xff" not in attack  # engines take names in UTF-8 alone, so others stay
    assert (found.outcome, found.reward) == ("scored" if is_text else "tampered", 0.0), found


def test_a_link_in_a_folder_that_its_user_may_not_write_to_is_no_answer(tmp_path: Path) -> None:
    with of_image(tmp_path, "RUN mkdir -p /app && chmod 777 /app", "USER 1000") as machine:
        bash(machine, "mkdir /app/d; ln -s /tests/test.sh /app/d/answer; chmod 555 /app/d")
        found = verified(machine, tmp_path, CONTAINS_TEST.replace("/app/answer", "/app/d/answer"))
        assert (found.outcome, found.reward) == ("scored", 0.0), found


def test_links_to_all_else_stay(machine: ContainerMachine, tmp_path: Path) -> None:
    bash(machine, HONEST_LINKS)
    assert verified(machine, tmp_path, HONEST_LINKS_TEST).reward == 1.0


def test_more_links_than_can_be_removed_are_tampering(machine: ContainerMachine, tmp_path: Path) -> None:
    many = "import os\nfor number in range(5000): os.symlink('/tests/test.sh', '/app/answer' + '%d' % number * 9)"
    bash(machine, f'python3 -c "{many}"; ln -s /tests/test.sh /app/answer')
    assert verified(machine, tmp_path, CONTAINS_TEST).outcome == "tampered"


@contextlib.contextmanager
def of_image(folder: Path, *lines: str) -> Iterator[ContainerMachine]:
    """Yield a machine of an image that is built of these lines."""
    engine, name = find_engine(), f"localhost/plaudit-boxes:{secrets.token_hex(6)}"
    (folder / "Dockerfile").write_text("\n".join((f"FROM {IMAGE}", *lines)))
    of_podman = ("--format", "docker", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384")
    options = of_podman if engine.program == "podman" else ()
    engine.call("build", "--quiet", *options, "--tag", name, str(folder))
    try:
        made = ContainerMachine.new(engine, ContainerSettings(name), LIMITS)
        try:
            yield made
        finally:
            made.remove()
    finally:
        engine.remove_images(name)


def test_programs_below_the_workdir_are_the_agent_s_but_those_of_every_script(tmp_path: Path) -> None:
    forged = "printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > .venv/bin/bash; chmod +x .venv/bin/bash"
    with of_image(tmp_path, "WORKDIR /app", "RUN mkdir -p .venv/bin", "ENV PATH=/app/.venv/bin:$PATH") as machine:
        bash(machine, "ln -s /usr/bin/python3 .venv/bin/python; cp /bin/true .venv/bin/pytest; echo 42 > answer")
        assert verified(machine, tmp_path).reward == 1.0
        bash(machine, f"rm answer; {forged}")
        assert verified(machine, tmp_path).outcome == "tampered"


def test_programs_behind_the_links_of_the_path_are_the_image_s(tmp_path: Path) -> None:
    made = "mkdir -p /root/.own/bin && cp /bin/cat /root/.own/bin/look && ln -s /root/.own/bin/look /usr/local/bin/look"
    test = TEST.replace("cat /app", "look /app")
    with of_image(tmp_path, f"RUN {made}") as machine:
        bash(machine, "echo 42 > /app/answer; mkdir /root/.own/share; touch /root/.own/share/x /root/x")
        assert verified(machine, tmp_path, test).reward == 1.0
        bash(machine, "printf '#!/bin/sh\necho 42\n' > /root/.own/bin/look")
        assert verified(machine, tmp_path, test).outcome == "tampered"


def test_what_an_image_has_its_programs_load_is_no_agent_s(tmp_path: Path) -> None:
    with of_image(tmp_path, "RUN touch /root/begin", "ENV BASH_ENV=/root/begin PYTHONPATH=/data") as machine:
        bash(machine, "echo 42 > /app/answer; mkdir /data; echo 1 > /data/module.py")
        assert verified(machine, tmp_path).reward == 1.0
        bash(machine, "rm /app/answer; echo 'cat() { echo 42; }' > /root/begin")
        assert verified(machine, tmp_path).outcome == "tampered"


def test_volumes_of_an_image_are_folders_of_the_machine(tmp_path: Path) -> None:
    test = TEST.replace("/app/answer", "/data/answer")
    with of_image(tmp_path, "RUN mkdir /data && echo old > /data/old", "VOLUME /data") as machine:
        assert bash(machine, "cat /data/old; echo 42 > /data/answer").output == "old\n"
        assert verified(machine, tmp_path, test).reward == 1.0
        filled = bash(machine, "for i in 1 2 3; do head -c 10000000 /dev/zero > /data/$i; done; sleep 60")
        assert filled.ending == "disk"


def test_nothing_of_an_image_runs_by_itself(tmp_path: Path) -> None:
    with of_image(tmp_path, "HEALTHCHECK --interval=1s CMD touch /app/checked") as machine:
        assert bash(machine, "sleep 3; ls /app").output == ""
        assert find_engine().call("inspect", "--format", "{{.Config.Healthcheck}}", machine.name).find("checked") == -1


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 1 > /logs/verifier/reward.txt; sleep 100 & kill -9 $!; wait $!", 1.0),
        ("echo 1 > /logs/verifier/reward.txt; exit 126", 1.0),
        ("exec python3 -c 'x = bytearray(300 << 20)'", 0.0),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_killed_command_of_the_tests_is_no_lack_of_memory(
    tmp_path: Path, test: str, reward: float, apart: bool
) -> None:
    machine = ContainerMachine.new(find_engine(), ContainerSettings(IMAGE, has_separate_tests=apart), LIMITS)
    try:
        found = verified_apart(machine, tmp_path, test) if apart else verified(machine, tmp_path, test)
    finally:
        machine.remove()
    assert (found.outcome, found.reward) == ("scored", reward), found


def test_long_logs_of_the_tests_hide_no_reward(tmp_path: Path) -> None:
    limits = replace(LIMITS, disk_bytes=200 << 20, file_bytes=100 << 20)
    machine = ContainerMachine.new(find_engine(), ContainerSettings(IMAGE), limits)
    try:
        long = "head -c 80000000 /dev/zero > /logs/verifier/a; echo 1 > /logs/verifier/reward.txt"
        assert verified(machine, tmp_path, long).reward == 1.0
    finally:
        machine.remove()


@pytest.fixture
def separate() -> Iterator[ContainerMachine]:
    made = ContainerMachine.new(find_engine(), ContainerSettings(IMAGE, has_separate_tests=True), LIMITS)
    yield made
    made.remove()


def verified_apart(machine: ContainerMachine, folder: Path, test: str, given: Path | None = None) -> Verdict:
    (tests := folder / "tests").mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    own = SeparateTests(["/logs/artifacts", "/app/out"], LIMITS, "/app", given, IMAGE)
    return asyncio.run(verify(machine, tests, timeout_s=60.0, separate=own))


def test_separate_tests_find_the_artifacts_and_nothing_else_of_the_agent(
    separate: ContainerMachine, tmp_path: Path
) -> None:
    (given := tmp_path / "given" / "out").mkdir(parents=True)
    (given / "old").write_text("of the task")
    (given.parent / "data").write_text("of the task")
    bash(
        separate,
        "echo planted | tee /root/planted /tmp/planted /app/planted /app/data; mkdir -p /app/out/deep /logs/artifacts; "
        "echo 1 > /logs/verifier/reward.txt; echo 42 > /app/out/deep/found; ln -s deep/found /app/out/answer; "
        "echo log > /logs/artifacts/log; chmod 0 /app/out/deep; cp /bin/true /usr/bin/grep; cp /bin/true /usr/bin/cat",
    )
    test = SEPARATE_TEST + "cat /app/data /logs/artifacts/log; ls /app/out"
    for _ in range(2):
        found = verified_apart(separate, tmp_path, test, given.parent)
        assert (found.reward, found.executed.output) == (1.0, "of the tasklog\nanswer\ndeep\n"), found
    assert find_engine().call("ps", "--all", "--quiet", "--filter", f"name={separate.name}-verify") == ""


@pytest.mark.parametrize("attack", ARTIFACT_ATTACKS)
def test_artifacts_that_deceive_earn_nothing(separate: ContainerMachine, tmp_path: Path, attack: str) -> None:
    bash(separate, attack, timeout_s=20.0)
    found = verified_apart(separate, tmp_path, SEPARATE_TEST)
    assert (found.outcome, found.reward) == ("scored", 0.0), found


def test_compiled_python_is_no_tampering_and_is_not_believed(machine: ContainerMachine, tmp_path: Path) -> None:
    forged = (
        "import importlib.util, pathlib, py_compile, random, sys; source = pathlib.Path(random.__file__); "
        "pathlib.Path('/tmp/r.py').write_text('random = lambda: 2'); "
        "target = importlib.util.cache_from_source(source); "
        "py_compile.compile('/tmp/r.py', target, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    assert bash(machine, f'python3 -c "{forged}"; echo 42 > /app/answer').exit_code == 0
    for test in (TEST, TEST.replace("python3 -c", "python3 -I -c")):
        found = verified(machine, tmp_path, test)
        assert (found.outcome, found.reward) == ("scored", 1.0), found


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 3", "wrote neither /logs/verifier/reward.json nor reward.txt (test.sh ended with exit code 3)"),
        ("echo nan > /logs/verifier/reward.txt", "reward.txt holds 'nan' and no finite number"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "reward.txt is no file"),
        ("mkfifo /logs/verifier/reward.txt", "reward.txt is no file"),
        ("mkdir /logs/verifier/reward.json", "reward.json is no file"),
        ("head -c 2000000 /dev/zero > /logs/verifier/reward.txt", "reward.txt is no file of at most 1 MiB"),
    ],
)
def test_a_reward_that_cannot_be_read_is_an_error_and_no_zero(
    machine: ContainerMachine, tmp_path: Path, test: str, reason: str
) -> None:
    found = verified(machine, tmp_path, test)
    assert (found.outcome, found.reward) == ("data_error", None)
    assert reason in found.reason


def test_tests_that_hang_are_a_timeout_and_those_that_fill_the_machine_zero(
    machine: ContainerMachine, tmp_path: Path
) -> None:
    hung = verified(machine, tmp_path, "sleep 60", timeout_s=1.0)
    assert (hung.outcome, hung.reason) == ("timeout", "the tests did not end within 1 s")
    full = verified(machine, tmp_path, "for i in 1 2 3 4; do head -c 9000000 /dev/zero > /tmp/$i; done; sleep 60")
    assert (full.outcome, full.reward) == ("scored", 0.0)
    holes = bash(machine, "truncate -s 10M /app/1 /app/2 /app/3")  # which a copy would write out
    assert (holes.ending, verified(machine, tmp_path).executed.ending) == ("disk", "disk")


@pytest.mark.parametrize(
    "attack", ["mkfifo /app/answer", "mkdir /app/x; ln -s /tmp /app/x/d; ln -s x/d/../dev/zero /app/answer"]
)
def test_a_file_at_which_tests_wait_for_ever_earns_zero_and_no_mask(
    machine: ContainerMachine, tmp_path: Path, attack: str
) -> None:
    bash(machine, attack)
    found = verified(machine, tmp_path, timeout_s=4.0)
    assert (found.outcome, found.reward) == ("scored", 0.0), found
    assert "a named pipe, or a link to /dev" in found.reason


def test_a_variable_that_a_container_cannot_be_given_and_an_image_that_is_nowhere_are_refused(
    machine: ContainerMachine,
) -> None:
    with pytest.raises(DataError, match="'A' holds a line break"):
        bash(machine, "true", environment={"A": "x\ny"})
    assert bash(machine, 'echo "$A"', environment={"A": ' "x" #$y '}).output == ' "x" #$y \n'
    with pytest.raises(InfrastructureError, match="pull"):
        ContainerMachine.new(find_engine(), ContainerSettings("localhost/plaudit-nowhere:1"), LIMITS)


LEAVES_ONE = """
import sys, time
from plaudit_sandbox.container import ContainerMachine, ContainerSettings
from plaudit_sandbox.container_engine import find_engine
from plaudit_sandbox.machine import MachineLimits
settings = ContainerSettings(sys.argv[1], labels={"run": sys.argv[2]})
print(ContainerMachine.new(find_engine(), settings, MachineLimits()).name, flush=True)
time.sleep(1000)
"""


async def test_what_a_killed_process_leaves_is_removed_and_nothing_else(machine: ContainerMachine) -> None:
    engine = find_engine()
    command = [sys.executable, "-c", LEAVES_ONE, IMAGE, "of-a-test"]
    with await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = (await asyncio.to_thread(process.stdout.readline)).strip()
        await asyncio.to_thread(engine.remove_orphans)
        assert await asyncio.to_thread(engine.has_container, name)
        process.kill()
    await until(lambda: engine.remove_orphans() == [] and not engine.has_container(name))
    assert engine.has_container(machine.name)


def test_a_run_s_containers_are_removed_by_its_label() -> None:
    engine = find_engine()
    mine, other = (
        ContainerMachine.new(engine, ContainerSettings(IMAGE, labels={"run": run}), LIMITS)
        for run in ("of-a-test-1", "of-a-test-2")
    )
    try:
        assert len(engine.remove_of("of-a-test-1")) == 1
        assert not engine.has_container(mine.name)
        assert engine.has_container(other.name)
    finally:
        other.remove()
