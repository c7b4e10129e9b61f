"""Machines of a run in containers: the same interface, verdicts and ends as those of folders."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from container_images import IMAGE, why_none
from harbor_tasks import GROUP, TEST, played_sample, write_sum_task
from plaudit_job.spec.rljob import SandboxesSpec
from plaudit_job.tasks import Task, read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.pod_provider import PodProvider
from plaudit_reward.providers import PROVIDERS, ContainerProvider, MachineChoice, ProcessProvider, provider_of
from plaudit_reward.scorer import Attempt, Score
from plaudit_reward.verifier import VerifierScorer
from plaudit_sandbox.container_engine import find_engine
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.records import Sample
from plaudit_workers.training.machines import EndedMachines
from plaudit_workers.training.schedule import GroupInFlight, TrainerLedger

SEPARATE = "artifacts = ['/srv/x', '/var/lib/x']\n[verifier]\n"
IN_CONTAINERS = pytest.mark.skipif(bool(why_none()), reason=why_none())


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[RunMachines]:
    provider = provider_of(SandboxesSpec(provider="container", image=IMAGE, memory="256Mi", disk="64Mi"), tmp_path)
    (tmp_path / SANDBOXES).mkdir()
    yield RunMachines(tmp_path / SANDBOXES, provider)
    provider.end()


def containers(machines: RunMachines) -> set[str]:
    """Return the names of the run's containers, as the engine lists them."""
    assert isinstance(machines.provider, ContainerProvider)
    label = f"label=plaudit.dev/run={machines.provider.run}"
    return set(find_engine().call("ps", "--all", "--filter", label, "--format", "{{.Names}}").split())


def sample_of(machines: RunMachines, task_folder: Path, command: str, index: int = 0) -> Sample:
    return played_sample(machines, task_folder, command, index)[0]


def verified(machines: RunMachines, sample: Sample) -> Score:
    return asyncio.run(VerifierScorer("tests", machines, 1).score(sample, Attempt(120.0)))


@pytest.mark.containers
@IN_CONTAINERS
def test_samples_in_containers_earn_what_they_left_and_end_with_their_group(
    machines: RunMachines, tmp_path: Path
) -> None:
    task = write_sum_task(tmp_path / "task")
    right, wrong = (sample_of(machines, task, f"echo {text} > sum", index) for index, text in enumerate("78"))
    tampers = sample_of(machines, task, "echo 7 > sum; cp /bin/true /usr/bin/cat", 2)
    assert [verified(machines, sample).value for sample in (right, wrong, tampers)] == [1.0, 0.0, 0.0]
    assert "changed programs" in str(verified(machines, tampers).extra["failure"])
    assert len(containers(machines)) == 3
    machines.provider.remove(machines.folder / wrong.machine)
    assert len(containers(machines)) == 2
    with pytest.raises(InfrastructureError, match="is gone"):
        machines.find(wrong.machine, GROUP, 1, None)

    ledger = TrainerLedger()
    ledger.admit("train", GroupInFlight(GROUP, 0, 0, 1, 0))
    asyncio.run(EndedMachines(tmp_path, "none", ledger, machines.provider).end())
    assert containers(machines) == set()
    assert not (tmp_path / SANDBOXES).exists()


