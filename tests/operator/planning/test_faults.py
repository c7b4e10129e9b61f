"""Whatever calls fail and whatever events are lost, late or doubled: the job ends in the same state."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from cluster_model import ClusterModel
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from world import JOBS, SCRIPT, World, rljob, settled

from plaudit_operator.runtime.kube import ApiUnavailableError, ConflictError, GoneError


class KilledError(BaseException):
    """The operator's process ends here."""


OF_THE_MOMENT = (
    "cost",
    "startTime",
    "completionTime",
    "progress",
    "lastAttemptStep",
    "shortAttempts",
    "nextAttemptTime",
)
"""Times, and what depends on when the metrics service was last read."""


def the_end(world: World) -> dict[str, Any]:
    """What must be the same in the end: the children with what they say, and the status without its times."""
    status = {key: value for key, value in world.status.items() if key not in OF_THE_MOMENT}
    status["conditions"] = [
        {key: condition[key] for key in ("type", "status", "reason")} for condition in status["conditions"]
    ]
    for role in status["roles"]:
        role.pop("lastFailure", None)
    specs = {
        (item["kind"], item["metadata"]["name"]): item.get("spec")
        for item in world.cluster.objects.values()
        if item["kind"] not in ("RLJob", "Pod", "Event", "Secret")
    }
    return {
        "status": status,
        "specs": specs,
        "children": world.children() - {c for c in world.children() if c[0] == "Secret"},
    }


def live(world: World, each: Callable[[World], None]) -> None:
    """The script, with ``each`` as the operator's work after every event of it."""
    for happens in SCRIPT:
        happens(world)
        each(world)


@cache
def undisturbed(kind: int) -> dict[str, Any]:
    """Return the end of the same life without faults."""
    world = World(rljob(**JOBS[kind]))
    live(world, World.settle)
    return the_end(world)


FAULTS = [
    ConflictError("409", 409),
    GoneError("410", 410),
    ApiUnavailableError("429", 429, 1.0),
    ApiUnavailableError("500", 500),
    ApiUnavailableError("no answer"),
]


@pytest.mark.long
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.05, 0.3, 0.6]), kind=st.sampled_from(range(len(JOBS))))
def test_any_faults_and_any_order_of_events_end_in_the_same_state(seed: int, rate: float, kind: int):
    draw = random.Random(seed)
    world = World(rljob(**JOBS[kind]))
    disturbed = True

    def fault(_: str) -> None:
        if disturbed and draw.random() < rate:
            raise draw.choice(FAULTS)

    world.cluster.before = world.cluster.after = fault

    def work(world: World) -> None:
        nonlocal disturbed
        disturbed = True
        for _ in range(draw.randint(3, 15)):
            kinds = list(world.cluster.events)
            draw.shuffle(kinds)
            for kind in kinds:
                world.deliver(kind, count=draw.randint(0, 4), twice=draw.random() < 0.3)
            world.reconcile()
            if draw.random() < 0.6:
                world.cluster.run_controllers()
            if draw.random() < 0.1:
                world.relist()
        disturbed = False
        world.relist()
        world.settle()

    live(world, work)
    assert the_end(world) == undisturbed(kind)


EVERY = 1 if settings().max_examples >= 40 else 3
"""The operator is killed at every third call, and in CI at every call."""


@pytest.mark.parametrize("kind", [0, 3], ids=["one pod", "two pods"])
@pytest.mark.parametrize("step", range(len(SCRIPT)))
def test_the_operator_killed_at_every_call_of_a_jobs_life(step: int, kind: int):
    """After a call is as good as before the next one: nothing in memory survives."""
    world = World(rljob(**JOBS[kind]))
    for happens in SCRIPT[:step]:
        happens(world)
        world.settle()
    SCRIPT[step](world)
    before = copy.deepcopy(world.cluster)
    calls = len(world.cluster.calls)
    world.settle()
    undisturbed, calls_of_the_step = the_end(world), len(world.cluster.calls) - calls
    for number in range(calls + 1 + (step + kind) % EVERY, calls + calls_of_the_step + 1, EVERY):
        world = World(cluster=copy.deepcopy(before))
        world.cluster.after = partial(kill_at, world.cluster, number)
        with contextlib.suppress(KilledError):
            world.settle()
        world.start_operator()
        world.settle()
        assert the_end(world) == undisturbed, world.cluster.calls[number - 1]


def kill_at(cluster: ClusterModel, number: int, call: str) -> None:
    if len(cluster.calls) == number:
        raise KilledError(call)


def test_a_stale_cache_never_makes_two_attempts_run():
    world = settled()
    world.cluster.end_trainer(1)
    world.cluster.run_controllers()
    for _ in range(30):
        world.deliver("RLJob")
        world.reconcile()
    attempts = {
        pod["metadata"]["labels"]["plaudit.dev/attempt"]
        for pod in world.cluster.of_kind("Pod")
        if "trainer" in pod["metadata"]["name"]
    }
    assert len(attempts) <= 1
    assert world.status["restarts"] <= 1
