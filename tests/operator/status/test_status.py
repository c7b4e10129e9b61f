"""What a status says: GPU time by role, what the scale subresource reads, when a service is ready, what is left."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_model import ClusterModel
from world import World, rljob, settled

from plaudit_operator.cache import Key
from plaudit_operator.crd import custom_resource_definition
from plaudit_operator.observed import gpu_seconds
from plaudit_operator.plugin import summary

MODEL = {"name": "helpful", "kind": "model", "model": {"source": "/plaudit/rm"}}


def running(**sections: Any) -> World:
    """A job with 8 GPUs for its trainer, 2 × 4 for its rollouts, one for a reward model, 2 for an environment."""
    scorers = [*rljob()["spec"]["reward"]["scorers"], MODEL]
    rollout = {"replicas": 2, "engine": {"tensorParallelSize": 4}}
    trainer = {"ranks": 8, "strategy": "fsdp2"}
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    environments = [{"name": "shop", "image": "shop:1", "port": 80, "replicas": 2, "pod": gpus}]
    reward = {"scorers": scorers}
    return settled(reward=reward, rollout=rollout, trainer=trainer, environments=environments, **sections)


def spent(world: World) -> dict[str, int]:
    return gpu_seconds(world.status["cost"], world.cluster.now)


def look(world: World, after_s: float) -> None:
    """Time passes, and the operator looks at the job."""
    world.cluster.now += after_s
    world.settle()


def test_gpus_count_by_role_while_pods_hold_them():
    world = running()
    assert {role["name"]: role["gpus"] for role in world.status["cost"]["roles"]} == {
        "environment/shop": 2,
        "model/helpful": 1,
        "rollout": 8,
        "trainer": 8,
    }
    before = spent(world)
    look(world, 100)
    world.closed_step = 5
    look(world, 100)
    world.start_operator()
    look(world, 100)
    gained = {role: seconds - before[role] for role, seconds in spent(world).items()}
    assert gained == {"environment/shop": 600, "model/helpful": 300, "rollout": 2400, "trainer": 2400}


def test_a_job_at_rest_is_not_written_for_its_cost():
    world = running()
    look(world, 20)
    writes = world.cluster.writes
    look(world, 3600)
    assert world.cluster.writes == writes
    assert spent(world)["rollout"] >= 8 * 3600


def test_a_suspended_or_ended_job_costs_nothing_more():
    world = running()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=True))
    look(world, 10)
    before = spent(world)
    look(world, 1000)
    assert spent(world) == before
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=False))
    look(world, 10)
    world.cluster.end_trainer(0)
    look(world, 10)
    before = spent(world)
    look(world, 1000)
    assert spent(world) == before
    assert before["trainer"] > 0


def test_waiting_for_rewards_costs_the_trainers_gpus():
    world = running()
    world.exposed_s = 2.5
    world.closed_step = 12  # ten more steps
    look(world, 100)
    assert world.status["cost"]["exposedRewardGpuSeconds"] == 10 * 2.5 * 8
    text = summary(world.job, [], world.cluster.now)
    assert "GPU-hours (environment/shop 0.1, model/helpful" in text
    assert "waiting for rewards cost 0.1 of them" in text


def test_a_job_without_gpus_has_no_cost():
    none = {"resources": {"limits": {"nvidia.com/gpu": 0}}}
    world = settled(rollout={"pod": none}, trainer={"pod": none})
    assert "cost" not in world.status


def scale_paths() -> dict[str, str]:
    paths: dict[str, str] = custom_resource_definition()["spec"]["versions"][0]["subresources"]["scale"]
    return paths


def at(job: dict[str, Any], path: str) -> Any:
    """Return the value of a path such as ``.spec.rollout.replicas``."""
    for name in path.strip(".").split("."):
        job = job[name]
    return job


@pytest.mark.parametrize("pods", [1, 2])
def test_a_scaled_job_reports_as_many_rollouts_as_were_asked_for(pods: int):
    engine = {"tensorParallelSize": 2}
    world = settled(rollout={"replicas": 2, "podsPerReplica": pods, "engine": engine})
    paths = scale_paths()
    assert (at(world.job, paths["specReplicasPath"]), at(world.job, paths["statusReplicasPath"])) == (2, 2)
    wanted = dict(pair.split("=") for pair in at(world.job, paths["labelSelectorPath"]).split(","))
    rank = wanted.pop("batch.kubernetes.io/job-completion-index", None)  # the Job controller sets it on pods
    assert rank == (None if pods == 1 else "0")
    labels = [pod["metadata"]["labels"] for pod in world.cluster.of_kind("Pod")]
    assert sum(wanted.items() <= each.items() for each in labels) == 2 * pods
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=4))
    world.settle()
    assert at(world.job, paths["statusReplicasPath"]) == 4
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=1))
    world.settle()
    assert at(world.job, paths["statusReplicasPath"]) == 1
    assert world.status["phase"] == "Running"


class Slow(ClusterModel):
    """A cluster in which the pods of some roles do not become ready."""

    slow: tuple[str, ...] = ()

    def _start(self, pod: dict[str, Any]) -> bool:
        return pod["metadata"]["labels"]["plaudit.dev/role"] not in self.slow and super()._start(pod)


RULE = {"name": "right", "kind": "rule", "rule": "gsm8k"}


def slow_world(kind: str, *slow: str, **spec: Any) -> World:
    cluster = Slow()
    cluster.slow = slow
    cluster.put({**rljob(), "kind": kind, "spec": {"reward": {"scorers": [RULE], "gateway": {"replicas": 2}}} | spec})
    world = World(cluster=cluster, key=Key("default", "job", kind))
    world.settle()
    return world


@pytest.mark.parametrize("slow", ["reward", "gateway"])
@pytest.mark.parametrize("kind", ["RLJob", "RewardService"])
def test_a_service_is_ready_and_rolled_out_when_its_workers_and_gateways_are(kind: str, slow: str):
    world = slow_world(kind, slow)
    assert (world.status["phase"], world.condition("Ready")["status"]) == ("Starting", "False")
    assert "startTime" not in world.status
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("False", "Starting")
    assert degraded["message"] == "not all pods of the job have run yet"
    if kind == "RewardService":
        rolled = world.condition("RolledOut")
        assert (rolled["status"], rolled["reason"]) == ("False", "RollingOut")
        assert "0 are ready" in rolled["message"]
    world.cluster.slow = ()
    world.settle()
    assert (world.status["phase"], world.condition("Ready")["status"]) == ("Running", "True")
    assert world.condition("Degraded")["message"] == "all pods are ready"
    if kind == "RewardService":
        assert world.condition("RolledOut")["status"] == "True"
        pod = next(pod for pod in world.cluster.of_kind("Pod") if f"job-{slow}" in pod["metadata"]["name"])
        world.cluster.slow = (slow,)
        world.cluster.remove("Pod", pod["metadata"]["name"])
        world.settle()
        assert world.status["phase"] == "Degraded"
        assert world.condition("RolledOut")["status"] == "True"


def test_a_suspended_service_is_not_rolled_out_before_it_ran():
    world = slow_world("RewardService", suspend=True)
    assert world.condition("RolledOut")["reason"] == "SuspendedByUser"
    world.cluster.edit("RewardService", "job", lambda item: item["spec"].update(suspend=False))
    world.settle()
    world.cluster.edit("RewardService", "job", lambda item: item["spec"].update(suspend=True))
    world.settle()
    assert world.condition("RolledOut")["status"] == "True"


def test_a_job_is_not_degraded_because_metrics_start_last():
    cluster = Slow()
    cluster.slow = ("metrics",)
    cluster.put(rljob())
    world = World(cluster=cluster)
    world.settle()
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize(
    ("cleanup", "kept"),
    [("All", set()), ("KeepTransport", {"transport"}), ("None", {"transport", "rollout", "reward", "metrics"})],
)
def test_an_ended_job_reports_the_pods_that_are_left(cleanup: str, kept: set[str]):
    world = settled(lifecycle={"cleanup": cleanup})
    world.cluster.end_trainer(0)
    world.settle()
    roles = {role["name"]: role for role in world.status["roles"]}
    assert {name for name, role in roles.items() if role["ready"]} == kept
    assert {name for name, role in roles.items() if role["desired"]} == kept
    assert (world.status["replicas"]["reward"] != "0/0") == ("reward" in kept)
    for condition, role in [("TransportReady", "transport"), ("RolloutReady", "rollout"), ("RewardReady", "reward")]:
        assert (world.condition(condition)["status"] == "True") == (role in kept)
    assert world.condition("Admitted")["message"] == world.condition("Degraded")["message"] == "the job has ended"
    assert world.condition("Ready")["status"] == "True"
