"""The chart's ValidatingAdmissionPolicy: what the pods of an RLJob may ask for."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import chart
import pytest
import training
from real_cluster import Cluster
from world import rljob

NAMESPACE = "policy"
JOB = rljob()
JOB["metadata"] = {"name": "job", "namespace": NAMESPACE}


def with_pod(pod: dict[str, Any], role: str = "trainer") -> dict[str, Any]:
    """The job with fields in the pod of one role."""
    job = copy.deepcopy(JOB)
    if role == "model":
        scorer = {"name": "model", "kind": "model", "model": {"source": "/plaudit/model", "pod": pod}}
        job["spec"]["reward"]["scorers"].append(scorer)
    elif role == "judge":
        judge = {"serve": {"source": "/plaudit/judge", "pod": pod}, "promptTemplate": {"path": "/plaudit/judge.j2"}}
        scorer = {"name": "judge", "kind": "judge", "judge": {**judge, "parse": {"regex": "(.)"}}}
        job["spec"]["reward"]["scorers"].append(scorer)
    elif role == "python":
        python = {"path": "/plaudit/reward.py", "serve": {"source": "/plaudit/judge", "pod": pod}}
        job["spec"]["reward"]["scorers"].append({"name": "routed", "kind": "python", "python": python})
    elif role == "redis":
        job["spec"]["transport"] = {"managed": {"pod": pod}}
    elif role == "reward":
        job["spec"]["reward"]["workers"] = {"pod": pod}
    else:
        job["spec"].setdefault(role, {})["pod"] = pod
    return job


def with_spec(role: str = "trainer", **spec: Any) -> dict[str, Any]:
    """The job with fields in the pod template's spec of one role."""
    return with_pod({"template": {"spec": spec}}, role)


def container(**context: Any) -> dict[str, Any]:
    return with_spec(containers=[{"name": "trainer", "securityContext": context}])


def apparmor(profile: str | None) -> dict[str, Any]:
    annotations = {"container.apparmor.security.beta.kubernetes.io/trainer": profile}
    return with_pod({"template": {"metadata": {"annotations": annotations}}})


PRIVILEGED = {"name": "trainer", "securityContext": {"privileged": True}}
REJECTED = {
    "a privileged container": (container(privileged=True), "privileges"),
    "privileges in an init container": (with_spec(initContainers=[PRIVILEGED]), "privileges"),
    "a privileged sidecar": (with_spec(containers=[{**PRIVILEGED, "name": "mine", "image": "x:1"}]), "privileges"),
    "escalation": (container(allowPrivilegeEscalation=True), "privileges"),
    "a capability": (container(capabilities={"add": ["SYS_ADMIN"]}), "privileges"),
    "capabilities that are kept": (container(capabilities={"drop": []}), "privileges"),
    "no seccomp": (container(seccompProfile={"type": "Unconfined"}), "privileges"),
    "no seccomp for the pod": (with_spec(securityContext={"seccompProfile": {"type": "Unconfined"}}), "privileges"),
    "a sysctl": (with_spec(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}), "privileges"),
    "a security context taken out": (
        with_spec(containers=[{"name": "trainer", "securityContext": None}]),
        "privileges",
    ),
    "a field of it taken out": (container(allowPrivilegeEscalation=None), "privileges"),
    "root": (container(runAsUser=0), "root"),
    "root for the pod": (with_spec(securityContext={"runAsNonRoot": False}), "root"),
    "the node's network": (with_spec(hostNetwork=True), "its node"),
    "the node's processes": (with_spec("rollout", hostPID=True), "its node"),
    "the node's IPC": (with_spec("reward", hostIPC=True), "its node"),
    "a port of the node": (
        with_spec(containers=[{"name": "trainer", "ports": [{"containerPort": 1, "hostPort": 1}]}]),
        "its node",
    ),
    "a chosen node": (with_spec("metrics", nodeName="node1"), "its node"),
    "the node's files": (with_pod({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}), "persistentVolumeClaim"),
    "the node's files by template": (
        with_spec("redis", volumes=[{"name": "root", "hostPath": {"path": "/"}}]),
        "persistentVolumeClaim",
    ),
    "a file server": (with_spec(volumes=[{"name": "n", "nfs": {"server": "s", "path": "/"}}]), "persistentVolumeClaim"),
    "another service account": (with_pod({"serviceAccountName": "admin"}, "model"), "service account"),
    "another service account for a judge": (with_pod({"serviceAccountName": "admin"}, "judge"), "service account"),
    "the node's network for a function's model": (
        with_pod({"template": {"spec": {"hostNetwork": True}}}, "python"),
        "its node",
    ),
    "another service account by template": (with_spec(serviceAccountName="admin"), "service account"),
    "the namespace's service account": (with_spec(serviceAccountName=None), "service account"),
    "its old name": (with_spec(serviceAccount="admin"), "service account"),
    "another role's label": (
        with_pod({"template": {"metadata": {"labels": {"plaudit.dev/role": "redis"}}}}),
        "belong to the operator",
    ),
    "another queue": (
        with_pod({"template": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}}}),
        "belong to the operator",
    ),
    "no gate": (with_spec(schedulingGates=[]), "belong to the operator"),
    "Kueue's count": (
        with_pod({"template": {"metadata": {"annotations": {"kueue.x-k8s.io/pod-group-total-count": "1"}}}}),
        "belong to the operator",
    ),
    "no annotation of Kueue": (
        with_pod({"template": {"metadata": {"annotations": {"kueue.x-k8s.io/pod-suspending-parent": None}}}}),
        "belong to the operator",
    ),
    "an SELinux type": (with_spec(securityContext={"seLinuxOptions": {"type": "spc_t", "level": "s0"}}), "privileges"),
    "an SELinux type of a container": (container(seLinuxOptions={"type": "spc_t"}), "privileges"),
    "an SELinux role": (container(seLinuxOptions={"role": "system_r"}), "privileges"),
    "no AppArmor by annotation": (apparmor("unconfined"), "privileges"),
    "an annotation of AppArmor taken out": (apparmor(None), "privileges"),
    "other capabilities dropped": (container(capabilities={"drop": ["NET_RAW"]}), "privileges"),
    "a probe of the node": (
        with_spec(containers=[{"name": "trainer", "livenessProbe": {"httpGet": {"host": "127.0.0.1", "port": 10255}}}]),
        "its node",
    ),
    "a hook of the node": (
        with_spec(
            containers=[
                {"name": "mine", "image": "x:1", "lifecycle": {"preStop": {"tcpSocket": {"host": "a", "port": 1}}}}
            ]
        ),
        "its node",
    ),
}
ACCEPTED = {
    "nothing": JOB,
    "a bare sidecar, which gets the restricted fields": with_spec(containers=[{"name": "mine", "image": "x:1"}]),
    "an SELinux level": container(seLinuxOptions={"level": "s0:c1,c2"}),
    "a profile of AppArmor": apparmor("localhost/mine"),
    "no probes": with_spec(containers=[{"name": "trainer", "livenessProbe": None, "lifecycle": None}]),
    "a probe of its own pod": with_spec(containers=[{"name": "trainer", "livenessProbe": {"httpGet": {"port": 8080}}}]),
    "what a pod needs": with_pod(
        {
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "template": {
                "metadata": {"labels": {"team": "a", "kueue.x-k8s.io/priority-class": "high"}},
                "spec": {
                    "securityContext": {"runAsUser": 2000, "fsGroup": 3000},
                    "runtimeClassName": "gvisor",
                    "containers": [
                        {"name": "trainer", "securityContext": {"capabilities": {"drop": ["ALL"]}}, "ports": []},
                        {"name": "sidecar", "image": "x:1", "ports": [{"containerPort": 9}]},
                    ],
                },
            },
        }
    ),
}


