"""Pods on a platform: its defaults for all jobs and single namespaces, its GPUs, its topology."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from world import SETTINGS, World, rljob

from plaudit_operator.names import ConditionType
from plaudit_operator.settings import OperatorSettings, OperatorSettingsError

DEFAULTS = {
    "gpuResource": "amd.com/gpu",
    "runtimeClassName": "gvisor",
    "nodeSelector": {"pool": "rl", "zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "HOME", "value": "/own"}],
    "labels": {"cost": "rl", "plaudit.dev/job": "another"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "imagePullSecrets": ["mirror"],
    "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/rl"},
    "namespaces": {"default": {"labels": {"team": "a"}, "tolerations": [{"key": "team-a"}], "runAsUser": 0}},
}


def world(defaults: dict[str, Any] | None = None, **spec: Any) -> World:
    created = World(rljob(**spec))
    if defaults is not None:
        created.settings = replace(SETTINGS, job_defaults=json.dumps(defaults))
        created.start_operator()
    created.settle()
    return created


def template(found: World, role: str) -> dict[str, Any]:
    kind, name = ("Job", "job-trainer-0") if role == "trainer" else ("Deployment", f"job-{role}")
    item = found.cluster.find(kind, name)
    assert item
    result: dict[str, Any] = item["spec"]["template"]
    return result


def container(found: World, role: str) -> dict[str, Any]:
    result: dict[str, Any] = template(found, role)["spec"]["containers"][0]
    return result


def variables(found: World, role: str) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(found, role)["env"]}


@pytest.mark.parametrize("role", ["trainer", "rollout", "reward", "metrics"])
def test_defaults_reach_the_pods_of_every_role(role: str):
    found = world(DEFAULTS)
    pod = template(found, role)
    labels, spec = pod["metadata"]["labels"], pod["spec"]
    assert (labels["cost"], labels["team"], labels["plaudit.dev/job"]) == ("rl", "a", "job")
    assert pod["metadata"]["annotations"] == DEFAULTS["annotations"]
    assert [t["key"] for t in spec["tolerations"]][-2:] == ["gpu", "team-a"]
    assert spec["nodeSelector"] == {"pool": "rl", "zone": "a"}
    assert (spec["runtimeClassName"], spec["imagePullSecrets"]) == ("gvisor", [{"name": "mirror"}])
    assert "runAsUser" not in spec["securityContext"]
    assert variables(found, role)["NCCL_DEBUG"] == "WARN"
    account = found.cluster.find("ServiceAccount", "job-pods")
    assert account
    assert DEFAULTS["serviceAccountAnnotations"].items() <= account["metadata"]["annotations"].items()


def test_a_jobs_own_pod_section_comes_before_them():
    pod = {"nodeSelector": {"zone": "b"}, "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    found = world(DEFAULTS, trainer={"pod": pod})
    assert template(found, "trainer")["spec"]["nodeSelector"] == {"pool": "rl", "zone": "b"}
    assert variables(found, "trainer")["NCCL_DEBUG"] == "INFO"


def test_a_running_job_keeps_the_defaults_that_it_began_with():
    found = world(DEFAULTS)
    before = {pod["metadata"]["uid"] for pod in found.cluster.of_kind("Pod")}
    found.settings = SETTINGS
    found.start_operator()
    found.settle()
    assert {pod["metadata"]["uid"] for pod in found.cluster.of_kind("Pod")} == before
    found.cluster.edit("RLJob", "job", lambda job: job["spec"].update(metrics={"rewardLatency": {"target": 0.5}}))
    found.settle()
    assert template(found, "metrics")["metadata"]["labels"]["cost"] == "rl"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("{", "truncated"), ('{"tolerations": 1}', "tolerations"), ('{"namespaces": {"a": {"lables": {}}}}', "lables")],
)
def test_malformed_defaults_stop_the_operator_with_the_name_of_the_field(wrong: str, named: str):
    images = {f"PLAUDIT_IMAGE_{name}": "x" for name in ("WORKER", "GPU", "REDIS")}
    with pytest.raises(OperatorSettingsError, match=named):
        OperatorSettings.from_environment({**images, "PLAUDIT_JOB_DEFAULTS": wrong})


@pytest.mark.parametrize(
    ("pod", "resources"),
    [
        ({}, {"limits": {"amd.com/gpu": 2}}),
        ({"gpuResource": "nvidia.com/mig-3g.40gb"}, {"limits": {"nvidia.com/mig-3g.40gb": 2}}),
        ({"resources": {"limits": {"amd.com/gpu": 2}}}, {"limits": {"amd.com/gpu": 2}}),
        ({"resources": {"limits": {"amd.com/gpu": 0, "memory": "1Gi"}}}, {"limits": {"memory": "1Gi"}}),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, {}),
        (
            {"resourceClaims": [{"name": "g", "resourceClaimName": "x"}], "resources": {"claims": [{"name": "g"}]}},
            {"claims": [{"name": "g"}]},
        ),
    ],
)
def test_gpus_are_counted_by_the_resource_of_the_platform_or_the_role(pod: dict[str, Any], resources: dict[str, Any]):
    found = world(DEFAULTS, rollout={"engine": {"tensorParallelSize": 2}, "pod": pod})
    assert container(found, "rollout")["resources"] == resources
    assert template(found, "rollout")["spec"].get("resourceClaims", []) == pod.get("resourceClaims", [])


def test_variables_may_come_from_secrets_config_maps_fields_and_resources():
    sources: dict[str, Any] = {
        "A": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}},
        "B": {"configMapKeyRef": {"name": "c", "key": "k"}},
        "C": {"fieldRef": {"fieldPath": "status.podIP"}},
        "D": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
    }
    env = [{"name": name, "valueFrom": source} for name, source in sources.items()]
    found = world(trainer={"pod": {"env": env}})
    assert {name: variables(found, "trainer")[name] for name in sources} == sources


def test_a_roles_pods_share_a_domain_of_the_network():
    topology = {"required": "nvidia.com/gpu.clique", "preferred": "topology.kubernetes.io/zone"}
    ranks = {"ranks": 16, "strategy": "fsdp2", "pod": {"topology": topology, "affinity": {"nodeAffinity": {"a": 1}}}}
    found = world(trainer=ranks)
    affinity = template(found, "trainer")["spec"]["affinity"]
    [required] = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [preferred] = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert required["topologyKey"] == "nvidia.com/gpu.clique"
    assert required["labelSelector"]["matchLabels"]["plaudit.dev/role"] == "trainer"
    assert preferred["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    assert affinity["nodeAffinity"] == {"a": 1}


def test_in_a_queue_kueue_places_them():
    topology = {"required": "cloud.provider.com/topology-block"}
    found = World(rljob(trainer={"pod": {"topology": topology}}, scheduling={"queueName": "team"}))
    found.deliver()
    for _ in range(4):
        found.reconcile()
        found.deliver()
    pod = template(found, "trainer")
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"] == topology["required"]
    assert "affinity" not in pod["spec"]


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"rollout": {"engine": {"tensorParallelSize": 16}}}, "spec.rollout.engine.tensorParallelSize"),
        ({"trainer": {"ranks": 16, "ranksPerPod": 16, "strategy": "fsdp2"}}, "spec.trainer.ranksPerPod"),
    ],
)
def test_a_pod_with_more_gpus_than_a_node_is_refused_unless_nodes_are_larger(sections: dict[str, Any], field: str):
    found = world(**sections)
    invalid = found.condition(ConditionType.SPEC_VALID)
    assert invalid["reason"] == "Invalid"
    assert invalid["message"].startswith(f"{field}: asks for 16 GPUs in one pod; ")
    assert "nodes have at most 8 GPUs" in invalid["message"]
    assert not found.cluster.of_kind("Deployment")
    assert world({"gpusPerNode": 16}, **sections).status["phase"] == "Running"
