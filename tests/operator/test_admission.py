"""What is admitted, refused and changed while a job runs, also if another version of the operator admitted it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bad_specs import BAD, bad_job
from hypothesis import given
from hypothesis import strategies as st
from world import World, rljob, settled

from plaudit_operator.admission import Admitted, RefusedJob, admit, frozen_changes, overlaid
from plaudit_operator.names import ConditionType


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda value: "")
def test_a_bad_specification_is_refused_with_its_remedy(changes: dict[str, Any], words: str):
    refused = admit(bad_job(changes), None, None)
    assert isinstance(refused, RefusedJob)
    assert words in refused.message


def test_the_job_that_the_bad_ones_are_made_of_is_admitted():
    assert isinstance(admit(rljob(), None, None), Admitted)


def test_only_mutable_fields_of_a_change_count():
    before = rljob()["spec"]
    after = json.loads(json.dumps(before))
    after["rollout"] |= {"replicas": 7, "inFlight": "drain"}
    after["reward"]["workers"] |= {"autoscaling": {"maxReplicas": 3}, "processes": 9}
    after["lifecycle"] = {"activeDeadlineSeconds": 5}
    after |= {"suspend": True, "scheduling": {"gang": "native"}}
    after["seed"] = 2
    counts = overlaid(before, after)
    assert counts["rollout"] == {"replicas": 7}
    assert counts["reward"]["workers"] == {"replicas": 2, "autoscaling": {"maxReplicas": 3}}
    assert counts["lifecycle"] == {"activeDeadlineSeconds": 5}
    assert counts["suspend"] is True
    assert "scheduling" not in counts
    assert sorted(frozen_changes(before, after)) == [
        "spec.reward.workers.processes",
        "spec.rollout.inFlight",
        "spec.scheduling",
        "spec.seed",
    ]


def test_limits_of_a_scorer_may_change_and_its_judge_may_not():
    scorer = {"name": "j", "kind": "judge", "judge": {"model": "a"}, "limits": {"concurrency": 1}}
    before = {"reward": {"scorers": [scorer]}}
    after = {"reward": {"scorers": [{**scorer, "judge": {"model": "b"}, "limits": {"concurrency": 2}}]}}
    assert overlaid(before, after) == {"reward": {"scorers": [{**scorer, "limits": {"concurrency": 2}}]}}


@given(st.sampled_from(sorted(rljob()["spec"])), st.one_of(st.none(), st.integers(), st.just({}), st.text(max_size=3)))
def test_whatever_a_section_is_changed_to_the_admitted_one_is_never_lost(section: str, value: Any):
    before = rljob()["spec"]
    after = {**before, section: value} if isinstance(value, dict | None) else before
    counts = overlaid(before, {key: part for key, part in after.items() if part is not None})
    assert set(before) <= set(counts)


def test_the_same_specification_has_no_changes():
    spec = rljob()["spec"]
    assert overlaid(spec, spec) == spec
    assert frozen_changes(spec, spec) == []


Data = dict[str, Any]


def rewrite(world: World, key: str, change: Callable[[Any], None]) -> None:
    """Changes a file in the job's ConfigMap, as another version would have written it."""
    config = world.cluster.find("ConfigMap", "job-job")
    assert config
    data = json.loads(config["data"][key])
    change(data)
    text = json.dumps(data, separators=(",", ":"), sort_keys=key != "job.yaml")
    world.cluster.edit("ConfigMap", "job-job", lambda item: item["data"].update({key: text}))


def job_file(world: World) -> Data:
    config = world.cluster.find("ConfigMap", "job-job")
    assert config
    found: Data = json.loads(config["data"]["job.yaml"])
    return found


def pods(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod")}


def test_another_default_restarts_nothing_and_stays_out_of_the_job_file():
    world = settled()
    before = pods(world)
    # The version that admitted it had another default, a field that is gone since, and none of maxDisruptions.
    rewrite(world, "job.yaml", lambda job: job["spec"]["rollout"]["engine"].update(oldField=1, tensorParallelSize=1))
    rewrite(world, "job.yaml", lambda job: job["spec"]["lifecycle"]["failurePolicy"].pop("maxDisruptions"))
    rewrite(world, "job.yaml", lambda job: job["spec"]["algorithm"].update(learningRate=0.5))
    old = job_file(world)
    world.start_operator()
    world.settle()
    assert pods(world) == before
    assert job_file(world) == old
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(metrics={"rewardLatency": {"target": 0.5}}))
    world.settle()
    edited = job_file(world)
    assert edited["spec"]["metrics"]["rewardLatency"]["target"] == 0.5
    assert edited["spec"]["rollout"]["engine"] == old["spec"]["rollout"]["engine"]
    assert edited["spec"]["algorithm"] == old["spec"]["algorithm"]
    assert "maxDisruptions" not in json.dumps(edited)
    rollouts = {p["metadata"]["uid"] for p in world.cluster.of_kind("Pod") if "rollout" in p["metadata"]["name"]}
    assert rollouts <= before


def test_an_edit_after_an_upgrade_keeps_the_images_of_the_jobs_admission():
    world = settled(reward={"scorers": rljob()["spec"]["reward"]["scorers"], "timeoutSeconds": 30})
    world.settings = replace(world.settings, images=replace(world.settings.images, worker="worker:2"))
    world.start_operator()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(metrics={"rewardLatency": {"target": 0.5}}))
    world.settle()
    metrics = world.cluster.find("Deployment", "job-metrics")
    assert metrics
    [container] = metrics["spec"]["template"]["spec"]["containers"]
    assert {"name": "PLAUDIT_REWARD_LATENCY_TARGET", "value": "0.5"} in container["env"]
    assert container["image"] == "worker:1"