def install(cluster: Cluster, **values: Any) -> None:
    """Applies the policy; the API server follows within seconds."""
    manifests = chart.template(cluster, "job-policy", jobPolicy=values)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=manifests)


def until_in_force(cluster: Cluster) -> None:
    """Wait until the API server says the policy's words: another refusal would say as little as none."""
    job = with_spec(hostPID=True)
    cluster.until("the policy", lambda: "its node" in cluster.refusal(job))


@pytest.fixture(scope="module")
def policy(definition: Cluster) -> Iterator[Cluster]:
    definition.kubectl("create", "namespace", NAMESPACE, check=False)
    install(definition)
    until_in_force(definition)
    yield definition
    manifests = chart.template(definition, "job-policy")
    definition.kubectl("delete", "-f", "-", "--ignore-not-found", text=manifests)
    definition.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.mark.parametrize("name", REJECTED)
def test_a_job_that_asks_for_too_much_is_rejected_with_the_remedy(policy: Cluster, name: str):
    job, words = REJECTED[name]
    said = policy.refusal(job)
    assert words in said
    assert "leave" in said or "use a persistentVolumeClaim" in said


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_job_like_any_other_is_accepted(policy: Cluster, name: str):
    assert policy.refusal(ACCEPTED[name]) == ""


def test_the_charts_values_make_exceptions(policy: Cluster):
    install(policy, allow=["host", "volumes", "privileged", "root"], serviceAccounts=["bucket-reader"])
    jobs = [job for job, words in REJECTED.values() if words in ("its node", "persistentVolumeClaim", "root")]
    jobs.append(with_pod({"serviceAccountName": "bucket-reader"}))
    policy.until("exceptions", lambda: not any(map(policy.refusal, jobs)))
    assert "service account" in policy.refusal(with_pod({"serviceAccountName": "admin"}))
    install(policy, exemptNamespaces=[NAMESPACE])
    exempt = with_pod({"serviceAccountName": "admin"})
    policy.until("an exempt namespace", lambda: not policy.refusal(exempt))


def test_a_training_job_of_the_suite_is_accepted(policy: Cluster):
    job = training.copy_digits(1, "accepted")
    job["metadata"]["namespace"] = NAMESPACE
    install(policy)
    until_in_force(policy)
    assert policy.refusal(job) == ""


def test_a_job_older_than_the_policy_can_be_suspended_labelled_and_deleted_but_not_made_worse(policy: Cluster):
    install(policy, exemptNamespaces=[NAMESPACE])
    old = with_spec(hostNetwork=True)
    old["metadata"]["finalizers"] = ["plaudit.dev/test"]
    policy.until("exemption", lambda: not policy.refusal(old))
    policy.kubectl("create", "-f", "-", text=json.dumps(old))
    install(policy)
    until_in_force(policy)
    here = ("--namespace", NAMESPACE)

    def patch(body: dict[str, Any]) -> str:
        return policy.kubectl(*here, "patch", "rlj/job", "--type=merge", "-p", json.dumps(body), check=False).stderr

    assert patch({"spec": {"suspend": True}}) == ""
    assert patch({"spec": {"suspend": None}}) == ""
    assert patch({"metadata": {"labels": {"team": "a"}}}) == ""
    assert "its node" in patch({"spec": {"rollout": {"replicas": 3}}})
    policy.kubectl(*here, "delete", "rlj/job", "--cascade=foreground", "--wait=false")
    assert patch({"metadata": {"finalizers": None}}) == ""
    policy.until("deletion", lambda: "job" not in policy.kubectl(*here, "get", "rlj").stdout)
