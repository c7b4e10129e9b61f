"""Whatever the API server answers, at any call of a job's life: no condition lies, and soon all is well."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from world import JOBS, SCRIPT, World, rljob

from plaudit_operator import names
from plaudit_operator.observed import holds, labels, owner_uid
from plaudit_operator.planning.rendering import Rendering, rendering
from plaudit_operator.pod_state import is_leaving
from plaudit_operator.runtime.kube import KubeError, error_of

ANSWERS = [
    (403, "is forbidden", ""),
    (404, "the server could not find the requested resource", ""),
    (409, "already exists", "AlreadyExists"),
    (409, "the object has been modified", "Conflict"),
    (422, "is invalid", ""),
    (429, "too many requests", ""),
    (500, "failed calling webhook", ""),
    (0, "no response", ""),
]
WELL_WITHIN_S = 10.0
LONGEST_BACKOFF_S = 8.0


class Disturbed:
    """A world whose API server gives wrong answers to some calls, to each of them for a while."""

    def __init__(self, world: World, seed: int, rate: float) -> None:
        self.world, self.rate = world, rate
        self._draw = random.Random(seed)
        self._kinds: dict[str, bool] = {}
        self.on = True
        self.failed: list[tuple[str, int]] = []
        world.cluster.before = self._answer

    def _answer(self, call: str) -> None:
        if not self.on:
            return
        kind = " ".join(call.split()[:2])
        if self._kinds.setdefault(kind, self._draw.random() < self.rate) and self._draw.random() < 0.9:
            status, message, reason = self._draw.choice(ANSWERS)
            self.failed.append((call, status))
            raise error_of(status, f"{call}: {message}", reason) if status else KubeError(message)

    def work(self) -> Iterator[str]:
        """Let the operator work amid wrong answers, then amid right ones; yield each lie."""
        for _ in range(self._draw.randint(2, 6)):
            yield from self.look()
        self.recover()
        yield from lies(self.world, [])

    def look(self, *, heard: bool = True) -> Iterator[str]:
        """Let the operator look once amid wrong answers, and the cluster work; yield each lie of what it ``heard``."""
        self.on = True
        self._kinds.clear()
        if heard:
            self.world.deliver()
        self.failed.clear()
        self.world.reconcile()
        self.on = False
        told = [call for call, _ in self.failed if "status" in call]
        if heard and not told and self.world.cluster.find("RLJob", "job"):
            yield from lies(self.world, self.failed)
        self.world.cluster.run_controllers()

    def recover(self) -> None:
        """Let time pass as the queue does after a failure, and check that all is well within ten seconds."""
        world = self.world
        began, world.cluster.now = world.cluster.now, world.cluster.now + LONGEST_BACKOFF_S
        world.settle(passing_pauses=False)
        assert world.cluster.now - began <= WELL_WITHIN_S
        assert world.condition("Admitted")["status"] == "True", world.condition("Admitted")


def lies(world: World, failed: list[tuple[str, int]]) -> Iterator[str]:
    """Yield what the status claims and the cluster does not have; ``failed`` are the calls of the last look."""
    conditions = {each["type"]: each for each in world.status.get("conditions", [])}
    true = {kind for kind, each in conditions.items() if each["status"] == "True"}
    world.deliver()
    observed = world.cache.observed(world.key)
    assert observed is not None
    rendered = None if observed.ended else rendering(observed, world.settings)
    if "Admitted" in true and isinstance(rendered, Rendering) and not is_leaving(observed.job):
        for manifest in rendered.manifests:
            found = world.cluster.find(manifest["kind"], manifest["metadata"]["name"])
            if found is None or owner_uid(found) != observed.uid:
                yield f"Admitted without {manifest['kind']} {manifest['metadata']['name']}"
        silent = [call for call, status in failed if status not in (404, 409) and "Event" not in call]
        if silent:
            yield f"Admitted although {silent[0]} failed"
    pods = world.cluster.of_kind("Pod")
    running = {labels(pod)[names.LABEL_ROLE] for pod in pods if pod["status"].get("phase") == "Running"}
    needed = {
        "TrainerRunning": "trainer",
        "RolloutReady": "rollout",
        "RewardReady": "reward",
        "TransportReady": "redis",
    }
    for kind, role in needed.items():
        if kind in true and role not in running and not observed.ended:
            yield f"{kind} without a pod of {role}"
    if "Ready" in true and not observed.ended and not set(needed) <= true:
        yield "Ready without its roles"
    if is_leaving(observed.job) and true & {"Ready", *needed}:
        yield f"{true} while it is deleted"
    if "Suspended" in true and conditions["Suspended"]["reason"] == "SuspendedByUser" and "trainer" in running:
        yield "Suspended while the trainer runs"
    if "Complete" in true and not any(holds(job, "Complete") for job in world.cluster.of_kind("Job")):
        yield "Complete before the trainer ended"
    attempts = {labels(pod)[names.LABEL_ATTEMPT] for pod in pods if labels(pod)[names.LABEL_ROLE] == "trainer"}
    if len(attempts) > 1:
        yield f"attempts {attempts} at once"


def disturbed_life(seed: int, rate: float, job: dict[str, Any]) -> list[str]:
    """Return the lies of a job's life."""
    disturbed = Disturbed(World(rljob(**job)), seed, rate)
    found: list[str] = []
    for happens in SCRIPT:
        happens(disturbed.world)
        found += disturbed.work()
    return found


