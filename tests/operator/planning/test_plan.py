"""A job's life from its creation to its end, on the model of a cluster; and when a child is said to have drifted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cluster_model import START
from hypothesis import given
from hypothesis import strategies as st
from world import JOBS, World, rljob, settled

from plaudit_operator.names import KEDA_PAUSE, ConditionType
from plaudit_operator.observed import timestamp
from plaudit_operator.planning.plan import differs


def test_a_job_gets_all_its_children_and_runs():
    world = settled()
    assert world.children() == {
        ("ConfigMap", "job-job"),
        ("ServiceAccount", "job-pods"),
        ("Secret", f"job-redis-{world.job['metadata']['uid'][:8]}"),
        ("StatefulSet", "job-redis"),
        ("Service", "job-redis"),
        ("Deployment", "job-rollout"),
        ("PodDisruptionBudget", "job-rollout"),
        ("Deployment", "job-reward"),
        ("PodDisruptionBudget", "job-reward"),
        ("Deployment", "job-metrics"),
        ("Service", "job-metrics"),
        ("Job", "job-trainer-0"),
        ("NetworkPolicy", "job-reward"),
        ("NetworkPolicy", "job-metrics"),
        ("NetworkPolicy", "job-trainer"),
        ("NetworkPolicy", "job-redis"),
    }
    assert world.status["phase"] == "Running"
    assert world.status["replicas"] == {"rollout": "2/2", "reward": "2/2"}
    assert world.status["startTime"]


def scaled(**scaling: Any) -> dict[str, Any]:
    workers = {"autoscaling": {"maxReplicas": 4, **scaling}, "pod": {"resources": {"requests": {"cpu": "1"}}}}
    return {"reward": {**rljob()["spec"]["reward"], "workers": workers}}


@pytest.mark.parametrize(
    "sections",
    [
        *JOBS,
        {"suspend": True},
        {"suspend": True, "scheduling": {"queueName": "team"}},
        scaled(provider="hpa", minReplicas=2),
        scaled(provider="keda", minReplicas=0),
        {"rollout": {"groups": [{"name": "a", "replicas": 2}, {"name": "b", "replicas": 3}]}},
    ],
)
def test_the_status_of_a_new_job_is_written_once_for_all_objects_that_the_operator_creates(sections: dict[str, Any]):
    world = World(rljob(**sections))
    world.reconcile()
    others = [call for call in world.cluster.calls if not call.startswith("create")]
    assert others == ["patch RLJob job status"]
    before = world.status
    world.learn()
    assert world.status == before
    assert "cost" in before


def test_a_job_at_rest_is_not_written():
    world = settled()
    world.cluster.calls.clear()
    for _ in range(5):
        world.reconcile()
    assert world.cluster.calls == []


def test_the_trainers_end_completes_the_job_and_nothing_is_left_but_the_secret_of_the_job():
    world = settled()
    world.cluster.end_trainer(0)
    world.settle()
    assert world.status["phase"] == "Complete"
    assert world.status["completionTime"]
    assert world.status["progress"] == {"step": 2, "verdict": "reward", "backlog": 0}
    assert {kind for kind, _ in world.children()} == {"Secret"}


def test_terminal_is_terminal():
    world = settled()
    world.cluster.end_trainer(0)
    world.settle()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(lifecycle={"ttlSecondsAfterFinished": 100}))
    world.settle()
    assert world.status["phase"] == "Complete"
    assert not world.cluster.of_kind("Job")


@pytest.mark.parametrize(
    ("cleanup", "left"),
    [
        ("All", set()),
        ("KeepTransport", {("StatefulSet", "job-redis"), ("Service", "job-redis"), ("NetworkPolicy", "job-redis")}),
    ],
)
def test_cleanup_lists_the_remaining_objects(cleanup: str, left: set[tuple[str, str]]):
    world = settled(lifecycle={"cleanup": cleanup})
    world.cluster.end_trainer(3, "too many failed scores")
    world.settle()
    assert world.status["phase"] == "Failed"
    assert {child for child in world.children() if child[0] != "Secret"} == left


def test_cleanup_none_keeps_every_object():
    world = settled(lifecycle={"cleanup": "None"})
    before = world.children()
    world.cluster.end_trainer(0)
    world.settle()
    assert world.children() == before


def test_time_to_live_deletes_the_job():
    world = settled(lifecycle={"ttlSecondsAfterFinished": 100})
    world.cluster.end_trainer(0)
    world.settle()
    world.cluster.now += 99
    world.settle()
    assert world.cluster.find("RLJob", "job")
    world.cluster.now += 2
    world.reconcile()
    assert world.cluster.find("RLJob", "job") is None
    assert not world.children()


def test_a_failed_attempt_is_followed_by_another_once_its_pods_are_gone():
    world = settled()
    world.cluster.end_trainer(1, "ValueError: boom")
    world.cluster.run_controllers()
    world.learn()
    world.learn()
    assert [job["metadata"]["name"] for job in world.cluster.of_kind("Job")] == []
    assert "boom" in world.condition(ConditionType.TRAINER_RUNNING)["message"]
    world.settle()
    assert [job["metadata"]["name"] for job in world.cluster.of_kind("Job")] == ["job-trainer-1"]
    assert (world.status["restarts"], world.status["disruptions"], world.status["attempt"]) == (1, 0, 1)
    assert world.status["phase"] == "Running"


def test_too_many_failed_attempts_fail_the_job_with_the_last_output():
    world = World(rljob(lifecycle={"failurePolicy": {"maxRestarts": 1}}))
    for _ in range(2):
        world.settle()
        world.cluster.end_trainer(1, "ValueError: boom")
    world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == "TooManyRestarts"
    assert "boom" in world.condition(ConditionType.FAILED)["message"]


@pytest.mark.parametrize("ending", [{"code": 137, "disrupted": True}, {"code": 4}])
def test_disruptions_do_not_count(ending: dict[str, int]):
    world = World(rljob(lifecycle={"failurePolicy": {"maxRestarts": 0}}))
    for _ in range(3):
        world.settle()
        world.cluster.end_trainer(**ending)
    world.settle()
    assert (world.status["restarts"], world.status["disruptions"]) == (0, 3)
    assert world.status["phase"] == "Running"


def test_a_trainer_pod_deleted_by_hand_is_a_disruption():
    world = settled(lifecycle={"failurePolicy": {"maxRestarts": 0}})
    pod = next(p for p in world.cluster.of_kind("Pod") if "trainer" in p["metadata"]["name"])
    world.cluster.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert (world.status["disruptions"], world.status["phase"]) == (1, "Running")


@pytest.mark.parametrize(
    ("seconds_after_the_deletion", "code", "counters"),
    [
        (5, 143, (0, 1)),  # it had not come to its own handler yet
        (0, 143, (0, 1)),
        (600, 137, (0, 1)),  # its grace period is over
        (7, 1, (0, 1)),  # stopping failed
        (-1, 1, (1, 0)),  # it had failed before
        (0, 2, (0, 1)),  # a Go program's answer to SIGTERM
    ],
)
def test_a_trainer_that_ends_because_its_pod_is_deleted_is_disrupted(
    seconds_after_the_deletion: int, code: int, counters: tuple[int, int]
):
    world = settled()
    (pod,) = (p for p in world.cluster.of_kind("Pod") if "trainer" in p["metadata"]["name"])
    deleted = {"deletionTimestamp": timestamp(world.cluster.now + 600), "deletionGracePeriodSeconds": 600}
    world.cluster.put({**pod, "metadata": {**pod["metadata"], **deleted}})
    world.cluster.now += seconds_after_the_deletion
    world.cluster.end_trainer(code)
    world.cluster.run_controllers()
    world.learn()
    world.cluster.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert (world.status["restarts"], world.status["disruptions"]) == counters


def test_the_first_request_of_a_deletion_counts_although_the_api_server_moves_its_time():
    world = settled()
    (pod,) = (p for p in world.cluster.of_kind("Pod") if "trainer" in p["metadata"]["name"])
    deleted = {"deletionTimestamp": timestamp(world.cluster.now + 600), "deletionGracePeriodSeconds": 600}
    world.cluster.put({**pod, "metadata": {**pod["metadata"], **deleted}})
    world.cluster.end_trainer(2)
    (pod,) = (p for p in world.cluster.of_kind("Pod") if "trainer" in p["metadata"]["name"])
    last = {"deletionTimestamp": timestamp(world.cluster.now + 1), "deletionGracePeriodSeconds": 0}
    world.cluster.put({**pod, "metadata": {**pod["metadata"], **last}})  # the kubelet's deletion of the ended pod
    world.cluster.run_controllers()
    world.learn()
    world.cluster.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert (world.status["restarts"], world.status["disruptions"]) == (0, 1)


@pytest.mark.parametrize(
    ("deleted_s", "crash_s", "counters"),
    [
        (0, 3, (0, 1)),  # one pod was deleted, the other lost its peer
        (2, 1, (1, 0)),  # one crashed, and its Job deleted the other
    ],
)
def test_of_several_ranks_the_first_that_ends_decides(deleted_s: int, crash_s: int, counters: tuple[int, int]):
    world = settled(trainer={"ranks": 2, "ranksPerPod": 1, "strategy": "fsdp2"})
    deleted, crashed = (p for p in world.cluster.of_kind("Pod") if "trainer" in p["metadata"]["name"])
    removal = timestamp(world.cluster.now + deleted_s + 600)
    deleted["metadata"] |= {"deletionTimestamp": removal, "deletionGracePeriodSeconds": 600}
    for pod, code, after_s in ((deleted, 143, deleted_s + 1), (crashed, 1, crash_s)):
        ended = {"exitCode": code, "reason": "Error", "finishedAt": timestamp(world.cluster.now + after_s)}
        container = {"name": "trainer", "restartCount": 0, "state": {"terminated": ended}}
        world.cluster.put({**pod, "status": {"phase": "Failed", "containerStatuses": [container]}})
    world.cluster.run_controllers()
    world.learn()
    for pod in (deleted, crashed):
        world.cluster.remove("Pod", pod["metadata"]["name"])
    world.settle()
    assert (world.status["restarts"], world.status["disruptions"]) == counters


@pytest.mark.parametrize(("code", "reason"), [(42, "DoNotRetry"), (3, "TooManyFailedScores")])
def test_exit_codes_that_end_the_job(code: int, reason: str):
    world = settled()
    world.cluster.end_trainer(code, "because")
    world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == reason
    assert "because" in world.condition(ConditionType.FAILED)["message"]


def test_suspend_gives_back_everything_but_redis_and_metrics_and_resume_takes_it_again():
    world = settled()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=True))
    world.settle()
    roles = {pod["metadata"]["labels"]["plaudit.dev/role"] for pod in world.cluster.of_kind("Pod")}
    assert roles == {"redis", "metrics"}
    assert world.status["phase"] == "Suspended"
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=False))
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.status["replicas"] == {"rollout": "2/2", "reward": "2/2"}
    assert world.status["restarts"] == 0


def test_a_job_is_suspended_when_its_last_pod_has_ended():
    world = settled()
    [ending, *_] = [pod for pod in world.cluster.of_kind("Pod") if "rollout" in pod["metadata"]["name"]]
    ending["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": []}
    ending["status"]["conditions"] = [{"type": "Ready", "status": "False"}]  # it holds its GPU still
    world.cluster.put(ending)
    world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=True))
    world.settle()
    assert world.condition(ConditionType.SUSPENDED)["message"] == "waiting for pods to end: rollout 1"
    world.cluster.remove("Pod", ending["metadata"]["name"])
    world.settle()
    assert world.status["phase"] == "Suspended"


def test_time_in_suspension_counts_for_no_deadline():
    world = settled(lifecycle={"activeDeadlineSeconds": 100})
    for suspend in (True, False):
        world.cluster.now += 90
        world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=suspend))  # noqa: B023
        world.settle()
    assert world.status["phase"] == "Running"


def test_a_trainers_job_that_another_program_suspends_is_named():
    world = World()
    suspended = world.cluster.patch
    create = world.cluster.create

    def made(manifest: dict[str, Any]) -> dict[str, Any]:
        spec = {**manifest["spec"], "suspend": True} if manifest["kind"] == "Job" else manifest.get("spec")
        return create({**manifest, "spec": spec} if spec else manifest)

    world.cluster.create = made  # type: ignore[method-assign]
    world.cluster.patch = lambda kind, *given: None if kind.kind == "Job" else suspended(kind, *given)  # type: ignore
    world.settle()
    told = world.condition(ConditionType.TRAINER_RUNNING)["message"]
    assert told.startswith("trainer 0/1: Job job-trainer-0 is suspended; if it stays so, another program suspends it")


def test_a_job_that_is_made_suspended_holds_nothing():
    world = settled(suspend=True)
    roles = {pod["metadata"]["labels"]["plaudit.dev/role"] for pod in world.cluster.of_kind("Pod")}
    assert roles == {"redis", "metrics"}
    world.cluster.now += 100_000
    world.settle()
    assert world.status["phase"] == "Suspended"  # the clock of preRunningDeadlineSeconds stands still


def test_replicas_follow_the_job_and_a_hand_that_changes_them_is_corrected():
    world = settled()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["rollout"].update(replicas=5))
    world.settle()
    assert world.status["replicas"]["rollout"] == "5/5"
    world.cluster.edit("Deployment", "job-rollout", lambda item: item["spec"].update(replicas=1))
    world.settle()
    assert world.status["replicas"]["rollout"] == "5/5"


def test_an_autoscalers_replicas_are_left_alone():
    workers = {"autoscaling": {"provider": "keda", "minReplicas": 2}}
    reward = rljob()["spec"]["reward"] | {"workers": workers}
    world = settled(reward=reward)
    assert world.cluster.find("ScaledObject", "job-reward")
    assert world.status["replicas"]["reward"] == "2/2"
    world.cluster.edit("Deployment", "job-reward", lambda item: item["spec"].update(replicas=7))
    world.settle()
    assert world.status["replicas"]["reward"] == "7/7"
    assert not any("scale" in call for call in world.cluster.calls)


def test_an_hpas_workers_rest_and_come_back():
    autoscaling = {"provider": "hpa", "minReplicas": 2}
    workers = {"autoscaling": autoscaling, "pod": {"resources": {"requests": {"cpu": "1"}}}}
    world = settled(reward=rljob()["spec"]["reward"] | {"workers": workers})
    world.cluster.edit("Deployment", "job-reward", lambda item: item["spec"].update(replicas=6))
    world.settle()
    assert world.status["replicas"]["reward"] == "6/6"
    for suspend, replicas in ((True, "0/0"), (False, "2/2")):
        world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=suspend))  # noqa: B023
        world.settle()
        assert world.status["replicas"]["reward"] == replicas


def test_keda_is_paused_while_the_job_is_suspended():
    reward = rljob()["spec"]["reward"] | {"workers": {"autoscaling": {"provider": "keda"}}}
    world = settled(reward=reward, suspend=True)
    paused = world.cluster.find("ScaledObject", "job-reward")
    assert paused
    assert paused["metadata"]["annotations"][KEDA_PAUSE] == "0"
    for suspend in (False, True, False):
        world.cluster.edit("RLJob", "job", lambda job: job["spec"].update(suspend=suspend))  # noqa: B023
        world.settle()
        found = world.cluster.find("ScaledObject", "job-reward")
        assert found
        assert (KEDA_PAUSE in found["metadata"]["annotations"]) == suspend


def test_children_deleted_or_edited_by_hand_come_back():
    world = settled()
    before = world.children()
    for kind, name in sorted(before - {c for c in before if c[0] in ("Secret", "ConfigMap", "Job")}):
        world.cluster.remove(kind, name)
    world.settle()
    assert world.children() == before
    world.cluster.edit("Service", "job-metrics", lambda item: item["spec"].update(selector={"some": "thing"}))
    world.settle()
    service = world.cluster.find("Service", "job-metrics")
    assert service
    assert service["spec"]["selector"]["plaudit.dev/role"] == "metrics"
    world.cluster.edit("Job", "job-trainer-0", lambda item: item["spec"].update(parallelism=0))
    world.cluster.edit("Deployment", "job-reward", lambda item: item["spec"].update(paused=True))
    world.settle()
    assert (world.cluster.find("Job", "job-trainer-0") or {})["spec"]["parallelism"] == 1
    assert not (world.cluster.find("Deployment", "job-reward") or {})["spec"].get("paused")


def test_what_a_policy_changed_for_good_when_an_object_was_made_is_left_as_it_is():
    world = settled()

    def larger(item: dict[str, Any]) -> None:
        item["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = "10Gi"

    world.cluster.edit("StatefulSet", "job-redis", larger)
    world.cluster.calls.clear()
    world.settle()
    assert not [call for call in world.cluster.calls if call.startswith("apply")]
    world.cluster.edit("StatefulSet", "job-redis", lambda item: item["metadata"]["labels"].pop("plaudit.dev/role"))
    world.settle()
    redis = world.cluster.find("StatefulSet", "job-redis") or {}
    assert "plaudit.dev/role" in redis["metadata"]["labels"]
    assert redis["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "10Gi"


def test_a_job_that_never_runs_fails_at_its_deadline_and_says_why():
    world = World(rljob(lifecycle={"preRunningDeadlineSeconds": 60}))
    world.learn()
    world.deliver()
    world.cluster.now += 61
    world.reconcile()
    assert world.condition(ConditionType.FAILED)["reason"] == "PreRunningDeadlineExceeded"
    assert "rollout 0/" in world.condition(ConditionType.FAILED)["message"]
    world.settle()
    assert not world.cluster.of_kind("Pod")


@pytest.mark.parametrize("age_s", [7200, -7200], ids=["older", "of a clock that is ahead"])
def test_the_time_to_run_is_counted_by_the_operators_clock_from_its_first_look(age_s: int):
    job = rljob(lifecycle={"preRunningDeadlineSeconds": 60})
    job["metadata"]["creationTimestamp"] = timestamp(START - age_s)
    world = World(job)
    world.learn()
    assert world.status["phase"] == "Starting"
    world.deliver()
    world.cluster.now += 61
    world.reconcile()
    assert world.condition(ConditionType.FAILED)["reason"] == "PreRunningDeadlineExceeded"


def test_a_job_that_runs_too_long_fails():
    world = settled(lifecycle={"activeDeadlineSeconds": 100})
    world.cluster.now += 101
    world.settle()
    assert world.condition(ConditionType.FAILED)["reason"] == "ActiveDeadlineExceeded"


def test_a_name_that_is_taken_is_never_adopted():
    world = World()
    stranger = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "job-redis", "namespace": "default"}}
    world.cluster.put({**stranger, "spec": {"ports": [{"port": 1}]}})
    world.learn(4)
    assert world.condition(ConditionType.ADMITTED)["reason"] == "NameTaken"
    assert "Service job-redis" in world.condition(ConditionType.ADMITTED)["message"]
    found = world.cluster.find("Service", "job-redis")
    assert found
    assert found["spec"] == {"ports": [{"port": 1}]}
    world.cluster.remove("Service", "job-redis")
    world.settle()
    assert world.condition(ConditionType.ADMITTED)["status"] == "True"


def test_a_bad_job_is_reported_and_creates_nothing():
    world = settled(algorithm={"steps": 3, "promptsPerStep": 10, "miniBatchesPerStep": 3})
    assert world.status["phase"] == "Invalid"
    assert "is not a multiple of miniBatchesPerStep" in world.condition(ConditionType.SPEC_VALID)["message"]
    assert not world.children()


def test_a_forbidden_change_is_reported_and_changes_nothing():
    world = settled()
    world.cluster.edit("RLJob", "job", lambda job: job["spec"]["model"].update(source="/plaudit/other"))
    world.settle()
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "ImmutableFieldChanged"
    assert "spec.model.source" in world.condition(ConditionType.SPEC_VALID)["message"]
    config = world.cluster.find("ConfigMap", "job-job")
    assert config
    assert "/plaudit/other" not in config["data"]["job.yaml"]
    assert world.status["phase"] == "Running"


def test_an_upgraded_operator_restarts_nothing():
    from dataclasses import replace

    world = settled()
    uids = {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod")}
    world.cluster.calls.clear()
    images = replace(world.settings.images, worker="worker:2", gpu="gpu:2", redis="redis:2")
    world.settings = replace(world.settings, images=images, job_defaults='{"runAsUser": 2000}')
    world.start_operator()
    world.settle()
    assert {pod["metadata"]["uid"] for pod in world.cluster.of_kind("Pod")} == uids
    assert world.cluster.calls == []


def test_a_job_deleted_and_made_again_under_its_name_waits_for_the_old_ones_children():
    world = settled()
    old = world.job["metadata"]["uid"]
    leftover = dict(world.cluster.find("Service", "job-redis") or {})
    world.cluster.remove("RLJob", "job")
    world.cluster.put({**leftover, "metadata": {**leftover["metadata"]}})
    world.cluster.put(rljob())
    assert world.job["metadata"]["uid"] != old
    world.learn(3)
    admitted = world.condition(ConditionType.ADMITTED)
    assert (admitted["status"], admitted["reason"]) == ("False", "AwaitingDeletion")
    assert "Service job-redis" in admitted["message"]
    world.cluster.remove("Service", "job-redis")
    world.settle()
    assert world.status["phase"] == "Running"


def test_unusable_reward_code_is_reported_before_any_pod_starts_and_checked_again():
    job = rljob(files={"configMap": "code"})
    job["spec"]["reward"]["scorers"][0]["python"]["path"] = "reward.py"
    world = World(job)
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "default"}}
    for source, words in (("def compute_score(:\n", "line 1 of reward.py"), ("def other(): ...\n", "does not define")):
        world.cluster.put({**code, "data": {"reward.py": source}})
        world.deliver()
        again = world.reconcile()
        world.deliver()
        assert again
        assert again.again_after_s == 8
        assert world.condition(ConditionType.SPEC_VALID)["reason"] == "FilesInvalid"
        assert words in world.condition(ConditionType.SPEC_VALID)["message"]
        assert not world.children() - {("ConfigMap", "code")}
    world.cluster.put({**code, "data": {"reward.py": "def compute_score(): ..."}})
    world.settle()
    assert world.status["phase"] == "Running"


def test_files_that_do_not_fit_into_the_jobs_config_map_are_refused_with_their_sizes():
    world = World(rljob(files={"configMap": "code"}))
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "default"}}
    world.cluster.put({**code, "data": {"a.json": "a" * (1000 << 10), "b.json": "b" * 2048}})
    world.learn()
    world.deliver()
    refused = world.condition(ConditionType.SPEC_VALID)
    assert refused["reason"] == "FilesInvalid"
    assert "the files take 1,002 KiB and the job itself" in refused["message"]
    assert "holds 1,024 KiB (largest: a.json 1,000 KiB, b.json 2 KiB)" in refused["message"]
    assert not world.children() - {("ConfigMap", "code")}
    world.cluster.put({**code, "data": {"b.json": "b" * 2048}})
    world.settle()
    assert world.status["phase"] == "Running"


def test_files_are_copied_once_with_their_digests():
    job = rljob(files={"configMap": "code"})
    job["spec"]["reward"]["scorers"][0]["python"]["path"] = "reward.py"
    world = World(job)
    world.learn()
    assert world.condition(ConditionType.SPEC_VALID)["reason"] == "FilesMissing"
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "default"}}
    world.cluster.put({**code, "data": {"reward.py": "compute_score = 1"}})
    world.settle()
    world.cluster.put({**code, "data": {"reward.py": "compute_score = 2"}})
    world.settle()
    config = world.cluster.find("ConfigMap", "job-job")
    assert config
    assert config["data"]["file-0"] == "compute_score = 1"


def test_a_job_that_only_scores_runs_without_trainer_and_rollouts():
    training = dict.fromkeys(("model", "data", "algorithm", "rollout", "trainer", "storage"))
    world = settled(**training)
    assert world.status["phase"] == "Running"
    assert not world.cluster.of_kind("Job")
    assert {d["metadata"]["name"] for d in world.cluster.of_kind("Deployment")} == {
        "job-reward",
        "job-gateway",
        "job-metrics",
    }


def test_each_event_is_recorded_once():
    world = settled()
    world.cluster.end_trainer(1, "boom")
    world.settle()
    world.cluster.end_trainer(0)
    world.settle()
    told = [(event["type"], event["reason"]) for event in world.cluster.of_kind("Event")]
    assert told.count(("Normal", "TrainerDone")) == 1
    assert ("Warning", "AttemptFailed") in told
    assert ("Normal", "Admitted") in told


SCALARS = st.one_of(st.booleans(), st.integers(), st.text(max_size=5))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), TREES, max_size=4))
def test_nothing_differs_from_itself(manifest: dict[str, Any]):
    assert not differs(manifest, copy.deepcopy(manifest))


@given(st.dictionaries(st.text(max_size=4), TREES, max_size=4), st.text(min_size=5, max_size=6), TREES)
def test_fields_added_by_the_server_are_not_drift(manifest: dict[str, Any], field: str, value: Any):
    assert not differs(manifest, {**manifest, field: value})


TWO_OF_ONE_TAINT = [{"key": "gpu", "effect": effect} for effect in ("NoSchedule", "NoExecute")]


@pytest.mark.parametrize(
    ("wanted", "observed"),
    [
        ({"resources": {"limits": {"cpu": "0.5"}}}, {"resources": {"limits": {"cpu": "500m"}}}),
        ({"resources": {"requests": {"memory": "1024Mi"}}}, {"resources": {"requests": {"memory": "1Gi"}}}),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}),
        ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A"}]}),
        ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "x"}]}),
        ({"readOnly": False, "subPath": ""}, {}),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 1, "protocol": "TCP"}]}),
        ({"tolerations": TWO_OF_ONE_TAINT}, {"tolerations": TWO_OF_ONE_TAINT, "nodeName": "a"}),
    ],
)
def test_another_form_of_the_same_is_the_same(wanted: Any, observed: Any):
    assert not differs(wanted, observed)


@pytest.mark.parametrize(
    ("wanted", "observed"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"a": 2}),
        ({"a": {"b": "x"}}, {"a": None}),
        ({"resources": {"limits": {"cpu": "1"}}}, {"resources": {"limits": {"cpu": "2"}}}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "1"}]}),
        ({"args": ["a", "b"]}, {"args": ["a"]}),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": "a"}),
        ({"tolerations": TWO_OF_ONE_TAINT}, {"tolerations": TWO_OF_ONE_TAINT[1:]}),
    ],
)
def test_a_real_difference_is_seen(wanted: Any, observed: Any):
    assert differs(wanted, observed)
