"""What follows the end of an attempt: back-off, ``lifecycle.failurePolicy.rules``, and replicas that restart whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from world import World, reject, rljob, settled, stuck, suspend

from plaudit_job.spec.rljob import BackoffSpec
from plaudit_operator import names
from plaudit_operator.attempts import pause_s
from plaudit_operator.names import ConditionType
from plaudit_operator.observed import labels, timestamp


def test_the_pause_doubles_up_to_five_minutes():
    assert [pause_s(count, BackoffSpec()) for count in range(9)] == [0, 0, 10, 20, 40, 80, 160, 300, 300]
    assert pause_s(1_000_000, BackoffSpec()) == 300


def test_a_trainer_that_its_kubelet_rejects_backs_off_and_fails_at_its_limit():
    world = stuck(World(rljob(lifecycle={"failurePolicy": {"maxDisruptions": 4}})))
    starts = []
    for _ in range(5):
        starts.append(world.cluster.now)
        reject(world)
        world.settle()
    assert [b - a for a, b in pairwise(starts)] == [0, 10, 20, 40]
    failed = world.condition(ConditionType.FAILED)
    assert failed["reason"] == "TooManyDisruptions"
    assert "TopologyAffinityError" in failed["message"]
    assert "maxDisruptions is 4" in failed["message"]


def test_while_it_waits_the_condition_names_the_last_failure_and_the_time_and_nothing_is_written():
    world = stuck(World())
    for _ in range(2):
        reject(world)
        world.settle(passing_pauses=False)
    running = world.condition(ConditionType.TRAINER_RUNNING)
    assert (running["status"], running["reason"]) == ("False", "BackOff")
    assert "TopologyAffinityError" in running["message"]
    assert world.status["nextAttemptTime"] in running["message"]
    assert not world.cluster.of_kind("Job")
    writes = world.cluster.writes
    world.settle(passing_pauses=False)
    assert world.cluster.writes == writes
    world.settle()
    assert world.status["phase"] == "Running"


def test_an_attempt_that_closed_a_step_is_followed_by_the_next_at_once():
    world = stuck(World())
    starts = []
    for step in (0, 0, 0, 3, 3):
        starts.append(world.cluster.now)
        world.closed_step = step
        world.cluster.now += 20  # progress is read every ten seconds
        world.settle()
        reject(world)
        world.settle()
    assert [b - a - 20 for a, b in pairwise(starts)] == [0, 10, 20, 0]


@pytest.mark.parametrize(("ran", "short"), [("00:09:59", 2), ("00:10:00", 0)])
def test_an_attempt_that_ran_for_ten_minutes_ends_the_back_off(ran: str, short: int):
    world = stuck(World())
    reject(world)
    world.settle()
    for pod in world.cluster.of_kind("Pod"):
        if pod["metadata"]["labels"]["plaudit.dev/role"] == "trainer":
            ended = copy.deepcopy(pod)
            times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": f"2026-01-01T{ran}Z"}
            state = {"terminated": {"exitCode": 1, "message": "boom", **times}}
            containers = [{"name": "trainer", "state": state, "restartCount": 0}]
            ended["status"] = {"phase": "Failed", "containerStatuses": containers}
            world.cluster.put(ended)
    world.settle()
    assert world.status["shortAttempts"] == short


def with_rules(*rules: dict[str, Any], **policy: Any) -> World:
    return settled(lifecycle={"failurePolicy": {"rules": list(rules), **policy}})


def codes(*values: int, operator: str = "In") -> dict[str, Any]:
    return {"onExitCodes": {"operator": operator, "values": list(values)}}


@pytest.mark.parametrize(
    ("rule", "code", "phase", "counted"),
    [
        ({"action": "Fail", **codes(7, 8)}, 7, "Failed", (0, 0)),
        ({"action": "Fail", **codes(7, 8)}, 9, "Running", (1, 0)),
        ({"action": "Ignore", **codes(139)}, 139, "Running", (0, 1)),
        ({"action": "Fail", **codes(139, operator="NotIn")}, 1, "Failed", (0, 0)),
        ({"action": "Fail", **codes(139, operator="NotIn")}, 139, "Running", (1, 0)),
        ({"action": "Count", **codes(42)}, 42, "Running", (1, 0)),  # comes before the meaning of 42
        ({"action": "Fail", "onReasons": ["Error"]}, 1, "Failed", (0, 0)),
        ({"action": "Fail", "onReasons": ["OOMKilled"]}, 1, "Running", (1, 0)),
    ],
)
def test_a_rule_decides_the_action(rule: dict[str, Any], code: int, phase: str, counted: tuple[int, int]):
    world = with_rules(rule)
    world.cluster.end_trainer(code, "boom")
    world.settle()
    assert world.status["phase"] == phase
    assert (world.status["restarts"], world.status["disruptions"]) == counted


def test_a_pod_that_its_kubelet_rejects_can_fail_the_job_at_once():
    world = with_rules({"action": "Fail", "onReasons": ["TopologyAffinityError"]})
    reject(world)
    world.settle()
    failed, stalled = world.condition(ConditionType.FAILED), world.condition(ConditionType.STALLED)
    assert (failed["status"], failed["reason"]) == ("True", "FailureRule")
    assert "rules[0]: Fail on reason TopologyAffinityError" in failed["message"]
    assert (stalled["status"], stalled["reason"]) == ("True", "FailureRule")


def test_the_first_rule_that_applies_wins():
    world = with_rules({"action": "Ignore", **codes(1)}, {"action": "Fail", **codes(1)})
    world.cluster.end_trainer(1)
    world.settle()
    assert (world.status["phase"], world.status["disruptions"]) == ("Running", 1)


def test_ignored_ends_have_a_limit():
    world = with_rules({"action": "Ignore", **codes(1)}, maxDisruptions=1)
    for _ in range(2):
        world.cluster.end_trainer(1)
        world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == "TooManyDisruptions"


def test_pauses_follow_the_jobs_policy():
    world = with_rules(backoff={"initialSeconds": 2, "maxSeconds": 3, "resetAfterSeconds": 1000}, maxDisruptions=10)
    world.closed_step = 0
    starts = []
    for _ in range(5):
        starts.append(world.cluster.now)
        reject(world)
        world.settle()
    assert [b - a for a, b in pairwise(starts)] == [0, 0, 2, 3]  # the first attempt had closed a step


ENGINE = {"tensorParallelSize": 8, "pipelineParallelSize": 2}
ROLLOUT = {"replicas": 2, "podsPerReplica": 2, "engine": ENGINE}


def with_replicas(**spec: Any) -> World:
    """Return a world with a running job of two replicas of two pods."""
    return settled(**{"rollout": ROLLOUT, **spec})


def rollout_jobs(world: World) -> list[dict[str, Any]]:
    return [job for job in world.cluster.of_kind("Job") if labels(job)[names.LABEL_ROLE] == "rollout"]


def pods(world: World, replica: int) -> dict[str, str]:
    """Return the uids of the pods of a replica, by name."""
    found = [pod for pod in world.cluster.of_kind("Pod") if labels(pod).get(names.LABEL_REPLICA) == str(replica)]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}


def lose(world: World, replica: int) -> None:
    world.cluster.remove("Pod", next(iter(pods(world, replica))))


def environment(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") or variable["valueFrom"] for variable in container["env"]}


def test_each_replica_is_an_indexed_job_whose_pods_know_their_rank_and_their_leader():
    world = with_replicas()
    first, second = rollout_jobs(world)
    assert [job["metadata"]["name"] for job in (first, second)] == ["job-rollout-0-0", "job-rollout-1-0"]
    spec = first["spec"]
    assert (spec["completionMode"], spec["completions"], spec["backoffLimit"]) == ("Indexed", 2, 0)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == ("job-rollout", "Never")
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    values = environment(second)
    assert values["PLAUDIT_REPLICA_LEADER"] == "job-rollout-1-0-0.job-rollout.default.svc"
    assert "job-completion-index" in values["PLAUDIT_REPLICA_RANK"]["fieldRef"]["fieldPath"]
    assert values["PLAUDIT_EXIT_WHEN_STOPPED"] == str(names.EXIT_STOPPED)
    service = world.cluster.find("Service", "job-rollout")
    assert service
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert not world.cluster.find("Deployment", "job-rollout")
    assert world.status["replicas"]["rollout"] == "4/4"


def test_a_lost_pod_restarts_its_replica_as_a_whole_and_the_others_go_on():
    world = with_replicas()
    lost, kept = pods(world, 0), pods(world, 1)
    lose(world, 0)
    world.settle()
    assert pods(world, 1) == kept
    assert len(pods(world, 0)) == 2
    assert not pods(world, 0).items() & lost.items()
    assert [job["metadata"]["name"] for job in rollout_jobs(world)] == ["job-rollout-0-1", "job-rollout-1-0"]
    assert world.status["phase"] == "Running"
    assert world.status["restarts"] == 0  # of the trainer
    rollout = next(role for role in world.status["roles"] if role["name"] == "rollout")
    assert rollout["restarts"] == 1


def test_the_next_attempt_waits_until_no_pod_of_the_last_one_is_left():
    world = with_replicas()
    world.cluster.edit("Job", "job-rollout-0-0", lambda job: job["status"].update(failed=1))
    world.learn()
    world.deliver()
    world.reconcile()  # the ended attempt is deleted; its pods are known to exist for a while
    world.deliver("Job")
    world.reconcile()
    first, _ = rollout_jobs(world)
    assert (first["metadata"]["name"], first["spec"]["suspend"]) == ("job-rollout-0-1", True)
    world.learn()
    assert rollout_jobs(world)[0]["spec"]["suspend"] is False


def test_a_replica_that_ends_early_again_and_again_pauses_longer_and_longer():
    world = with_replicas()
    pauses = []
    for _ in range(6):
        lose(world, 0)
        world.settle()
        began = world.cluster.now
        while len(pods(world, 0)) < 2:
            result = world.reconcile()
            assert result
            assert result.again_after_s
            world.cluster.now += result.again_after_s
            world.settle()
        pauses.append(round(world.cluster.now - began))
    assert pauses == [0, 10, 20, 40, 80, 160]
    world.cluster.now += 3600
    lose(world, 0)
    world.settle()
    assert len(pods(world, 0)) == 2  # after an hour of work there is no pause


def test_a_pod_that_ends_well_restarts_its_replica_too():
    world = with_replicas()
    before = pods(world, 0)

    def ends(pod: dict[str, Any]) -> None:
        pod["status"]["phase"] = "Succeeded"

    world.cluster.edit("Pod", next(iter(before)), ends)
    world.cluster.edit("Job", "job-rollout-0-0", lambda job: job["status"].update(succeeded=1))
    world.settle()
    assert len(pods(world, 0)) == 2
    assert not pods(world, 0).items() & before.items()


def test_fewer_and_more_replicas_are_whole_ones():
    world = with_replicas()
    kept = pods(world, 0)
    scale(world, 1)
    assert (pods(world, 0), pods(world, 1)) == (kept, {})
    scale(world, 3)
    assert [len(pods(world, replica)) for replica in range(3)] == [2, 2, 2]
    assert pods(world, 0) == kept
    assert world.status["replicas"]["rollout"] == "6/6"


def scale(world: World, replicas: int) -> None:
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=replicas))
    world.settle()


def test_a_suspended_job_has_no_replicas_and_a_resumed_one_all_of_them():
    world = with_replicas()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=True))
    world.settle()
    assert rollout_jobs(world) == []
    assert world.status["phase"] == "Suspended"
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=False))
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.status["replicas"]["rollout"] == "4/4"


@pytest.mark.parametrize("scheduling", [{"gang": "native"}, {"queueName": "team"}], ids=["native", "kueue"])
def test_all_pods_of_all_replicas_are_of_the_jobs_one_group(scheduling: dict[str, str]):
    world = with_replicas(scheduling=scheduling)
    template = rollout_jobs(world)[0]["spec"]["template"]
    if "gang" in scheduling:
        (group,) = world.cluster.of_kind("PodGroup")
        assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 6  # 2 × 2 rollouts, trainer, Redis
        assert template["spec"]["schedulingGroup"] == {"podGroupName": world.status["run"]}
    else:
        assert template["metadata"]["annotations"][names.KUEUE_COUNT] == "6"
        assert template["metadata"]["labels"][names.KUEUE_GROUP] == world.status["run"]
    lose(world, 1)
    world.settle()
    assert [len(pods(world, replica)) for replica in range(2)] == [2, 2]


def test_a_running_job_at_rest_is_not_written():
    world = with_replicas()
    world.cluster.calls.clear()
    world.reconcile()
    assert world.cluster.calls == []


def test_a_deleted_job_of_a_replica_begins_again():
    world = with_replicas()
    world.cluster.remove("Job", "job-rollout-1-0")
    world.settle()
    assert len(pods(world, 1)) == 2


def test_gpus_of_all_pods_are_counted():
    world = with_replicas()
    roles = {role["name"]: role["gpus"] for role in world.status["cost"]["roles"]}
    assert roles["rollout"] == 32


def fail_to_start(world: World, **metadata: Any) -> None:
    """A container before the trainer fails in its pod, whose native sidecar Kubernetes then ends."""
    (pod,) = [copy.deepcopy(pod) for pod in world.cluster.of_kind("Pod") if labels(pod)[names.LABEL_ROLE] == "trainer"]
    ends = [("proxy", 137, "", 2), ("prepare", 1, "PermissionError: /plaudit/runs", 1)]
    befores = [
        {"name": name, "state": {"terminated": {"exitCode": code, "message": message, "finishedAt": timestamp(at)}}}
        for name, code, message, at in ends
    ]
    waits = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    pod["metadata"] |= metadata
    pod["status"] = {"phase": "Failed", "initContainerStatuses": befores, "containerStatuses": [waits]}
    world.cluster.put(pod)
    world.settle()


def test_a_container_that_fails_before_the_trainer_counts_as_a_restart_and_is_named():
    world = settled(lifecycle={"failurePolicy": {"maxRestarts": 1}})
    fail_to_start(world)
    assert (world.status["restarts"], world.status["disruptions"], world.status["phase"]) == (1, 0, "Running")
    fail_to_start(world)
    failed = world.condition(ConditionType.FAILED)
    assert failed["reason"] == "TooManyRestarts"
    why = "attempt 1 of the trainer did not start: prepare exited with code 1: PermissionError: /plaudit/runs"
    assert failed["message"].startswith(why)


def test_a_pod_that_is_deleted_before_its_trainer_starts_is_disrupted():
    world = settled()
    fail_to_start(world, deletionTimestamp=timestamp(world.cluster.now + 600))
    assert (world.status["restarts"], world.status["disruptions"]) == (0, 1)


SIDECAR = {"name": "proxy", "image": "proxy:1"}


def end_beside_sidecar(
    world: World,
    role: str,
    code: int,
    message: str = "",
    *,
    pods: int = 99,
    sidecar: int | None = None,
    native: bool = False,
) -> None:
    """The container of a role ends in its pods, or in the first of them; a sidecar runs on, or ended with a code."""
    running = [pod for pod in world.cluster.of_kind("Pod") if labels(pod)[names.LABEL_ROLE] == role]
    for pod in running[:pods]:
        ended = {"exitCode": code, "message": message, "finishedAt": timestamp(world.cluster.now)}
        state = {"running": {}} if sidecar is None else {"terminated": {**ended, "exitCode": sidecar}}
        proxy = {"name": "proxy", "state": state, "restartCount": 0}
        own = {"name": role, "state": {"terminated": ended}, "restartCount": 0}
        pod = copy.deepcopy(pod)
        pod["status"] |= {"containerStatuses": [own], "conditions": [{"type": "PodScheduled", "status": "True"}]}
        pod["status"].setdefault("initContainerStatuses" if native else "containerStatuses", []).append(proxy)
        if sidecar is not None:
            pod["status"]["phase"] = "Failed" if code or sidecar else "Succeeded"
        world.cluster.put(pod)


@pytest.mark.parametrize("cleanup", ["All", "None"])
def test_a_trainer_that_ends_beside_a_sidecar_completes_the_job_and_holds_nothing(cleanup: str):
    world = settled(lifecycle={"cleanup": cleanup})
    world.closed_step, world.metrics_are_slow = 3, True
    world.cluster.now += 1
    end_beside_sidecar(world, "trainer", 0)
    world.settle()
    assert world.status["phase"] == "Running"  # until its last progress is read
    world.settle()
    assert (world.status["phase"], world.status["progress"]["step"]) == ("Complete", 3)
    assert "trainer" not in world.cluster.roles()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sees_the_job_first", [True, False])
def test_a_trainer_that_is_done_completes_the_job_although_its_sidecar_failed(ranks: int, sees_the_job_first: bool):
    trainer = {"ranks": ranks, "ranksPerPod": 1, "strategy": "fsdp2"} if ranks > 1 else {}
    world = settled(trainer=trainer)
    world.closed_step = 3
    end_beside_sidecar(world, "trainer", 0, sidecar=1)
    if sees_the_job_first:
        world.cluster.run_controllers()
    world.settle()
    assert (world.status["phase"], world.status.get("restarts", 0)) == ("Complete", 0)
    assert "trainer" not in world.cluster.roles()


def test_a_sidecar_that_ends_before_the_trainer_changes_nothing():
    world = settled()
    [pod] = [pod for pod in world.cluster.of_kind("Pod") if labels(pod)[names.LABEL_ROLE] == "trainer"]
    trainer = {"name": "trainer", "state": {"running": {}}, "restartCount": 0}
    proxy = {"name": "proxy", "state": {"terminated": {"exitCode": 1, "message": "gone"}}, "restartCount": 0}
    pod = copy.deepcopy(pod)
    pod["status"]["containerStatuses"] = [trainer, proxy]
    world.cluster.put(pod)
    world.settle()
    assert (world.status["phase"], world.status.get("restarts", 0)) == ("Running", 0)
    end_beside_sidecar(world, "trainer", 1, "boom", sidecar=1)
    world.settle()
    assert (world.status["phase"], world.status["restarts"]) == ("Running", 1)


def test_a_trainer_that_fails_beside_a_sidecar_restarts_at_once_and_in_the_end_fails_the_job():
    world = settled(lifecycle={"failurePolicy": {"maxRestarts": 1}})
    end_beside_sidecar(world, "trainer", 1, "boom")
    world.settle()
    assert (world.status["restarts"], world.status["phase"]) == (1, "Running")
    end_beside_sidecar(world, "trainer", 1, "boom")
    world.settle()
    assert world.condition(ConditionType.FAILED)["message"].startswith(
        "attempt 1 of the trainer exited with code 1: boom"
    )
    assert "trainer" not in world.cluster.roles()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("code", "after"), [(0, ("Complete", 0)), (1, ("Running", 1))])
def test_a_sidecar_that_ignores_its_end_holds_up_no_attempt(code: int, after: tuple[str, int], native: bool):
    world = settled()
    (pod,) = [pod for pod in world.cluster.of_kind("Pod") if labels(pod)[names.LABEL_ROLE] == "trainer"]
    graces: list[tuple[str, int | None]] = []
    delete = world.cluster.delete

    def recorded(kind: Any, namespace: str, name: str, uid: str, grace_s: int | None = None) -> None:
        graces.append((name, grace_s))
        delete(kind, namespace, name, uid, grace_s)

    world.cluster.delete = recorded  # type: ignore[method-assign]
    end_beside_sidecar(world, "trainer", code, "boom", native=native)
    world.learn()
    if code:
        told = f"boom. Pod {pod['metadata']['name']} stays until its sidecars end: proxy"
        assert told in world.condition(ConditionType.TRAINER_RUNNING)["message"]
    world.settle()
    assert (world.status["phase"], world.status["restarts"]) == after
    assert (pod["metadata"]["name"], 10) in graces, "its ten minutes of grace are for the trainer"


def test_the_end_of_a_trainer_that_is_suspended_counts_as_nothing_although_its_sidecar_stays():
    world = settled()
    suspend(world, True)
    world.learn()
    end_beside_sidecar(world, "trainer", names.EXIT_STOPPED, native=True)
    world.settle()
    assert (world.status["phase"], world.status["disruptions"], world.status["attempt"]) == ("Suspended", 0, 0)


def test_of_several_ranks_all_have_to_end_well_beside_their_sidecars():
    world = settled(trainer={"ranks": 2, "ranksPerPod": 1, "strategy": "fsdp2"})
    end_beside_sidecar(world, "trainer", 0, pods=1)
    world.settle()
    assert world.status["phase"] == "Running"
    end_beside_sidecar(world, "trainer", 0)
    world.settle()
    assert world.status["phase"] == "Complete"


@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_of_a_replica_that_ends_beside_a_sidecar_restarts_the_replica(code: int):
    world = with_replicas()
    end_beside_sidecar(world, "rollout", code, pods=1)
    world.settle()
    assert sorted(job["metadata"]["name"] for job in rollout_jobs(world)) == ["job-rollout-0-1", "job-rollout-1-0"]
    assert world.status["phase"] == "Running"


def test_sidecars_of_pods_that_end_are_native_where_the_cluster_has_them():
    pod = {"template": {"spec": {"containers": [SIDECAR]}}}
    job = rljob(trainer={"pod": pod}, rollout={**ROLLOUT, "pod": pod})
    job["spec"]["reward"]["workers"]["pod"] = pod
    for native in (True, False):
        world = World(job)
        world.settings = replace(world.settings, native_sidecars=native)
        world.start_operator()
        world.settle()
        for name, kind, ends in [
            ("job-trainer-0", "Job", True),
            ("job-rollout-0-0", "Job", True),
            ("job-reward", "Deployment", False),
        ]:
            owner = world.cluster.find(kind, name)
            assert owner
            spec = owner["spec"]["template"]["spec"]
            assert [c["name"] for c in spec["containers"]][1:] == ([] if native and ends else ["proxy"])
            sidecar = (spec["initContainers"] if native and ends else spec["containers"])[-1]
            assert sidecar.get("restartPolicy") == ("Always" if native and ends else None)
            assert (sidecar["name"], sidecar["image"]) == ("proxy", "proxy:1")
            restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert sidecar["securityContext"] == restricted
