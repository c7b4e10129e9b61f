"""What is cached of a rendering is the rendering."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from world import World, rljob, settled

from plaudit_operator.cache import Key
from plaudit_operator.planning import rendering
from plaudit_operator.planning.rendering import Rendering
from plaudit_operator.runtime.threads import Latest

FILES = {"metadata": {"name": "code", "namespace": "default"}, "apiVersion": "v1", "kind": "ConfigMap"}
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def plain(rendered: Any) -> Any:
    """Return all of a rendering as plain data."""
    assert isinstance(rendered, Rendering)
    context = rendered.context
    data = [rendered.manifests, rendered.templates, rendered.replicas, sorted(rendered.gang), rendered.waits]
    admitted = context.admitted
    data += [admitted.spec, admitted.current, admitted.templates, admitted.written, admitted.reason, admitted.services]
    data += [
        [(file.path, file.content) for file in context.admitted.files],
        context.admitted.job.model_dump(mode="json"),
    ]
    return msgspec.json.decode(msgspec.json.encode(data))


def with_files() -> World:
    scorers = [{"name": "mine", "kind": "python", "python": {"path": "reward.py"}}]
    job = rljob(files={"configMap": "code"}, reward={"scorers": scorers})
    world = World(job)
    world.cluster.put({**FILES, "data": {"reward.py": REWARD}})
    return world


@pytest.mark.parametrize(
    "world",
    [
        World,
        with_files,
        lambda: World(rljob(scheduling={"gang": "native"})),
        lambda: World(rljob(rollout={"replicas": 2, "podsPerReplica": 2, "engine": {"tensorParallelSize": 2}})),
    ],
)
def test_a_cached_rendering_equals_a_fresh_one(world: Any):
    world = world()
    world.settle()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(metrics={"rewardLatency": {"target": 0.5}}))
    world.settle()
    observed = world.cache.observed(world.key)
    cached = plain(rendering.rendering(observed, world.settings))
    assert len(rendering._kept._values) > 0
    rendering._kept._values.clear()
    assert plain(rendering.rendering(observed, world.settings)) == cached


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("current.json", None, "current.json is missing"),
        ("templates.json", "{", "templates.json: Input data was truncated"),
        ("images.json", "[]", "images.json: Expected `object`, got `array`"),
        ("run.json", "x", "run.json: JSON is malformed"),
        ("job.yaml", "kind: RLJob", "job.yaml: JSON is malformed"),
    ],
)
@pytest.mark.parametrize("kind", ["RLJob", "RewardService"])
def test_a_config_map_that_was_edited_beyond_reading_is_named_and_written_anew_once_it_is_gone(
    kind: str, key: str, text: str | None, told: str
):
    rule = {"name": "right", "kind": "rule", "rule": "gsm8k"}
    of_service = {**rljob(), "kind": kind, "spec": {"reward": {"scorers": [rule]}}}
    world = World(rljob() if kind == "RLJob" else of_service, key=Key("default", "job", kind))
    world.settle()

    def edited(item: dict[str, Any]) -> None:
        item["data"] = {k: v for k, v in item["data"].items() if k != key} | ({} if text is None else {key: text})

    world.cluster.edit("ConfigMap", "job-job", edited)
    world.start_operator()
    world.settle()
    valid, admitted = world.condition("SpecValid"), world.condition("Admitted")
    assert (valid["status"], valid["reason"]) == ("False", "Invalid")
    assert (
        f"ConfigMap job-job, in which the operator keeps what it admitted, was edited and cannot be read: {told}"
        in (valid["message"])
    )
    assert admitted["message"] == "the objects that are left stay as they are"
    assert world.cluster.roles() > {"reward", "redis"}
    world.cluster.remove("ConfigMap", "job-job")
    world.settle()
    assert world.status["phase"] == "Running"


def test_an_edit_is_rendered_anew():
    world = settled()
    for replicas in (5, 1, 5):
        world.cluster.edit(
            "RLJob", "job", lambda job, replicas=replicas: job["spec"]["rollout"].update(replicas=replicas)
        )
        world.settle()
        found = world.cluster.find("Deployment", "job-rollout")
        assert found
        assert found["spec"]["replicas"] == replicas


def test_the_value_used_least_recently_is_dropped():
    kept: Latest[str, int] = Latest(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    kept.put("a", 4)
    assert kept.get("a") == 4