@pytest.mark.long
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.1, 0.3, 1.0]), kind=st.sampled_from(range(len(JOBS))))
def test_no_wrong_answer_makes_a_condition_lie_and_all_is_well_within_ten_seconds(seed: int, rate: float, kind: int):
    assert disturbed_life(seed, rate, JOBS[kind]) == []


def deleted_life(seed: int, rate: float, job: dict[str, Any], mode: str) -> list[str]:
    """Return the lies of a job that is deleted after some of the script, and created again as it was at first."""
    disturbed, draw = Disturbed(World(rljob(**job)), seed, rate), random.Random(seed)
    world, cluster, found = disturbed.world, disturbed.world.cluster, list[str]()
    for number in (0, *sorted(draw.sample(range(1, len(SCRIPT)), 2))):
        SCRIPT[number](world)
        found += disturbed.work()
    run = world.status["run"]
    modes = {"background": cluster.remove, "foreground": cluster.delete_in_foreground, "orphan": cluster.orphan}
    modes[mode]("RLJob", "job")
    for _ in range(draw.randint(1, 4)):
        found += disturbed.look(heard=draw.random() < 0.7)
        cluster.collect_garbage()
    while cluster.find("RLJob", "job"):
        found += disturbed.look()
        cluster.collect_garbage()
    cluster.put(rljob(**job))
    found += disturbed.work()
    cluster.collect_garbage()
    world.settle()
    assert (world.status["run"] == run) == (mode == "orphan")
    assert {labels(pod)[names.LABEL_RUN] for pod in cluster.of_kind("Pod")} == {world.status["run"]}
    return found


@pytest.mark.long
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from([0.1, 0.3, 1.0]),
    kind=st.sampled_from(range(len(JOBS))),
    mode=st.sampled_from(["background", "foreground", "orphan"]),
)
def test_a_job_that_is_deleted_amid_wrong_answers_says_so_and_the_next_of_its_name_is_well(
    seed: int, rate: float, kind: int, mode: str
):
    assert deleted_life(seed, rate, JOBS[kind], mode) == []


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer[0]} {answer[2]}".strip())
def test_every_call_of_a_new_job_answers_the_same(answer: tuple[int, str, str]):
    status, message, reason = answer
    world = World()

    def fail(call: str) -> None:
        if "status" not in call and "Event" not in call:
            raise error_of(status, message, reason) if status else KubeError(message)

    world.cluster.before = fail
    for _ in range(3):
        world.learn()
        admitted = world.condition("Admitted")
        assert admitted["status"] == "False"
        assert admitted["message"]
    world.cluster.before = lambda call: None
    world.cluster.now += LONGEST_BACKOFF_S
    world.settle()
    assert world.status["phase"] == "Running"
