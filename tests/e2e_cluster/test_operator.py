"""The operator on a real API server, with the chart's rights and no others. No image is needed: no pod has to start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from kubernetes import config
from operator_process import OperatorProcess, kubeconfig_of_the_chart
from real_cluster import ROOT, Cluster
from world import rljob

from plaudit_operator.names import LABEL_JOB, MANAGED_BY
from plaudit_operator.runtime.kube import ApiServer

NAMESPACE = "jobs"
KINDS = "configmap,serviceaccount,service,deployment,statefulset,job,pdb,networkpolicy,hpa"
Start = Callable[..., OperatorProcess]


@pytest.fixture(scope="module")
def start(definition: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yield a function that starts operators; stop the remaining ones at the end."""
    folder = tmp_path_factory.mktemp("operators")
    definition.kubectl("create", "namespace", NAMESPACE, check=False)
    kubeconfig, started = kubeconfig_of_the_chart(definition, folder), []

    def start(identity: str, **settings: str) -> OperatorProcess:
        started.append(OperatorProcess(kubeconfig, identity, NAMESPACE, folder / f"{identity}.log", **settings))
        definition.until(f"{identity} ready", lambda: started[-1].ask("/readyz")[0] == 200)
        return started[-1]

    yield start
    for operator in started:
        operator.stop()
    definition.kubectl("--namespace", NAMESPACE, "delete", "rlj", "--all", "--wait=false", check=False)


def make(cluster: Cluster, name: str, **spec: Any) -> None:
    job = rljob(**spec)
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    assert cluster.apply(job).returncode == 0


def children(cluster: Cluster, name: str) -> dict[tuple[str, str], str]:
    """Return the job's children, each with its resourceVersion."""
    done = cluster.get(KINDS, namespace=NAMESPACE)
    owned = [
        item
        for item in done.get("items", [])
        if any(owner["name"] == name for owner in item["metadata"].get("ownerReferences", []))
    ]
    return {(i["kind"], i["metadata"]["name"]): i["metadata"]["resourceVersion"] for i in owned}


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("rlj", name, NAMESPACE).get("status", {})
    return found


@pytest.fixture(scope="module")
def leader(start: Start, definition: Cluster) -> OperatorProcess:
    operator = start("one")
    definition.until("a leader", lambda: operator.leads)
    return operator


def test_a_job_gets_its_children_and_is_left_alone_at_rest(leader: OperatorProcess, definition: Cluster):
    pod = {"nodeSelector": {"no": "node"}}  # what a kubelet tries and tries again is not at rest
    make(definition, "rest", suspend=True, transport={"managed": {"pod": pod}}, metrics={"pod": pod})
    definition.until("children", lambda: len(children(definition, "rest")) == 14 and status(definition, "rest"))
    definition.until("rest", lambda: status(definition, "rest").get("phase") == "Suspended")
    seen: list[dict[tuple[str, str], str]] = []

    def stable() -> bool:
        job = definition.get("rlj", "rest", NAMESPACE)["metadata"]["resourceVersion"]
        seen.append({**children(definition, "rest"), ("RLJob", "rest"): job})
        return len(seen) > 6 and seen[-1] == seen[-6]

    definition.until("nothing changes any more", stable)
    before, version = children(definition, "rest"), definition.get("rlj", "rest", NAMESPACE)["metadata"]
    turns = leader.figure("plaudit_operator_reconcile_seconds_count")
    for i in range(3):
        definition.kubectl(
            "--namespace", NAMESPACE, "label", "deployment", "rest-reward", f"touched={i}", "--overwrite"
        )
        time.sleep(1)
    assert leader.figure("plaudit_operator_reconcile_seconds_count") > turns
    after = children(definition, "rest")
    assert {key for key in before if before[key] != after[key]} == {("Deployment", "rest-reward")}
    assert definition.get("rlj", "rest", NAMESPACE)["metadata"]["resourceVersion"] == version["resourceVersion"]


