"""Which processes a job becomes, and what they ask for."""

import json
from pathlib import Path
from typing import Any

import pytest

from plaudit_job.load import parse_job
from plaudit_wire.errors import RefusedError
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.plan import LaunchSettings, ProcessPlan, Role, plan_processes, share_gpus
from plaudit_workers.launch.transport import RedisAccess, new_passwords, own_access

PASSWORDS = new_passwords(trains=True)
DEVICES = [str(number) for number in range(8)]


def planned(*, with_gpus: bool = False, **sections: dict[str, Any]) -> dict[Role, list[ProcessPlan]]:
    spec: dict[str, Any] = {
        "model": {"source": "/models/tiny"},
        "data": {"train": {"path": "/data/train.parquet"}},
        "algorithm": {"steps": 1, "promptsPerStep": 4, "samplesPerPrompt": 4},
        "rollout": {},
        "reward": {"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}]},
        "trainer": {},
    } | sections
    job = parse_job({"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec})
    return plan_processes(
        job,
        LaunchSettings("run", Path("/runs/run"), own_access("redis://h:1/0", PASSWORDS, Path("/runs/run"))),
        with_gpus=with_gpus,
    )


def test_every_role_has_its_processes_with_the_settings_of_the_run() -> None:
    plans = planned(rollout={"replicas": 2}, trainer={"ranks": 2, "strategy": "fsdp2"})
    assert {role: len(each) for role, each in plans.items()} == {"metrics": 1, "reward": 1, "rollout": 2, "trainer": 2}
    environment = plans["rollout"][1].environment
    assert environment["PLAUDIT_RUN"] == "run"
    assert environment["PLAUDIT_LOG_FILE"] == "/runs/run/logs/rollout-1.log"
    assert environment["PLAUDIT_REDIS_USERNAME"] == "rollout"


def test_each_role_gets_its_own_user_and_no_password_in_its_environment() -> None:
    plans = planned(reward={"scorers": [MODEL]})
    for role, user in {
        "trainer": "trainer",
        "reward": "reward",
        "metrics": "metrics",
        "model-helpful": "probe",
    }.items():
        environment = plans[role][0].environment
        assert environment["PLAUDIT_REDIS_PASSWORD_FILE"] == f"/runs/run/secrets/redis-{user}"
        assert not [name for name, value in environment.items() if any(word in value for word in PASSWORDS.values())]


def test_the_server_of_a_model_that_takes_turns_is_a_user_of_its_own() -> None:
    plans = planned(reward={"scorers": [{**MODEL, "model": {**MODEL["model"], "sleepDuringUpdates": True}}]})
    for plan in plans["model-helpful"]:
        assert plan.environment["PLAUDIT_REDIS_USERNAME"] == "model"


def test_a_job_that_only_scores_has_no_trainer_and_no_rollouts() -> None:
    reward = {"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}], "workers": {"replicas": 2}}
    job = parse_job(
        {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": {"reward": reward}}
    )
    plans = plan_processes(
        job, LaunchSettings("run", Path("/r"), RedisAccess(RedisAddress("redis://h:1/0"), Path("/r"))), with_gpus=False
    )
    assert {role: len(each) for role, each in plans.items()} == {"metrics": 1, "reward": 2, "gateway": 1}
    [gateway] = plans["gateway"]
    assert gateway.environment["PLAUDIT_GATEWAY_TOKENS"] == "/r/tokens"
    assert not gateway.secrets


def test_without_gpus_nothing_asks_for_one() -> None:
    assert all(plan.gpus == 0 for each in planned().values() for plan in each)


def test_with_gpus_the_plan_states_those_of_engine_and_ranks() -> None:
    plans = planned(with_gpus=True, rollout={"engine": {"tensorParallelSize": 2}})
    assert [plan.gpus for plan in plans["rollout"]] == [2]
    assert [plan.gpus for plan in plans["trainer"]] == [1]
    assert [plan.gpus for plan in plans["reward"]] == [0]


def test_rollout_groups_are_processes_with_their_own_gpus_and_a_replica_of_two_pods_is_one() -> None:
    groups = [{"name": "large", "replicas": 2, "engine": {"tensorParallelSize": 1}}, {"name": "small"}]
    plans = planned(with_gpus=True, rollout={"engine": {"tensorParallelSize": 4}, "groups": groups})
    assert [plan.gpus for plan in plans["rollout"]] == [1, 1, 4]
    assert [plan.name for plan in plans["rollout"]] == ["rollout-0", "rollout-1", "rollout-2"]
    assert [plan.environment["PLAUDIT_ROLLOUT_GROUP"] for plan in plans["rollout"]] == ["large", "large", "small"]
    engine = {"tensorParallelSize": 2, "pipelineParallelSize": 2}
    plans = planned(with_gpus=True, rollout={"engine": engine, "podsPerReplica": 2})
    assert [plan.gpus for plan in plans["rollout"]] == [4]


def test_pod_resources_size_the_processes() -> None:
    plans = planned(
        rollout={"pod": {"resources": {"requests": {"cpu": "500m"}}}},
        trainer={"ranks": 2, "strategy": "fsdp2", "pod": {"resources": {"limits": {"cpu": "4"}}}},
    )
    assert [plan.cpus for plan in plans["rollout"]] == [0.5]
    assert [plan.cpus for plan in plans["trainer"]] == [2, 2]


def gpus_of(plans: dict[Role, list[ProcessPlan]]) -> dict[Role, list[float]]:
    return {role: [plan.gpus for plan in each] for role, each in plans.items() if any(plan.gpus for plan in each)}


def test_one_gpu_is_shared_by_those_that_ask_for_one() -> None:
    shared = share_gpus(planned(with_gpus=True), ["0"])
    assert gpus_of(shared) == {"rollout": [0.5], "trainer": [0.5]}
    assert shared["rollout"][0].environment["PLAUDIT_GPU_SHARE"] == "0.5000"
    assert "PLAUDIT_GPU_SHARE" not in shared["reward"][0].environment


@pytest.mark.parametrize(("rollouts", "gpus", "each"), [(2, 2, 0.5), (3, 2, 0.5), (2, 1, 0.3333), (7, 3, 0.3333)])
def test_a_share_is_a_whole_part_of_a_gpu_so_that_ray_can_place_all(rollouts: int, gpus: int, each: float) -> None:
    shared = share_gpus(planned(with_gpus=True, rollout={"replicas": rollouts}), DEVICES[:gpus])
    assert gpus_of(shared) == {"rollout": [each] * rollouts, "trainer": [each]}
    assert (rollouts + 1) / gpus <= int(1 / each)


@pytest.mark.parametrize(
    ("ranks", "rollouts", "gpus", "each", "memory"),
    [(1, 1, 1, 0.9, 1), (1, 2, 2, 0.9, 1), (1, 3, 2, 0.45, 0.5), (2, 2, 2, 0.4, 1), (2, 3, 2, 0.2, 0.5)],
)
def test_rollouts_that_sleep_during_updates_divide_all_memory(
    ranks: int, rollouts: int, gpus: int, each: float, memory: float
) -> None:
    trainer = {"strategy": "fsdp2" if ranks > 1 else "single", "ranks": ranks}
    plans = planned(with_gpus=True, trainer=trainer, rollout={"replicas": rollouts})
    shared = share_gpus(plans, DEVICES[:gpus], in_turns=True)
    assert gpus_of(shared)["rollout"] == [each] * rollouts
    assert {plan.environment["PLAUDIT_GPU_SHARE"] for plan in shared["rollout"]} == {f"{memory:.4f}"}


def test_engines_of_several_gpus_take_turns_on_those_of_the_ranks() -> None:
    trainer = {"strategy": "fsdp2", "ranks": 8}
    rollout = {"replicas": 3, "engine": {"tensorParallelSize": 4}}
    plans = planned(with_gpus=True, trainer=trainer, rollout=rollout, reward={"scorers": [MODEL]})
    shared = share_gpus(plans, DEVICES, in_turns=True)
    assert gpus_of(shared) == {}
    visible = {
        role: [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in shared[role]]
        for role in ("trainer", "rollout", "model-helpful")
    }
    assert visible["trainer"] == DEVICES
    assert visible["model-helpful"] == ["0", "1"]
    assert visible["rollout"] == ["2,3,4,5", "0,1,2,3", "4,5,6,7"]
    shares = [plan.environment["PLAUDIT_GPU_SHARE"] for plan in shared["rollout"]]
    assert shares == ["0.5000", "0.5000", "0.5000"]
    assert share_gpus(plans, DEVICES) == plans  # Ray waits for room
    with pytest.raises(RefusedError, match=r"rollout-0 needs 4 GPUs, but this machine has 2\. Lower tensor"):
        share_gpus(planned(with_gpus=True, rollout=rollout), DEVICES[:2], in_turns=True)


def test_two_ranks_never_share_a_gpu() -> None:
    trainer = {"strategy": "fsdp2", "ranks": 2}
    shared = share_gpus(planned(with_gpus=True, trainer=trainer, rollout={"replicas": 3}), ["0", "1"])
    assert gpus_of(shared) == {"rollout": [0.2] * 3, "trainer": [0.6, 0.6]}
    with pytest.raises(RefusedError, match=r"ranks is 2, but this machine has 1 GPUs"):
        share_gpus(planned(with_gpus=True, trainer=trainer), ["0"])


def test_a_process_with_a_limit_of_no_gpu_sees_none_on_a_machine_that_has_some() -> None:
    pod = {"resources": {"limits": {"nvidia.com/gpu": "0"}}}
    plans = planned(with_gpus=True, trainer={"pod": pod})
    assert plans["trainer"][0].environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in plans["rollout"][0].environment
    assert "CUDA_VISIBLE_DEVICES" not in planned()["trainer"][0].environment


def test_tensor_parallel_engines_share_nothing() -> None:
    plans = planned(with_gpus=True, rollout={"engine": {"tensorParallelSize": 2}})
    assert share_gpus(plans, ["0"]) == plans


MODEL: dict[str, Any] = {"name": "helpful", "kind": "model", "model": {"source": "/models/rm", "replicas": 2}}


def test_a_reward_model_has_a_role_of_its_own_and_reward_workers_get_its_address() -> None:
    plans = planned(reward={"scorers": [MODEL]}, with_gpus=True)
    assert list(plans) == ["metrics", "model-helpful", "reward", "rollout", "trainer"]
    servers = plans["model-helpful"]
    assert [(plan.name, plan.gpus) for plan in servers] == [("model-helpful-0", 1), ("model-helpful-1", 1)]
    assert [plan.environment["PLAUDIT_MODEL_SERVER"] for plan in servers] == ["helpful/0", "helpful/1"]
    told = plans["reward"][0].environment["PLAUDIT_MODEL_SERVERS"]
    assert json.loads(told) == {"helpful": ["file:///runs/run/model-servers/helpful"]}


def test_the_model_of_a_judge_or_of_a_function_has_servers_like_a_reward_model() -> None:
    serve = {"source": "/models/judge", "replicas": 2}
    judge = {"serve": serve, "promptTemplate": {"path": "/j.j2"}, "parse": {"regex": "(.)"}}
    scorers = [
        {"name": "grades", "kind": "judge", "judge": judge},
        {"name": "routed", "kind": "python", "python": {"path": "/reward.py", "serve": serve}},
    ]
    plans = planned(reward={"scorers": scorers}, with_gpus=True)
    for name in ("grades", "routed"):
        servers = plans[f"model-{name}"]
        assert [(plan.name, plan.gpus) for plan in servers] == [(f"model-{name}-0", 1), (f"model-{name}-1", 1)]
        assert servers[0].environment["PLAUDIT_MODEL_SERVER"] == f"{name}/0"
    told = json.loads(plans["reward"][0].environment["PLAUDIT_MODEL_SERVERS"])
    assert told == {name: [f"file:///runs/run/model-servers/{name}"] for name in ("grades", "routed")}


def test_the_limits_of_its_pods_give_a_reward_models_gpus_and_cpus() -> None:
    pod = {"resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "4"}}}
    model = {**MODEL, "model": {**MODEL["model"], "pod": pod}}
    (first, _) = planned(reward={"scorers": [model]}, with_gpus=True)["model-helpful"]
    assert (first.gpus, first.cpus, first.environment["OMP_NUM_THREADS"]) == (2, 4, "4")
    (first, _) = planned(reward={"scorers": [model]})["model-helpful"]
    assert first.gpus == 0