MAKES_ONE = """
import os, signal, sys
from pathlib import Path
from plaudit_job.spec.rljob import SandboxesSpec
from plaudit_reward.machines import RunMachines
from plaudit_reward.providers import provider_of
from plaudit_sandbox.container import ContainerMachine
run = Path(sys.argv[1])
machines = RunMachines(run / "sandboxes", provider_of(SandboxesSpec(provider="container", image=sys.argv[2]), run))
if sys.argv[3] == "during":
    ContainerMachine.upload = ContainerMachine.remove = lambda *_: None
    create = ContainerMachine.create
    ContainerMachine.create = lambda self: (create(self), os.kill(os.getpid(), signal.SIGKILL))
machines.make("t-0-1.0", 0, None)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.containers
@IN_CONTAINERS
@pytest.mark.parametrize("when", ["during", "after"])
def test_a_killed_rollout_s_container_goes_with_its_folder(machines: RunMachines, tmp_path: Path, when: str) -> None:
    ended = subprocess.run([sys.executable, "-c", MAKES_ONE, str(tmp_path), IMAGE, when])
    assert ended.returncode == -signal.SIGKILL
    assert len(containers(machines)) == 1
    find_engine().remove_orphans()  # its folder holds it, although its process has ended
    assert len(containers(machines)) == 1
    (folder,) = machines.folder.glob("*/*")
    if when == "after":
        os.rename(tmp_path / SANDBOXES, tmp_path / "removed")
        find_engine().remove_orphans()
    else:
        machines.provider.remove(folder)
    assert containers(machines) == set()


@pytest.mark.containers
@IN_CONTAINERS
def test_separate_tests_in_containers_judge_the_artifacts_alone(machines: RunMachines, tmp_path: Path) -> None:
    config = "artifacts = ['/app/sum']\n[verifier.environment]\ncpus = 1\nmemory_mb = 128\n"
    config += f"[environment]\ndocker_image = '{IMAGE}'"  # which does not hold the files of environment/
    task = write_sum_task(tmp_path / "task", 'cat a; cat sum; [ "$(cat sum)" = 7 ]; ' + TEST, config)
    sample = sample_of(machines, task, "echo 7 > sum; echo 9 > a; cp /bin/true /usr/bin/cat; echo 1 > /tests/test.sh")
    score = verified(machines, sample)
    assert (score.value, score.extra["output"]) == (1.0, "37")
    assert len(containers(machines)) == 1


@pytest.mark.parametrize(
    ("provider", "config", "problem"),
    [
        (ProcessProvider, SEPARATE + "environment_mode = 'separate'", ""),
        (ProcessProvider, "artifacts = ['/usr/src/x']", ""),
        (
            ProcessProvider,
            "artifacts = ['/usr/src/x']\n[verifier.environment]",
            "task task: the artifact /usr/src/x is in",
        ),
        (
            ProcessProvider,
            SEPARATE + "environment = {docker_image = 'a'}",
            "task task: its tests have the image a, and",
        ),
        (PodProvider, SEPARATE + "environment = {workdir = '/etc'}", "task task: the workdir /etc holds programs"),
        (PodProvider, SEPARATE + "environment = {gpus = 2}", "task task needs 2 GPUs, which no provider gives"),
        (ProcessProvider, SEPARATE + "user = 'root'", ""),
        (PodProvider, SEPARATE + "user = 'root'", "task task names the user root, and pods run as a user of their own"),
        (ProcessProvider, "[agent]\nuser = 'me'", "task task: [agent].user is 'me', and the user of a machine cannot"),
        (PodProvider, SEPARATE + "user = 1000", "task task: [verifier].user is 1000, and"),
        (
            ProcessProvider,
            "[environment.healthcheck]\ncommand = 'true'",
            "task task: [environment.healthcheck] waits for a program that the image starts",
        ),
        (PodProvider, SEPARATE + "environment = {cpus = 2}\n[environment]\nworkdir = '/code'", ""),
        (PodProvider, SEPARATE + "environment = {}\n[environment]\nworkdir = '/opt/x'", ""),
        (
            PodProvider,
            "artifacts = ['/code']\n[verifier.environment]\n[environment]\nworkdir = '/app'",
            "task task: the artifact /code is in none of the folders",
        ),
    ],
)
def test_what_a_provider_cannot_run_is_refused(
    tmp_path: Path, provider: type[ProcessProvider | PodProvider], config: str, problem: str
) -> None:
    task = read_task(write_sum_task(tmp_path / "task", config=config))
    found = provider(MachineChoice(image="one")).problem(task)
    assert found.startswith(problem) if problem else not found


def test_a_task_gets_no_more_than_the_job_gives(tmp_path: Path) -> None:
    task = read_task(write_sum_task(tmp_path / "task", config="[environment]\nmemory_mb = 512\nstorage_mb = 100000"))
    limits = MachineChoice(memory_bytes=1 << 30, disk_bytes=1 << 30).limits(task.config.environment, 7)
    assert (limits.memory_bytes, limits.disk_bytes, limits.processes) == (512 << 20, 1 << 30, 7)
    assert MachineChoice().limits(task.config.environment, 7).disk_bytes == 100_000 << 20


@pytest.mark.parametrize(
    ("config", "choice", "problem"),
    [
        ("[environment]\ndocker_image = 'a:1'", MachineChoice(), ""),
        ("", MachineChoice(), "names no docker_image and has no environment/Dockerfile"),
        ("", MachineChoice(image="a:1"), ""),
        (
            "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['files.example.org']",
            MachineChoice(image="a:1", network="public"),
            "opens the network to files.example.org alone",
        ),
        (
            "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['files.example.org']",
            MachineChoice(image="a:1"),
            "",
        ),
        ("[environment]\ngpus = 1", MachineChoice(image="a:1"), "needs 1 GPUs"),
    ],
)
def test_containers_say_which_tasks_they_cannot_run(
    tmp_path: Path, config: str, choice: MachineChoice, problem: str
) -> None:
    found = ContainerProvider(choice).problem(read_task(write_sum_task(tmp_path / "task", config=config)))
    assert problem in found
    assert bool(found) == bool(problem)
    assert ("provider container" in ProcessProvider(choice).problem(read_task(tmp_path / "task"))) == (
        "docker_image" in config
    )


def test_pods_are_alike_where_their_tasks_need_the_same_and_tasks_that_they_cannot_run_are_refused(
    tmp_path: Path,
) -> None:
    def task(name: str, environment: str) -> Task:
        folder = write_sum_task(tmp_path / name)
        (folder / "task.toml").write_text(f"[environment]\n{environment}\n")
        return read_task(folder)

    pods = PROVIDERS["pods"](MachineChoice("debian:12", network="public", memory_bytes=1 << 28))
    assert isinstance(pods, PodProvider)
    one, other = task("one", "memory_mb = 4096"), task("other", "memory_mb = 1024")
    assert pods.shape(one) == pods.shape(other) != pods.shape(task("small", "memory_mb = 64"))
    assert pods.shape(one) == pods.shape(task("named", 'docker_image = "debian:12"\nmemory_mb = 1024'))
    assert pods.shape(one) != pods.shape(task("closed", 'network_mode = "no-network"'))
    assert [pods.problem(each) for each in (one, other)] == ["", ""]
    for environment, why in (
        ('network_mode = "allowlist"\nallowed_hosts = ["example.org"]', "example.org alone"),
        ("gpus = 1", "1 GPUs"),
        ('workdir = "/usr/lib/x"', "mounts read only"),
    ):
        assert why in pods.problem(task(f"bad-{why[:3]}", environment))
    assert "names no docker_image" in PodProvider(MachineChoice()).problem(one)
