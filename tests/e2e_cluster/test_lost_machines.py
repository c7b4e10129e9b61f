"""Machines that are lost or stopped, by their agents or with their node: each costs its own sample alone.

Whether they earn nothing or are errors shows after a minute or two, in which a machine's node says nothing. So all of
them begin together, each in a namespace of its own, and a test waits for the end of one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from machine_pods import LIMITS, bash, folder_of_tests, namespaces, new_machine, played, roles, settings, verified
from pod_processes import main_process
from real_cluster import Cluster, harness

from machine_attacks import DENIALS, STOPS_ALL, TAKEN_OVER, TEST
from plaudit_sandbox.machine import UnusableMachineError
from plaudit_sandbox.pod_cluster import PodCluster
from plaudit_sandbox.pod_manifests import LABEL, PodSettings
from plaudit_sandbox.pods import PodMachine
from plaudit_wire.errors import InfrastructureError

pytestmark = pytest.mark.timeout(900)

Story = Callable[[Cluster, PodCluster, Path], None]


def on(node: str) -> dict[str, Any]:
    """Return a template of pods that run on one node."""
    return {"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}


LOST, STAYS = on("node2"), on("node1")
"""The node that one of them loses, and that of all the others."""


def an_agent_that_stops_every_process_earns_nothing(cluster: Cluster, pods: PodCluster, folder: Path) -> None:
    # Now and then it stops what containerd 1.6 starts commands with, which then starts none in this pod any more.
    ((_, verdict),) = played(pods, folder_of_tests(folder, TEST), [STOPS_ALL], template=STAYS)
    assert verdict.reward == 0.0, verdict
    assert pods.find({}) == []


@contextlib.contextmanager
def stopped(pods: PodCluster, machine: PodMachine) -> Iterator[None]:
    """Stop the process that starts commands in a pod, while others of its node start them."""
    first = Path(f"/proc/{main_process(pods.read(machine.name))}/status").read_text()
    shim = int(first.partition("PPid:")[2].split()[0])
    os.kill(shim, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(shim, signal.SIGCONT)


def a_pod_that_starts_no_process_is_an_error_without_a_witness(
    cluster: Cluster, pods: PodCluster, folder: Path
) -> None:
    with new_machine(pods, template=STAYS) as machine:
        bash(machine, "true")
        cluster.kubectl("--namespace", pods.namespace, "create", "quota", "no-witness", "--hard=pods=1")
        with stopped(pods, machine):
            with pytest.raises(InfrastructureError, match="does not do as it should within 60 s") as raised:
                machine.disk_bytes()
            assert not isinstance(raised.value, UnusableMachineError)


def a_pod_that_starts_no_process_earns_nothing_where_its_node_starts_others(
    cluster: Cluster, pods: PodCluster, folder: Path
) -> None:
    with new_machine(pods, template=STAYS) as machine:
        bash(machine, "true")
        with stopped(pods, machine):  # as if its agent had stopped what starts commands in its pod
            ended = bash(machine, "true", timeout_s=5.0)
            assert (ended.ending, bash(machine, "true").exit_code) == ("timeout", 137)
            found = verified(machine, folder)
        assert (found.outcome, found.reward) == ("tampered", 0.0)
        assert "others of its node start them" in found.reason
        assert roles(pods, machine) == ["agent"]


def a_pod_whose_first_command_never_starts_is_an_error(cluster: Cluster, pods: PodCluster, folder: Path) -> None:
    with new_machine(pods, template=STAYS) as machine, stopped(pods, machine):
        with pytest.raises(InfrastructureError, match="did not start: it did not begin within 60 s"):
            bash(machine, "true")
        with pytest.raises(InfrastructureError, match="does not do as it should within 60 s") as raised:
            verified(machine, folder)
        assert not isinstance(raised.value, UnusableMachineError)


def an_agent_that_ends_every_command_or_leaves_no_room_for_one_gets_no_other_machine(
    cluster: Cluster, pods: PodCluster, folder: Path
) -> None:
    found = played(pods, folder_of_tests(folder, TEST), DENIALS, further=2, template=STAYS)
    assert [each for each in found if each[1].reward != 0.0] == []
    assert pods.find({}) == []


def an_agent_that_holds_its_machine_s_first_process_earns_nothing(
    cluster: Cluster, pods: PodCluster, folder: Path
) -> None:
    with new_machine(pods, template=STAYS) as machine:
        if "0" not in bash(machine, f"echo 42 > /app/answer; {TAKEN_OVER}").output.split():
            pytest.skip("this node's kernel lets nobody trace")
        found = verified(machine, folder)
        assert (found.outcome, found.reward) == ("tampered", 0.0)
        assert "the machine's first process does not end" in found.reason


def a_lost_pod_and_an_image_that_is_nowhere_are_errors_in_kubernetes_s_words(
    cluster: Cluster, pods: PodCluster, folder: Path
) -> None:
    with new_machine(pods, template=STAYS) as machine:
        threading.Timer(3.0, lambda: pods.remove({LABEL: machine.name})).start()
        began_s = time.monotonic()
        with pytest.raises(InfrastructureError, match=machine.name):
            bash(machine, "sleep 300", timeout_s=300.0)
        assert time.monotonic() - began_s < 250.0
        with pytest.raises(InfrastructureError, match="not found"):
            bash(machine, "true")
    with pytest.raises(InfrastructureError, match=r"cannot start: .*pull.*plaudit-nowhere"):
        PodMachine.new(pods, PodSettings("localhost/plaudit-nowhere:1", template=STAYS), LIMITS)
    root = {"spec": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}}
    with pytest.raises(InfrastructureError, match="violates PodSecurity"):
        PodMachine.new(pods, settings(template=root), LIMITS)
    assert pods.find({}) == []


def a_lost_node_costs_the_machines_that_were_on_it_alone(cluster: Cluster, pods: PodCluster, folder: Path) -> None:
    lost, other = (PodMachine.new(pods, settings(template=template), LIMITS) for template in (LOST, STAYS))
    bash(lost, "echo 42 > /app/answer")
    with ThreadPoolExecutor() as threads:
        in_it = threads.submit(bash, lost, "sleep 600", 600.0)
        subprocess.run(harness("kill-node", "2"), check=True)
        try:
            assert bash(other, "echo 42 > /app/answer; cat /app/answer").output.strip() == "42"
            with pytest.raises(InfrastructureError, match=lost.name):
                in_it.result()
            with pytest.raises(InfrastructureError, match=lost.name):
                verified(lost, folder)
            new = PodMachine.new(pods, settings(), LIMITS)
            assert {each["spec"]["nodeName"] for each in pods.find({LABEL: new.name})} == {"node1"}
            assert verified(other, folder).reward == 1.0
            for machine in (lost, other, new):
                machine.remove()
            assert pods.find({}) == []
        finally:
            subprocess.run(harness("start-node", "2"), check=True)
    cluster.kubectl("wait", "--for=condition=Ready", "node/node2", "--timeout=300s")


STORIES: tuple[Story, ...] = (
    a_lost_node_costs_the_machines_that_were_on_it_alone,
    a_lost_pod_and_an_image_that_is_nowhere_are_errors_in_kubernetes_s_words,
    an_agent_that_holds_its_machine_s_first_process_earns_nothing,
    an_agent_that_stops_every_process_earns_nothing,
    an_agent_that_ends_every_command_or_leaves_no_room_for_one_gets_no_other_machine,
    a_pod_that_starts_no_process_is_an_error_without_a_witness,
    a_pod_that_starts_no_process_earns_nothing_where_its_node_starts_others,
    a_pod_whose_first_command_never_starts_is_an_error,
)


@pytest.fixture(scope="module")
def ends(
    pods: PodCluster, cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Story, Future[None]]]:
    """Begin all that were chosen, and yield their ends."""
    mine = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    stories = [item.callspec.params["story"] for item in mine]
    names = [f"{pods.namespace}-{number}" for number in range(len(stories))]
    with ThreadPoolExecutor(len(stories)) as threads:
        yield {
            story: threads.submit(partial(story, cluster, where, tmp_path_factory.mktemp("story")))
            for story, where in zip(stories, namespaces(cluster, *names), strict=True)
        }
    cluster.kubectl("delete", "namespace", *names, "--wait=false")


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_of_those_that_begin_together(ends: dict[Story, Future[None]], story: Story) -> None:
    ends[story].result()
