"""A job's life on the model of a cluster: deliver events, let the operator work, let the cluster work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from cluster_model import ClusterModel, Inline

from plaudit_operator import names
from plaudit_operator.cache import Cache, Key
from plaudit_operator.observed import seconds
from plaudit_operator.planning import rendering
from plaudit_operator.planning.reconcile import Reconciler, ReconcileResult
from plaudit_operator.runtime.kinds import OWNERS, WATCHED, kind_of
from plaudit_operator.runtime.kube import KubeError
from plaudit_operator.settings import Images, OperatorSettings

SETTINGS = OperatorSettings(Images("worker:1", "gpu:1", "redis:1"), "plaudit-system")
KEY = Key("default", "job")


def rljob(**spec: Any) -> dict[str, Any]:
    """A small job that trains, with sections replaced by ``spec``."""
    sections: dict[str, Any] = {
        "model": {"source": "/plaudit/model"},
        "data": {"train": {"path": "/plaudit/train.parquet"}},
        "algorithm": {"steps": 3},
        "rollout": {"replicas": 2},
        "reward": {
            "scorers": [{"name": "mine", "kind": "python", "python": {"path": "/plaudit/reward.py"}}],
            "workers": {"replicas": 2},
        },
        "trainer": {},
        "storage": {"claimName": "shared"},
    }
    sections |= spec
    return {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "namespace": "default"},
        "spec": {name: section for name, section in sections.items() if section is not None},
    }


class World:
    """One cluster and one operator, which a test may end and start again at any moment."""

    def __init__(self, job: dict[str, Any] | None = None, cluster: ClusterModel | None = None, key: Key = KEY) -> None:
        self.key = key
        self.cluster = cluster or ClusterModel()
        self.settings = SETTINGS
        if cluster is None:
            self.cluster.put(job or rljob())
        self.busy_workers: dict[str, int] = {}
        self.closed_step = 2
        self.metrics_are_slow = False
        self.exposed_s = 0.0
        self.start_operator()

    def start_operator(self) -> None:
        """A fresh process: nothing in memory but what it lists."""
        rendering._kept._values.clear()  # as in a new process; and the uids of two tests are alike
        self.cache = Cache()
        self.reconciler = Reconciler(self.cluster, self.cache, self.settings, Inline(), self, lambda: self.cluster.now)
        self.relist()

    def read(self, name: str, namespace: str, *, is_last: bool = False) -> dict[str, Any] | None:
        """The job's progress; a slow metrics service answers the last question when it is repeated."""
        if self.metrics_are_slow:
            self.metrics_are_slow = not is_last
            return None if is_last else {}
        exposed = {"exposedRewardSeconds": self.exposed_s} if self.exposed_s else {}
        return {"step": self.closed_step, "verdict": "reward", "backlog": 0, **exposed}

    def busy(self, name: str, namespace: str) -> dict[str, int]:
        """Samples in flight of each rollout worker, as the job's metrics service reports them."""
        return self.busy_workers

    def relist(self) -> None:
        """Every watch begins anew: events that were not delivered are lost."""
        self.cluster.events.clear()
        for kind in WATCHED:
            self.cache.replace(kind, self.cluster.list(kind, "", "" if kind in OWNERS else names.SELECTOR)[0])

    def deliver(self, kind: str | None = None, *, count: int | None = None, twice: bool = False) -> None:
        """Events reach the cache: of one kind or all, all of them or the first few, perhaps twice."""
        for name in [kind] if kind else list(self.cluster.events):
            if name not in {k.kind for k in WATCHED}:
                self.cluster.events.pop(name, None)
                continue
            queue = self.cluster.events[name]
            taken = queue[: len(queue) if count is None else count]
            del queue[: len(taken)]
            for event, item in taken + (taken if twice else []):
                self.cache.update(kind_of(name), event, item)

    def reconcile(self) -> ReconcileResult | None:
        """One turn of the operator; None when it has to try again."""
        try:
            return self.reconciler.reconcile(self.key)
        except KubeError:
            return None

    def learn(self, times: int = 1) -> ReconcileResult | None:
        """Events reach the cache and the operator takes a turn, so often; the controllers do nothing meanwhile."""
        result = None
        for _ in range(times):
            self.deliver()
            result = self.reconcile()
        return result

    def settle(self, turns: int = 60, *, passing_pauses: bool = True) -> None:
        """Operator and controllers take turns until neither has anything to do; a back-off passes at once."""
        for _ in range(turns):
            before = self.cluster.writes
            self.deliver()
            result = self.reconcile()
            self.cluster.run_controllers()
            if self.cluster.writes == before and result is not None and not self._pending():
                pause_s = (seconds(self.status.get("nextAttemptTime")) or 0) - self.cluster.now
                if pause_s <= 0 or not passing_pauses:
                    return
                self.cluster.now += pause_s
        raise AssertionError(f"not settled after {turns} turns: {self.cluster.calls[-10:]}")

    def _pending(self) -> bool:
        return any(self.cluster.events[kind.kind] for kind in WATCHED)

    @property
    def job(self) -> dict[str, Any]:
        """The RLJob (or RewardService) as it is in the cluster."""
        found = self.cluster.find(self.key.kind, self.key.name)
        assert found is not None
        return found

    @property
    def status(self) -> dict[str, Any]:
        """Its status."""
        return self.job.get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        """One of its conditions."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})

    def children(self) -> set[tuple[str, str]]:
        """Everything that the job owns, without pods and events."""
        left_out = ("RLJob", "RewardService", "Pod", "Event", "Lease")
        return {(kind, name) for kind, _, name in self.cluster.objects if kind not in left_out}


def settled(job: dict[str, Any] | None = None, **sections: Any) -> World:
    """Return the world of a job, or of ``rljob(**sections)``, once operator and controllers have no more to do."""
    world = World(job or rljob(**sections))
    world.settle()
    return world


def stuck(world: World) -> World:
    """A job whose attempts close no step."""
    world.closed_step = 0
    world.settle()
    return world


def reject(world: World) -> None:
    """The kubelet refuses the trainer's pods: they never run."""
    for pod in world.cluster.of_kind("Pod"):
        if pod["metadata"]["labels"]["plaudit.dev/role"] == "trainer":
            refused = copy.deepcopy(pod)
            refused["status"] = {
                "phase": "Failed",
                "reason": "TopologyAffinityError",
                "message": "Resources cannot be allocated with Topology locality",
            }
            world.cluster.put(refused)


def suspend(world: World, value: bool) -> None:
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=value))


def lose_a_rollout(world: World) -> None:
    pod = [pod for pod in world.cluster.of_kind("Pod") if "rollout" in pod["metadata"]["name"]][-1]
    world.cluster.remove("Pod", pod["metadata"]["name"])


SCRIPT: list[Callable[[World], None]] = [
    lambda world: None,
    lambda world: world.cluster.end_trainer(1, "boom"),
    lambda world: world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=3)),
    lose_a_rollout,
    lambda world: suspend(world, True),
    lambda world: suspend(world, False),
    lambda world: world.cluster.end_trainer(137, disrupted=True),
]
"""What happens to a job; the operator has time to follow after each."""

SPANS_PODS = {"replicas": 2, "podsPerReplica": 2, "engine": {"tensorParallelSize": 2}}
JOBS: list[dict[str, Any]] = [
    {},
    {"scheduling": {"gang": "native"}},
    {"scheduling": {"queueName": "team"}},
    {"rollout": SPANS_PODS},
    {"rollout": SPANS_PODS, "scheduling": {"gang": "native"}},
]
"""How a job gets its place in the cluster, and rollouts of one pod or of two."""
