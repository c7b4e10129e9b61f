"""The way of an agent's files into the pod of its tests, in real shells: what a test finds there, and what not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_pods import LocalCluster
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
from plaudit_sandbox.machine import MachineLimits, SeparateTests
from plaudit_sandbox.pod_manifests import PodSettings
from plaudit_sandbox.pods import PodMachine
from plaudit_sandbox.verification import Verdict, verify

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
LIMITS = MachineLimits(memory_bytes=128 << 20, disk_bytes=24 << 20)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[PodMachine]:
    tmp_path.chmod(0o755)
    made = PodMachine.new(LocalCluster(tmp_path / "pods", LIMITS).as_cluster(), PodSettings("image:1"), LIMITS)
    yield made
    made.remove()


def agent(machine: PodMachine, command: str) -> None:
    asyncio.run(machine.run(["bash", "-c", command], timeout_s=20.0))


def verified(
    machine: PodMachine,
    folder: Path,
    test: str = TEST,
    *,
    timeout_s: float = 60.0,
    separate: SeparateTests | None = None,
) -> Verdict:
    (tests := folder / "tests").mkdir(exist_ok=True)
    (tests / "test.sh").write_text(test)
    return asyncio.run(verify(machine, tests, timeout_s=60.0, separate=separate))


def test_a_right_answer_is_rewarded_however_often_it_is_verified(machine: PodMachine, tmp_path: Path) -> None:
    agent(machine, "echo 42 > /app/answer; ln /app/answer /app/twin; ln -s answer /app/link; ln -P /app/link /app/also")
    test = TEST + "cat /app/twin; readlink /app/link /app/also; rm -rf /app/*\n"
    for _ in range(2):
        found = verified(machine, tmp_path, test)
        assert (found.reward, found.executed.output) == (1.0, "the answer is judged\n42\nanswer\nanswer\n"), found


@pytest.mark.alike
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_agent_plants_earns_nothing(machine: PodMachine, tmp_path: Path, attack: str) -> None:
    agent(machine, attack)
    found = verified(machine, tmp_path)
    assert (found.outcome, found.reward) == ("scored", 0.0), found


@pytest.mark.alike
@pytest.mark.parametrize("attack", LINK_ATTACKS)
def test_a_link_to_what_only_the_tests_have_is_no_answer(machine: PodMachine, tmp_path: Path, attack: str) -> None:
    agent(machine, attack)
    found = verified(machine, tmp_path, CONTAINS_TEST)
    assert (found.outcome, found.reward) == ("scored", 0.0), found


def test_links_to_all_else_stay(machine: PodMachine, tmp_path: Path) -> None:
    agent(machine, HONEST_LINKS)
    assert verified(machine, tmp_path, HONEST_LINKS_TEST).reward == 1.0


@pytest.mark.alike
@pytest.mark.parametrize("attack", ARTIFACT_ATTACKS)
def test_artifacts_that_deceive_earn_nothing(machine: PodMachine, tmp_path: Path, attack: str) -> None:
    agent(machine, attack)
    own = SeparateTests(["/logs/artifacts", "/app/out"], LIMITS, "/app", None, "image:1")
    found = verified(machine, tmp_path, SEPARATE_TEST, separate=own)
    assert (found.outcome, found.reward) == ("scored", 0.0), found