def test_a_mutable_field_that_the_admitting_version_did_not_know_stays_out_of_its_processes_file():
    world = settled()
    newer = ("metrics.rewardLatency", "metrics.rewardLatency.target", "rollout.replicas")

    def of_older_version(fields: Any) -> None:
        fields[:] = [field for field in fields if field not in newer]

    rewrite(world, "mutable-fields.json", of_older_version)
    rewrite(world, "job.yaml", lambda job: job["spec"]["metrics"].pop("rewardLatency"))
    rewrite(world, "job.yaml", lambda job: job["spec"]["rollout"].pop("replicas"))
    world.start_operator()
    world.settle()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(metrics={"rewardLatency": {"target": 0.5}}))
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=3))
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(lifecycle={"activeDeadlineSeconds": 3600}))
    world.settle()
    edited = job_file(world)["spec"]
    assert "rewardLatency" not in edited["metrics"]
    assert "replicas" not in edited["rollout"]
    assert edited["lifecycle"]["activeDeadlineSeconds"] == 3600
    assert world.status["replicas"]["rollout"] == "3/3"  # the operator itself follows the edit


def admitted_with_zero_steps() -> World:
    """A running job whose ``algorithm.steps`` this version rejects."""
    world = settled()
    for key in ("spec.json", "current.json"):
        rewrite(world, key, lambda spec: spec["algorithm"].update(steps=0))
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["algorithm"].update(steps=0))
    world.start_operator()
    return world


def test_a_running_job_that_this_version_would_reject_runs_on_to_its_end():
    world = admitted_with_zero_steps()
    before = pods(world)
    world.settle()
    assert (world.status["phase"], pods(world)) == ("Running", before)
    assert world.condition(ConditionType.SPEC_VALID)["status"] == "True"
    world.cluster.end_trainer(1, "boom")
    world.settle()
    assert world.status["restarts"] == 1
    assert world.status["phase"] == "Running"
    world.cluster.end_trainer(0)
    world.settle()
    assert world.status["phase"] == "Complete"


def test_its_valid_edits_apply_and_only_the_new_part_of_an_invalid_one_is_rejected():
    world = admitted_with_zero_steps()
    world.settle()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=True))
    world.settle()
    assert world.status["phase"] == "Suspended"
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=False))
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(lifecycle={"activeDeadlineSeconds": -1}))
    world.settle()
    valid = world.condition(ConditionType.SPEC_VALID)
    assert (valid["status"], valid["reason"]) == ("False", "Invalid")
    assert "activeDeadlineSeconds" in valid["message"]
    assert "steps" not in valid["message"]


def test_a_rollback_that_takes_fields_of_the_newer_version_out_of_the_spec_changes_nothing():
    world = settled()
    before = pods(world)
    for key in ("spec.json", "current.json"):
        rewrite(world, key, lambda spec: spec["rollout"].update(newField=1))
        rewrite(world, key, lambda spec: spec["reward"]["scorers"][0].update(newField=1))
    rewrite(world, "job.yaml", lambda job: job["spec"]["rollout"].update(newField=1))
    old = job_file(world)
    world.start_operator()
    world.settle()
    assert world.condition(ConditionType.SPEC_VALID)["status"] == "True"
    assert world.condition(ConditionType.STALLED)["status"] == "False"
    assert (pods(world), job_file(world)) == (before, old)
    world.cluster.end_trainer(0)
    world.settle()
    assert world.status["phase"] == "Complete"


def applied(spec: dict[str, Any], written: Any) -> dict[str, Any]:
    """Return a job as ``kubectl apply`` stores it: its annotation holds what the user wrote."""
    job = rljob(**spec)
    job["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": written if isinstance(written, str) else json.dumps(written)
    }
    return job


def test_a_null_that_kubectl_apply_lost_is_named():
    sidecars = [{"name": "proxy", "image": "x:1"}]
    template = {"spec": {"containers": sidecars, "securityContext": {}}}
    lost = {"spec": {"containers": [{**sidecars[0], "command": None}], "securityContext": {"fsGroup": None}}}
    rollout = {"replicas": 1, "pod": {"template": template}}
    job = applied({"rollout": rollout}, {"spec": {"rollout": {**rollout, "pod": {"template": lost}}}})
    world = settled(job)
    valid = world.condition("SpecValid")
    field = "spec.rollout.pod.template.spec"
    assert valid["status"] == "True"
    assert f"{field}.containers[0].command, {field}.securityContext.fsGroup" in valid["message"]
    assert "kubectl apply --server-side" in valid["message"]


@pytest.mark.parametrize(
    "written",
    [
        {
            "spec": {"rollout": {"pod": {"template": {"spec": {"hostname": None}}}}}
        },  # it is there, or was replaced since
        {"spec": {"seed": None}},
        {"spec": None},
        [None],
        "null",
        "null {",
        '{"null": ' * 3000,
    ],
    ids=str,
)
def test_other_nulls_are_not(written: Any):
    rollout = {"replicas": 1, "pod": {"template": {"spec": {"hostname": "x"}}}}
    world = settled(applied({"rollout": rollout}, written))
    assert "null" not in world.condition("SpecValid")["message"]