def test_children_that_are_deleted_or_changed_by_hand_come_back(leader: OperatorProcess, definition: Cluster):
    make(definition, "hands")
    definition.until("children", lambda: len(children(definition, "hands")) == 15)
    kubectl = partial(definition.kubectl, "--namespace", NAMESPACE)
    kubectl("delete", "deployment/hands-reward", "service/hands-redis", "networkpolicy/hands-reward", "--wait=false")
    kubectl("scale", "deployment/hands-rollout", "--replicas=7")
    kubectl("set", "image", "deployment/hands-metrics", "metrics=localhost/other:1")
    kubectl("annotate", "statefulset/hands-redis", "plaudit.dev/inputs=nothing", "--overwrite")
    unseen = {("service", "hands-metrics"): LABEL_JOB, ("networkpolicy", "hands-redis"): MANAGED_BY}
    for (kind, name), label in unseen.items():
        kubectl("label", kind, name, f"{label}-")

    def healed() -> bool:
        rollout = definition.get("deployment", "hands-rollout", NAMESPACE)
        metrics = definition.get("deployment", "hands-metrics", NAMESPACE)
        image = metrics["spec"]["template"]["spec"]["containers"][0]["image"]
        count = len(children(definition, "hands"))
        seen = (definition.get(*key, NAMESPACE)["metadata"]["labels"].get(label) for key, label in unseen.items())
        return count == 15 and all(seen) and rollout["spec"]["replicas"] == 2 and image == "localhost/none:1"

    definition.until("healed", healed)


def test_a_stranger_keeps_its_name(leader: OperatorProcess, definition: Cluster):
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken-redis", "namespace": NAMESPACE}}
    assert definition.apply({**service, "spec": {"ports": [{"port": 1}]}}).returncode == 0
    make(definition, "taken")

    def told() -> bool:
        admitted = definition.condition("rlj", "taken", NAMESPACE, "Admitted")
        return admitted.get("reason") == "NameTaken" and "taken-redis" in admitted["message"]

    definition.until("NameTaken", told)
    found = definition.get("service", "taken-redis", NAMESPACE)
    assert "ownerReferences" not in found["metadata"]
    definition.kubectl("--namespace", NAMESPACE, "delete", "rlj/taken", "service/taken-redis")


