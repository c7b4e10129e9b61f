"""Messages of the scheduler, quotas, admission and the kubelet, and the remedy that a condition adds to each."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_model import ClusterModel
from world import World, rljob

from plaudit_operator.cache import Key
from plaudit_operator.observed import timestamp
from plaudit_operator.runtime.kube import ApiUnavailableError, InvalidError, KubeError, NotFoundError

SCHEDULER = {
    '0/2 nodes are available: persistentvolumeclaim "shared" not found.': "Create the PersistentVolumeClaim shared",
    '0/2 nodes are available: persistentvolumeclaim "shared" is being deleted.': "then create the claim again",
    "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.": "its StorageClass must exist",
    "0/4 nodes are available: 4 node(s) had volume node affinity conflict.": "where the volume is",
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.": "Add nodes, or lower spec.rollout.pod.resources",
    "0/2 nodes are available: 2 node(s) had untolerated taint {gpu: }.": "change its nodeSelector or tolerations",
    "0/2 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod "
    "access mode.": "Use a claim with access mode ReadWriteMany",
    "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.": "Change affinity, topology or",
    "0/2 nodes are available: 2 Too many pods.": "raise the kubelets' maxPods",
    "0/2 nodes are available: 2 cannot allocate all claims.": "spec.rollout.pod.resourceClaims",
    "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.": "change its nodeSelector",
}
REFUSALS = {
    "exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4": "quota of pods, or lower the replicas",
    "exceeded quota: team, requested: requests.cpu=2, used: requests.cpu=4, limited: requests.cpu=4": (
        "Raise the namespace's quota or lower spec.rollout.pod.resources"
    ),
    "exceeded quota: team, requested: limits.ephemeral-storage=1Gi, used: limits.ephemeral-storage=0, limited: "
    "limits.ephemeral-storage=512Mi": "Raise the namespace's quota or lower spec.rollout.pod.resources",
    "exceeded quota: team, requested: persistentvolumeclaims=1,requests.storage=1Gi, used: requests.storage=0, "
    "limited: requests.storage=0": "or lower spec.transport.managed.storage",
    "exceeded quota: team, requested: persistentvolumeclaims=1, used: persistentvolumeclaims=1, limited: "
    "persistentvolumeclaims=1": "quota of persistentvolumeclaims: Redis needs one",
    "exceeded quota: team, requested: fast.storageclass.storage.k8s.io/requests.storage=1Gi, used: 0, limited: 0": (
        "quota of fast.storageclass.storage.k8s.io/requests.storage, or lower spec.transport.managed.storage"
    ),
    "maximum storage usage per PersistentVolumeClaim is 1Gi, but request is 10Gi": "Change spec.transport.managed",
    "insufficient quota to match these scopes: [{PriorityClass In [high]}]": "Name a priorityClassName in spec.rollout",
    "unable to create new content in namespace a because it is being terminated": "apply the job in another one",
    "failed quota: team: must specify limits.cpu for: prepare,rollout": "Set limits.cpu in spec.rollout.pod.resources",
    "failed quota: team: must specify limits.cpu for: proxy": "or in spec.rollout.pod.template for a container that it",
    "failed quota: team: must specify requests.ephemeral-storage for: rollout": "Set requests.ephemeral-storage in",
    "maximum cpu usage per Container is 2, but limit is 4": "LimitRange allows",
    'spec.containers[0].resources.requests: Invalid value: "4": must be less than or equal to cpu limit of 2': (
        "Set cpu in spec.rollout.pod.resources.limits"
    ),
    "cpu max limit to request ratio per Container is 2, but provided ratio is 4.0": "LimitRange allows",
    'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false': "out of spec.rollout.pod.template",
    'Internal error occurred: failed calling webhook "validate.kyverno.svc": refused': "kyverno.svc does not answer",
    'admission webhook "validation.gatekeeper.sh" denied the request: no label': "policy of validation.gatekeeper.sh",
    "ValidatingAdmissionPolicy 'labels' with binding 'all' denied request: no label": "Meet the policy labels",
    'error looking up service account default/reader: serviceaccount "reader" not found': "Create the service account",
    "no PriorityClass with name high was found": "Create the PriorityClass high",
    "Create Pod a-redis-0 in StatefulSet a-redis failed: pvc data-a-redis-0 is being deleted": "Kubernetes retries",
    'pod rejected: RuntimeClass "gvisor" not found': "Create the RuntimeClass gvisor",
}
KUBELET = {
    ("CreateContainerConfigError", 'secret "hub" not found'): "Create the secret hub",
    ("CreateContainerConfigError", 'configmap "settings" not found'): "Create the configmap settings",
    ("CreateContainerConfigError", "couldn't find key token in Secret default/hub"): "Add the key token to default/hub",
    ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root (pod: x)"): "a numeric USER",
    ("ErrImagePull", "rpc error: not found"): "set spec.rollout.pod.image in a new job",
    ("ErrImagePull", "failed to authorize: unexpected status from GET request: 401 Unauthorized"): "the pull Secret in",
    ("ErrImagePull", "pull access denied, repository does not exist"): "imagePullSecrets of spec.rollout.pod.template",
    ("InvalidImageName", 'couldn\'t parse image name "A:"'): "set spec.rollout.pod.image in a new job",
    ("ErrImageNeverPull", 'Container image "x:1" is not present with pull policy of Never'): "images.pullPolicy",
    ("RunContainerError", 'exec: "python3": executable file not found in $PATH: unknown'): "from Plaudit's image",
}


INCOMPLETE = "containers with incomplete status: [proxy prepare]"


class Troubled(ClusterModel):
    """A cluster whose rollouts do not start."""

    def __init__(self, status: dict[str, Any] | None, refusal: str = "") -> None:
        super().__init__()
        self.status, self.refusal = status, refusal

    def _run_pods(self, owner: dict[str, Any], count: int) -> int:
        if owner["metadata"]["name"] != "job-rollout" or not self.refusal:
            return super()._run_pods(owner, count)
        text = f'pods "job-rollout-x-y" is {"invalid" if "Invalid" in self.refusal else "forbidden"}: {self.refusal}'
        failing = [{"type": "ReplicaFailure", "status": "True", "message": text}]
        self.edit("Deployment", "job-rollout", lambda item: item.update(status={"conditions": failing}))
        return 0

    def _set_status(self, item: dict[str, Any], status: dict[str, Any]) -> None:
        if self.refusal and item["metadata"]["name"] == "job-rollout":
            return
        super()._set_status(item, status)

    def _start(self, pod: dict[str, Any]) -> bool:
        if self.status is None or pod["metadata"]["labels"]["plaudit.dev/role"] != "rollout":
            return super()._start(pod)
        self._set_status(pod, self.status)
        return False


def message_of(cluster: Troubled) -> tuple[str, str]:
    cluster.put(rljob())
    world = World(cluster=cluster)
    world.settle()
    condition = world.condition("RolloutReady")
    return condition["reason"], condition["message"]


@pytest.mark.parametrize("message", SCHEDULER)
def test_what_the_scheduler_says(message: str):
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    reason, told = message_of(Troubled({"phase": "Pending", "conditions": [waits]}))
    assert reason == "Unschedulable"
    assert message in told
    assert SCHEDULER[message] in told


@pytest.mark.parametrize("message", REFUSALS)
def test_what_a_quota_or_an_admission_policy_says(message: str):
    reason, told = message_of(Troubled(None, message))
    assert reason == "RefusedByCluster"
    assert message in told
    assert REFUSALS[message] in told
    assert "job-rollout-x-y" not in told, "a name that differs with each try"


@pytest.mark.parametrize("case", KUBELET)
def test_what_the_kubelet_says(case: tuple[str, str]):
    reason, message = case
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"name": "rollout", "image": "x:1", "state": state}
    bound = [{"type": "PodScheduled", "status": "True"}]
    found, told = message_of(Troubled({"phase": "Pending", "conditions": bound, "containerStatuses": [status]}))
    assert found in ("SecretOrConfigMissing", "ImagePullFailed", "Crashing")
    assert message in told
    assert KUBELET[case] in told


def test_a_container_that_ends_well_where_it_should_stay_is_named():
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    ended = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    status = {"name": "proxy", "image": "x:1", "state": waiting, "lastState": ended, "restartCount": 3}
    reason, told = message_of(Troubled({"phase": "Running", "containerStatuses": [status]}))
    assert reason == "Crashing"
    assert "proxy ends with code 0, and Kubernetes starts it again and again. Let it run for as long as the pod" in told


@pytest.mark.parametrize(
    ("container", "remedy"),
    [
        ("rollout", "Raise spec.rollout.pod.resources.limits.memory"),
        ("prepare", "Raise spec.rollout.pod.resources.limits.memory"),
        ("proxy", "Raise the memory limit of proxy in spec.rollout.pod.template"),
    ],
)
def test_of_a_container_without_memory_the_right_limit_is_named(container: str, remedy: str):
    state = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    statuses = [{"name": container, "image": "x:1", "state": {}, "lastState": state, "restartCount": 1}]
    reason, told = message_of(Troubled({"phase": "Running", "containerStatuses": statuses}))
    assert reason == "OutOfMemory"
    assert remedy in told


LATE = {
    "a sidecar that never gets ready": (
        {"type": "Initialized", "status": "False", "message": INCOMPLETE},
        [],
        INCOMPLETE,
    ),
    "a volume that is not mounted": (
        {"type": "Initialized", "status": "True"},
        [{"name": "rollout", "image": "x:1", "state": {"waiting": {"reason": "ContainerCreating"}}}],
        "a volume, Secret or ConfigMap may be missing",
    ),
    "a volume that is not mounted, before the init containers": (
        {"type": "Initialized", "status": "False", "message": "containers with incomplete status: [prepare]"},
        [
            {"name": name, "image": "x:1", "state": {"waiting": {"reason": "PodInitializing"}}}
            for name in ("prepare", "rollout")
        ],
        "a volume, Secret or ConfigMap may be missing",
    ),
    "a sidecar that is never ready": (
        {"type": "Ready", "status": "False", "message": "containers with unready status: [proxy]"},
        [{"name": "rollout", "image": "x:1", "ready": True, "state": {"running": {}}}],
        "containers with unready status: [proxy], for 90 s",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_pods_that_do_not_start_are_reported_once_they_are_late_without_an_event(case: str):
    condition, statuses, told = LATE[case]
    cluster = Troubled({"phase": "Running" if condition["type"] == "Ready" else "Pending"})
    since = {"lastTransitionTime": timestamp(cluster.now)}
    conditions = [{"type": "PodScheduled", "status": "True", **since}, {**condition, **since}]
    cluster.status |= {"conditions": conditions, "containerStatuses": statuses}  # type: ignore[operator]
    cluster.put(rljob())
    world = World(cluster=cluster)
    world.settle()
    assert told not in world.condition("RolloutReady")["message"]
    result = world.reconcile()
    assert result is not None
    assert result.again_after_s is not None
    cluster.now += result.again_after_s
    world.settle()
    assert told in world.condition("RolloutReady")["message"]


@pytest.mark.parametrize(
    ("error", "reason", "told"),
    [
        (
            InvalidError("exceeded quota: q, requested: count/deployments.apps=1, used: count/deployments.apps=2", 403),
            "RefusedByCluster",
            "Raise the namespace's quota of count/deployments.apps",
        ),
        (
            InvalidError("unable to create new content in namespace a because it is being terminated", 403),
            "RefusedByCluster",
            "The namespace is being deleted",
        ),
        (
            ApiUnavailableError('failed calling webhook "a.b.c": context deadline exceeded', 500),
            "CallFailed",
            "The operator repeats the call every few seconds. The admission webhook a.b.c does not answer",
        ),
        (ApiUnavailableError("etcdserver: leader changed", 500), "CallFailed", "look at the API server"),
        (
            InvalidError("ValidatingAdmissionPolicy 'names' with binding 'all' denied request: no", 422),
            "RefusedByCluster",
            "or have it exempt the objects of jobs (label plaudit.dev/job)",
        ),
    ],
    ids=["quota", "namespace", "webhook", "server", "policy"],
)
def test_what_the_api_server_says_to_an_object(error: KubeError, reason: str, told: str):
    world = World(rljob())

    def fail(call: str) -> None:
        if call == "create Deployment job-reward":
            raise error

    world.cluster.before = fail
    world.learn()
    admitted = world.condition("Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", reason)
    assert f"Deployment job-reward: {error}. " in admitted["message"]
    assert told in admitted["message"]


def test_without_keda_its_installation_is_the_remedy():
    job = rljob()
    job["spec"]["reward"]["workers"] = {"autoscaling": {"maxReplicas": 3}}
    world = World(job)

    def fail(call: str) -> None:
        if call.startswith("create ScaledObject"):
            raise NotFoundError("POST /apis/keda.sh/v1alpha1/namespaces/default/scaledobjects: HTTP 404", 404)

    world.cluster.before = fail
    world.learn()
    told = world.condition("Admitted")["message"]
    assert "this cluster has no ScaledObject" in told
    assert told.endswith("Install KEDA, or set spec.reward.workers.autoscaling.provider to hpa")


def test_binary_files_are_refused_by_name():
    world = World(rljob(files={"configMap": "code"}))
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "default"}}
    world.cluster.put({**code, "data": {"a.py": "x = 1\n"}, "binaryData": {"vocab.bin": "AAEC"}})
    world.settle()
    valid = world.condition("SpecValid")
    assert (valid["status"], valid["reason"]) == ("False", "FilesInvalid")
    assert "vocab.bin of ConfigMap 'code' is binary" in valid["message"]
    listed = rljob(files={"configMap": "code", "items": [{"key": "a.py", "path": "a.py"}]})
    world = World(listed)
    world.cluster.put({**code, "data": {"a.py": "x = 1\n"}, "binaryData": {"vocab.bin": "AAEC"}})
    world.settle()
    assert world.status["phase"] == "Running"


def test_a_name_that_begins_with_a_digit_is_refused():
    job = rljob()
    job["metadata"]["name"] = "7b"
    world = World(job, key=Key("default", "7b"))
    world.settle()
    assert "metadata.name: '7b' begins with a digit" in world.condition("SpecValid")["message"]
