"""A RewardService on the model of a cluster: its children, and how its changes are rolled out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from world import World, rljob

from plaudit_operator.cache import Key
from plaudit_operator.names import LABEL_MODEL, LABEL_REVISION
from plaudit_operator.observed import labels

KEY = Key("default", "job", "RewardService")
RULE = {"name": "right", "kind": "rule", "rule": "gsm8k"}
MODEL = {"name": "helpful", "kind": "model", "model": {"source": "/plaudit/model-1"}}
FILES = {"configMap": "code"}
PYTHON = {"name": "mine", "kind": "python", "python": {"path": "reward.py"}}

Edit = Callable[[dict[str, Any]], Any]


def service(*scorers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    reward = {"scorers": list(scorers or [RULE]), "workers": {"replicas": 2}}
    return {**rljob(), "kind": "RewardService", "spec": {"reward": reward} | spec}


def running(*scorers: dict[str, Any], **spec: Any) -> World:
    world = World(service(*scorers, **spec), key=KEY)
    world.settle()
    return world


def edit(world: World, change: Edit) -> None:
    world.cluster.edit("RewardService", "job", lambda item: change(item["spec"]))


def weigh(weight: float) -> Edit:
    return lambda spec: spec["reward"]["scorers"][0].update(weight=weight)


def deployment(world: World, role: str = "reward") -> dict[str, Any]:
    return deployment_of(world, f"job-{role}")


def deployment_of(world: World, name: str) -> dict[str, Any]:
    found = world.cluster.find("Deployment", name)
    assert found
    return found


def config_of(template: dict[str, Any]) -> str:
    [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "job"]
    return str(volume["configMap"]["name"])


def environment(template: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}


@pytest.fixture(scope="module")
def world() -> World:
    return running()


def test_a_service_has_the_children_of_a_job_that_only_scores_and_belongs_to_its_object(world: World):
    children = world.children()
    for child in [("Deployment", "job-gateway"), ("Deployment", "job-reward"), ("StatefulSet", "job-redis")]:
        assert child in children
    [owner] = deployment(world)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("RewardService", world.job["metadata"]["uid"])
    assert world.status["phase"] == "Running"
    assert world.status["url"] == "http://job-gateway.default.svc:8710"
    assert "restarts" not in world.status


def test_a_service_whose_admitted_files_are_lost_beside_a_wrong_edit_does_not_deny_its_objects():
    world = running()
    edit(world, lambda spec: spec["reward"]["scorers"].append(RULE))
    for item in world.cluster.of_kind("ConfigMap"):
        world.cluster.remove("ConfigMap", item["metadata"]["name"])
    world.settle()
    admitted = world.condition("Admitted")
    assert (admitted["status"], admitted["message"]) == ("False", "the objects that are left stay as they are")
    assert world.cluster.find("Deployment", "job-reward")


def test_every_worker_has_the_revision_as_the_version_of_its_results(world: World):
    revision = world.status["revision"]
    template = deployment(world)["spec"]["template"]
    assert environment(template)["PLAUDIT_SCORING_VERSION"] == labels(template)[LABEL_REVISION] == revision
    assert config_of(template) == f"job-job-{revision}"
    assert world.condition("RolledOut")["status"] == "True"
    assert world.condition("Ready")["status"] == "True"


def test_a_changed_scorer_is_rolled_out_while_the_old_pods_keep_their_configuration():
    world = running()
    before = world.status["revision"]
    edit(world, weigh(0.5))
    world.learn()
    world.deliver()
    assert world.cluster.find("ConfigMap", f"job-job-{before}")  # its pods still run
    world.cluster.run_controllers()
    world.learn()
    rolling = {each: world.condition(each)["status"] for each in ("Ready", "RolledOut", "Reconciling", "Stalled")}
    assert rolling == {"Ready": "True", "RolledOut": "False", "Reconciling": "True", "Stalled": "False"}
    assert "of 2 pods are of revision" in world.condition("RolledOut")["message"]
    world.settle()
    after = world.status["revision"]
    assert after != before
    assert {labels(pod)[LABEL_REVISION] for pod in world.cluster.of_kind("Pod") if LABEL_REVISION in labels(pod)} == {
        after
    }
    configs = {name for kind, name in world.children() if kind == "ConfigMap"}
    assert configs == {"job-job", f"job-job-{after}"}
    config = world.cluster.find("ConfigMap", f"job-job-{after}")
    assert config
    assert json.loads(config["data"]["job.yaml"])["spec"]["reward"]["scorers"][0]["weight"] == 0.5
    assert world.condition("Reconciling")["status"] == "False"


def test_going_back_gives_the_earlier_revision():
    world = running()
    before = world.status["revision"]
    edit(world, weigh(0.5))
    world.settle()
    edit(world, lambda spec: spec["reward"]["scorers"][0].pop("weight"))
    world.settle()
    assert world.status["revision"] == before


def test_more_workers_or_gateways_replace_no_pod():
    world = running()
    before = copy.deepcopy(deployment(world)["spec"]["template"]), world.status["revision"]
    edit(world, lambda spec: spec["reward"].update(workers={"replicas": 3}, gateway={"replicas": 2}))
    world.settle()
    assert (deployment(world)["spec"]["template"], world.status["revision"]) == before
    assert deployment(world)["spec"]["replicas"] == 3
    assert deployment(world, "gateway")["spec"]["replicas"] == 2


def test_another_model_gets_servers_of_its_own_before_the_old_ones_go():
    world = running(MODEL)
    [old] = [name for kind, name in world.children() if kind == "Deployment" and name.startswith("job-m-")]
    edit(world, lambda spec: spec["reward"]["scorers"][0]["model"].update(source="/plaudit/model-2"))
    world.learn()
    world.deliver()
    servers = {name for kind, name in world.children() if kind == "Deployment" and name.startswith("job-m-")}
    assert len(servers) == 2
    [new] = servers - {old}
    selectors = [deployment(world, name.removeprefix("job-"))["spec"]["selector"] for name in (old, new)]
    assert selectors[0]["matchLabels"][LABEL_MODEL] != selectors[1]["matchLabels"][LABEL_MODEL]
    environment = {
        e["name"]: e.get("value") for e in deployment(world)["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert json.loads(environment["PLAUDIT_MODEL_SERVERS"])["helpful"] == [f"http://{new}.default.svc:8000"]
    world.settle()
    assert {name for kind, name in world.children() if name.startswith("job-m-")} == {new}


def test_an_invalid_edit_is_reported_and_the_service_keeps_its_revision():
    world = running()
    before = world.status["revision"]
    edit(world, lambda spec: spec["reward"]["scorers"].append({"name": "right", "kind": "rule"}))
    world.settle()
    condition = world.condition("SpecValid")
    assert (condition["status"], condition["reason"]) == ("False", "Invalid")
    assert f"keeps revision {before}" in condition["message"]
    assert world.status["revision"] == before
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Stalled")["status"] == "True"
    edit(world, lambda spec: spec["reward"]["scorers"].pop())
    world.settle()
    assert world.condition("SpecValid")["status"] == "True"


def test_redis_and_the_volume_cannot_change():
    world = running()
    edit(world, lambda spec: spec.update(storage={"claimName": "other"}))
    world.settle()
    assert world.condition("SpecValid")["reason"] == "ImmutableFieldChanged"
    assert "spec.storage cannot change" in world.condition("SpecValid")["message"]


def code(name: str, value: float) -> dict[str, Any]:
    data = {"reward.py": f"def compute_score(sample): return {value}\n"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}, "data": data}


def test_new_code_comes_with_another_config_map():
    world = World(service(PYTHON, files=FILES), key=KEY)
    world.cluster.put(code("code", 0.0))
    world.settle()
    before = world.status["revision"]
    edit(world, lambda spec: spec.update(files={"configMap": "code-2"}))
    world.settle()
    assert world.condition("SpecValid")["reason"] == "FilesMissing"
    assert world.status["revision"] == before
    world.cluster.put(code("code-2", 1.0))
    result = world.reconcile()
    assert result is not None
    world.settle()
    assert world.condition("SpecValid")["status"] == "True"
    assert world.status["revision"] != before
    config = world.cluster.find("ConfigMap", f"job-job-{world.status['revision']}")
    assert config
    assert "return 1.0" in config["data"]["file-0"]


def test_a_service_that_does_not_start_never_fails():
    world = World(service(), key=KEY)
    world.settle()
    world.cluster.now += 10**7
    world.settle()
    assert world.condition("Failed") == {}


def test_suspension_releases_workers_and_gateways():
    world = running()
    edit(world, lambda spec: spec.update(suspend=True))
    world.settle()
    assert world.cluster.roles() == {"redis", "metrics"}
    edit(world, lambda spec: spec.update(suspend=False))
    world.settle()
    assert world.status["phase"] == "Running"


def test_a_job_of_the_same_name_is_refused_and_the_service_goes_on():
    world = running()
    world.cluster.put(rljob())
    job = World(cluster=world.cluster)
    for _ in range(3):
        job.deliver()
        job.reconcile()
    admitted = job.condition("Admitted")
    assert admitted["reason"] == "NameTaken"
    assert (
        "ConfigMap job-job: a ConfigMap named job-job exists and is not this job's; it belongs to RewardService job"
        in (admitted["message"])
    )
    assert "kubectl delete" not in admitted["message"]
    world.relist()
    world.settle()
    assert world.condition("Ready")["status"] == "True"


def test_a_service_at_rest_is_not_written(world: World):
    writes = world.cluster.writes
    world.learn(3)
    assert world.cluster.writes == writes


def job_that_uses(**reference: Any) -> dict[str, Any]:
    job = rljob()
    scorer = {"name": "shared", "kind": "service", "service": reference}
    job["metadata"]["name"] = "user"
    job["spec"] = {"reward": {"scorers": [scorer]}}
    return job


def test_a_job_reaches_the_service_that_it_names_with_its_token():
    world = running()
    world.cluster.put(job_that_uses(name="job"))
    user = World(cluster=world.cluster, key=Key("default", "user"))
    user.settle()
    config = user.cluster.find("ConfigMap", "user-job")
    assert config
    [scorer] = json.loads(config["data"]["job.yaml"])["spec"]["reward"]["scorers"]
    secret = f"job-gateway-{world.job['metadata']['uid'][:8]}"
    token = {"name": secret, "key": "client"}
    assert scorer["service"] == {"url": "http://job-gateway.default.svc:8710", "tokenSecret": token}
    template = deployment_of(user, "user-reward")["spec"]["template"]
    assert [
        v["secret"]["items"] for v in template["spec"]["volumes"] if v.get("secret", {}).get("secretName") == secret
    ]
    policy = world.cluster.find("NetworkPolicy", "job-gateway")
    assert policy
    admitted = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"]]
    assert any(selector.items() <= labels(template).items() for selector in admitted)


def test_a_job_waits_for_the_service_that_it_names():
    user = World(job_that_uses(name="job"), key=Key("default", "user"))
    user.settle()
    condition = user.condition("SpecValid")
    assert condition["reason"] == "ServiceMissing"
    assert "no RewardService 'job'" in condition["message"]
    user.cluster.put(service())
    user.settle()
    assert user.condition("SpecValid")["status"] == "True"


def test_a_running_job_keeps_its_service_when_that_is_deleted():
    user = World(job_that_uses(name="job"), key=Key("default", "user"))
    user.cluster.put(service())
    user.settle()
    before = deployment_of(user, "user-reward")["spec"]["template"]
    user.cluster.remove("RewardService", "job")
    user.settle()
    assert user.condition("SpecValid")["status"] == "True"
    assert deployment_of(user, "user-reward")["spec"]["template"] == before


def test_tokens_of_ones_own_take_the_place_of_the_operators():
    world = running(reward={"scorers": [RULE], "gateway": {"tokenSecret": "ours"}})
    volumes = deployment(world, "gateway")["spec"]["template"]["spec"]["volumes"]
    assert [volume["secret"]["secretName"] for volume in volumes if volume["name"] == "tokens"] == ["ours"]
    assert not [name for kind, name in world.children() if kind == "Secret" and "-gateway-" in name]


def test_a_canary_is_reached_by_the_gateways_with_its_token():
    spec = service()["spec"]
    spec["reward"]["gateway"] = {"canary": {"service": {"name": "next"}, "share": 0.2}}
    world = World({**service(), "spec": spec}, key=KEY)
    world.cluster.put({**service(), "metadata": {"name": "next", "namespace": "default"}})
    world.relist()
    world.settle()
    uid = world.cluster.find("RewardService", "next")["metadata"]["uid"]  # type: ignore[index]
    template = deployment(world, "gateway")["spec"]["template"]
    assert labels(template)["uses.plaudit.dev/next"] == "true"
    assert f"next-gateway-{uid[:8]}" in {v.get("secret", {}).get("secretName") for v in template["spec"]["volumes"]}
    config = world.cluster.find("ConfigMap", f"job-job-{world.status['revision']}")
    assert config
    canary = json.loads(config["data"]["job.yaml"])["spec"]["reward"]["gateway"]["canary"]
    assert (canary["service"]["url"], canary["share"]) == ("http://next-gateway.default.svc:8710", 0.2)


@pytest.mark.parametrize(
    "settings",
    [{"samplesPerMinute": 60}, {"canary": {"service": {"name": "next"}, "share": 0.5}}],
    ids=["quota", "share"],
)
def test_changed_settings_of_the_gateway_replace_gateways_only(settings: dict[str, Any]):
    world = running()
    world.cluster.put({**service(), "metadata": {"name": "next", "namespace": "default"}})
    world.relist()
    before = {"samplesPerMinute": 30, "canary": {"service": {"name": "next"}, "share": 0.2}}
    edit(world, lambda spec: spec["reward"].update(gateway=before))
    world.settle()
    revision, templates = world.status["revision"], [deployment(world, role) for role in ("reward", "gateway")]
    edit(world, lambda spec: spec["reward"].update(gateway={**before, **settings}))
    world.settle()
    assert world.status["revision"] == revision
    workers, gateways = [deployment(world, role)["spec"]["template"] for role in ("reward", "gateway")]
    assert workers == templates[0]["spec"]["template"]
    assert gateways != templates[1]["spec"]["template"]  # it reads its settings once, when it starts
    edit(world, lambda spec: spec["reward"].update(gateway={**before, "replicas": 2}))
    world.settle()
    assert deployment(world, "gateway")["spec"]["template"] == templates[1]["spec"]["template"]


@pytest.mark.parametrize("as_canary", [False, True])
def test_a_job_follows_a_service_that_is_deleted_and_created_again(as_canary: bool):
    job = job_that_uses(name="job")
    if as_canary:
        canary = {"service": {"name": "job"}, "share": 0.5}
        job["spec"] = {"reward": {"scorers": [RULE], "gateway": {"canary": canary}}}
    world = running()
    world.cluster.put(job)
    user = World(cluster=world.cluster, key=Key("default", "user"))
    user.settle()
    world.cluster.remove("RewardService", "job")
    user.settle()
    again = copy.deepcopy(service())
    again["metadata"]["uid"] = "cafe0123456789"
    world.cluster.put(again)
    world.settle()
    user.relist()
    user.settle()
    template = deployment_of(user, "user-gateway" if as_canary else "user-reward")["spec"]["template"]
    mounted = {volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume}
    assert "job-gateway-cafe0123" in mounted
    assert world.cluster.find("Secret", "job-gateway-cafe0123")
    config = user.cluster.find("ConfigMap", "user-job")
    assert config
    assert "job-gateway-cafe0123" in config["data"]["job.yaml"]
    assert user.status["phase"] == "Running"
    writes = user.cluster.writes
    user.settle()
    assert user.cluster.writes == writes


def grow_beyond_a_config_map(world: World) -> str:
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "large", "namespace": "default"}}
    world.cluster.put({**code, "data": {"reward.py": "def compute_score(*_): ...\n", "big.txt": "x" * (1 << 20)}})
    edit(world, lambda spec: spec.update(files={"configMap": "large"}))
    return "big.txt 1,024 KiB"


def name_a_service_that_is_missing(world: World) -> str:
    edit(
        world,
        lambda spec: spec["reward"]["scorers"].append({"name": "far", "kind": "service", "service": {"name": "no"}}),
    )
    return "there is no RewardService 'no'"


@pytest.mark.parametrize("worsen", [grow_beyond_a_config_map, name_a_service_that_is_missing])
def test_an_edit_that_cannot_be_rendered_is_rejected_as_a_new_one_is_and_the_service_goes_on(worsen: Any):
    world = running()
    revision, before = world.status["revision"], deployment(world)["spec"]["template"]
    words = worsen(world)
    world.settle()
    valid = world.condition("SpecValid")
    assert valid["status"] == "False"
    assert valid["message"].startswith(f"edit rejected, the service keeps revision {revision}: ")
    assert words in valid["message"]
    assert (world.status["phase"], world.condition("Admitted")["status"]) == ("Running", "True")
    assert deployment(world)["spec"]["template"] == before


def test_gateways_leave_before_they_end_and_pods_of_a_service_are_spread_over_nodes(world: World):
    for role in ("gateway", "reward"):
        spec = deployment(world, role)["spec"]["template"]["spec"]
        [constraint] = spec["topologySpreadConstraints"]
        assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == (
            "kubernetes.io/hostname",
            "ScheduleAnyway",
        )
        selected = constraint["labelSelector"]["matchLabels"].items()
        assert selected <= labels(deployment(world, role)["spec"]["template"]).items()
    gateway = deployment(world, "gateway")["spec"]["template"]["spec"]
    assert {"name": "PLAUDIT_GATEWAY_LEAVES_S", "value": "8"} in gateway["containers"][0]["env"]
    assert gateway["terminationGracePeriodSeconds"] == 170  # and time for late calls and those in flight