def uids(cluster: Cluster, name: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return uid and controller's uid of the objects with the label of a job."""
    found = cluster.kubectl("--namespace", NAMESPACE, "get", KINDS, "-l", f"plaudit.dev/job={name}", "-o", "json")
    return {
        (item["kind"], item["metadata"]["name"]): (
            item["metadata"]["uid"],
            next(
                (owner["uid"] for owner in item["metadata"].get("ownerReferences", []) if owner.get("controller")), ""
            ),
        )
        for item in json.loads(found.stdout)["items"]
    }


def test_what_an_orphaning_deletion_left_is_adopted_and_a_deletion_in_the_foreground_takes_it_along(
    leader: OperatorProcess, definition: Cluster
):
    def admitted() -> bool:
        return definition.condition("rlj", "left", NAMESPACE, "Admitted").get("status") == "True"

    make(definition, "left")
    definition.until("children", lambda: admitted() and len(children(definition, "left")) == 15)
    run, before = status(definition, "left")["run"], uids(definition, "left")
    kubectl = partial(definition.kubectl, "--namespace", NAMESPACE)
    kubectl("delete", "rlj/left", "--cascade=orphan")
    assert {key: owner for key, (_, owner) in uids(definition, "left").items() if owner} == {}
    make(definition, "left")
    definition.until("adoption", admitted)
    owner = definition.get("rlj", "left", NAMESPACE)["metadata"]["uid"]
    assert uids(definition, "left") == {key: (uid, owner) for key, (uid, _) in before.items()}
    assert status(definition, "left")["run"] == run
    kubectl("delete", "rlj/left", "--cascade=foreground", "--timeout=60s")
    # A StatefulSet that waits for its pod no longer holds its owner: it goes a moment later.
    definition.until("deletion", lambda: not uids(definition, "left"))


def test_a_webhook_that_does_not_answer_is_in_the_condition_and_all_is_well_once_it_is_gone(
    leader: OperatorProcess, definition: Cluster
):
    here = {"kubernetes.io/metadata.name": NAMESPACE}
    webhook = {
        "name": "validate.example.dev",
        "clientConfig": {"service": {"name": "none", "namespace": NAMESPACE}},
        "namespaceSelector": {"matchLabels": here},
        "rules": [
            {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["deployments"]}
        ],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    assert definition.apply({**head, "metadata": {"name": "failing"}, "webhooks": [webhook]}).returncode == 0
    definition.until("the webhook", lambda: _refused_by_webhook(definition))
    make(definition, "hooked")

    def told() -> bool:
        found = definition.condition("rlj", "hooked", NAMESPACE, "Admitted")
        return found.get("reason") == "CallFailed" and "validate.example.dev" in found["message"]

    definition.until("CallFailed", told)
    definition.kubectl("delete", "validatingwebhookconfiguration/failing")
    well = partial(definition.condition, "rlj", "hooked", NAMESPACE, "Admitted")
    definition.until("all is well", lambda: well().get("status") == "True")
    assert len(children(definition, "hooked")) == 15


def _refused_by_webhook(cluster: Cluster) -> bool:
    trial = ["create", "deployment", "trial", "--image=x:1", "--dry-run=server"]
    return "validate.example.dev" in cluster.kubectl("--namespace", NAMESPACE, *trial, check=False).stderr


def test_a_typo_in_a_pod_template_is_refused_with_its_field(leader: OperatorProcess, definition: Cluster):
    containers = [{"name": "rollout", "imagePullPolcy": "Always"}]
    pod = {"template": {"spec": {"containers": containers}}}
    make(definition, "typo", rollout={"replicas": 1, "pod": pod})

    def refused() -> bool:
        admitted = definition.condition("rlj", "typo", NAMESPACE, "Admitted")
        field = 'unknown field "spec.template.spec.containers[0].imagePullPolcy"'
        return admitted.get("reason") == "RefusedByCluster" and field in admitted["message"]

    definition.until("the typo's field", refused)
    definition.kubectl("--namespace", NAMESPACE, "delete", "rlj/typo", "--wait=false")


def test_a_quota_that_refuses_trainer_and_redis_is_reported(leader: OperatorProcess, definition: Cluster):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": NAMESPACE}}
    assert definition.apply({**quota, "spec": {"hard": {"pods": "0"}}}).returncode == 0
    definition.until("quota", lambda: definition.get("quota", "none", NAMESPACE).get("status", {}).get("hard"))
    make(definition, "refused")

    def refused(kind: str) -> bool:
        condition = definition.condition("rlj", "refused", NAMESPACE, kind)
        return condition.get("reason") == "RefusedByCluster" and "exceeded quota: none" in condition["message"]

    for kind in ("TrainerRunning", "TransportReady", "RolloutReady"):
        definition.until(f"{kind} names the quota", partial(refused, kind))
    definition.kubectl("--namespace", NAMESPACE, "delete", "quota/none", "rlj/refused", "--wait=false")


def test_an_apply_removes_omitted_fields_and_keeps_replicas(definition: Cluster):
    kube = ApiServer("tests", api=config.new_client_from_config(definition.kubeconfig))
    definition.kubectl("create", "namespace", NAMESPACE, check=False)
    labels = {"app": "owned"}
    container = {"name": "c", "image": "localhost/none:1"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    metadata = {"name": "owned", "namespace": NAMESPACE, "annotations": {"first": "1"}}
    spec = {"selector": {"matchLabels": labels}, "template": template, "minReadySeconds": 7}
    kube.create({"kind": "Deployment", "metadata": metadata, "spec": {**spec, "replicas": 0}})

    def at_rest() -> bool:
        found = definition.get("deployment", "owned", NAMESPACE)
        seen = found["status"].get("observedGeneration") == found["metadata"]["generation"]
        return bool(seen and len(found["status"].get("conditions", ())) == 2)  # Available and Progressing

    del metadata["annotations"], spec["minReadySeconds"]
    for _ in range(2):
        definition.until("its controller at rest", at_rest)  # whose writes would be conflicts
        kube.apply({"kind": "Deployment", "metadata": metadata, "spec": spec})
    found = definition.get("deployment", "owned", NAMESPACE)
    assert "first" not in found["metadata"].get("annotations", {})
    assert (found["spec"].get("minReadySeconds"), found["spec"]["replicas"]) == (None, 0)
    definition.kubectl("--namespace", NAMESPACE, "delete", "deployment/owned")


def test_a_deadline_ends_a_job_and_time_to_live_takes_it_away(leader: OperatorProcess, definition: Cluster):
    lifecycle = {"preRunningDeadlineSeconds": 4, "ttlSecondsAfterFinished": 6}
    make(definition, "late", lifecycle=lifecycle)
    definition.until("failed", lambda: status(definition, "late").get("phase") == "Failed")
    definition.until("cleaned up", lambda: not children(definition, "late"))
    definition.until("gone", lambda: not definition.get("rlj", "late", NAMESPACE))


def test_a_standby_takes_over_when_the_leader_dies_and_an_upgrade_changes_nothing(
    leader: OperatorProcess, start: Start, definition: Cluster
):
    make(definition, "stays")
    definition.until("children", lambda: len(children(definition, "stays")) == 15)
    definition.until("told", lambda: status(definition, "stays").get("phase"))
    before = children(definition, "stays")
    standby = start("two", PLAUDIT_IMAGE_WORKER="localhost/newer:2", PLAUDIT_JOB_DEFAULTS='{"runAsUser": 2000}')
    assert not standby.leads
    leader.kill()
    ran = '{"status": {"startTime": "2026-01-01T00:00:00Z"}}'  # a job of which nothing ran would take the new image
    definition.kubectl("-n", NAMESPACE, "patch", "rlj", "stays", "--subresource=status", "--type=merge", "-p", ran)
    definition.until("takeover", lambda: standby.leads)
    make(definition, "next")
    definition.until("children of the next", lambda: len(children(definition, "next")) == 15)
    assert children(definition, "stays") == before


def test_only_accounts_that_may_get_the_url_read_the_series(definition: Cluster, start: Start) -> None:
    chart = ["helm", "template", "outside", str(ROOT / "charts" / "plaudit"), "--namespace", "plaudit-test"]
    values = ["--set", "monitoring.authentication=true", "-s", "templates/rbac.yaml"]
    definition.kubectl("apply", "-f", "-", text=definition.run(*chart, *values).stdout)
    for name in ("reader", "stranger"):
        definition.kubectl("-n", NAMESPACE, "create", "serviceaccount", name)
    definition.kubectl("create", "clusterrole", "reads-metrics", "--verb=get", "--non-resource-url=/metrics")
    account = f"--serviceaccount={NAMESPACE}:reader"
    definition.kubectl("create", "clusterrolebinding", "reads-metrics", "--clusterrole=reads-metrics", account)
    operator = start("private", PLAUDIT_METRICS_AUTHENTICATION="true")
    tokens = {
        name: definition.kubectl("-n", NAMESPACE, "create", "token", name).stdout.strip()
        for name in ("reader", "stranger")
    }
    assert operator.ask("/metrics")[0] == 401
    assert operator.ask("/metrics", "nonsense")[0] == 403
    assert operator.ask("/metrics", tokens["stranger"])[0] == 403
    assert "plaudit_operator_leader" in operator.ask("/metrics", tokens["reader"])[1]
    operator.stop()
