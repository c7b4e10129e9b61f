"""Compute the state of each role of a job: pods wanted, ready, failing, and the remedy for those that are not ready."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plaudit_operator import names
from plaudit_operator.attempts import TrainerAttempt, replica_of
from plaudit_operator.children import roles
from plaudit_operator.children.context import JobContext
from plaudit_operator.children.pod import Child
from plaudit_operator.names import Reason
from plaudit_operator.observed import (
    AWAITS_FINALIZER,
    NO_SUCH_KIND,
    Object,
    Observed,
    attempt_of,
    conditions_of,
    labels,
)
from plaudit_operator.pod_state import held_by, is_over, is_ready, is_running, problem_of, restarts_of, sidecars_left
from plaudit_operator.policies import awaited, without_pod_name
from plaudit_operator.runtime.kinds import JOB


@dataclass(frozen=True)
class RoleState:
    """Hold the state of one role."""

    name: str
    """In the status."""
    label: str
    """One of ``names.ROLES``."""
    desired: int
    ready: int = 0
    updated: int = 0
    restarts: int = 0
    held: int = 0
    """Pods that hold resources; terminating ones do until they end."""
    reason: str = ""
    """Why pods are not ready, of ``names.Reason``; empty if unknown."""
    problem: str = ""
    remedy: str = ""
    """The remedy, as one sentence."""

    @property
    def is_ready(self) -> bool:
        """Return True if all desired pods are ready."""
        return self.ready >= self.desired

    @property
    def count(self) -> str:
        """Return the pods as text, such as ``1/2``."""
        return f"{self.ready}/{self.desired}"

    def report(self) -> dict[str, Any]:
        """Return the entry of ``status.roles``."""
        report = {name: getattr(self, name) for name in ("name", "desired", "ready", "updated", "restarts")}
        return report | ({"lastFailure": self.problem} if self.problem else {})


def lack_of(missing: Sequence[RoleState]) -> tuple[str, str]:
    """Return reason and message of a condition that is false because these roles are not ready."""
    reason = next((role.reason for role in missing if role.reason), Reason.STARTING)
    return reason, "; ".join(map(_lack, missing))


def _lack(role: RoleState) -> str:
    explanation = ". ".join(text for text in (role.problem, role.remedy) if text)
    return f"{role.name} {role.count}" + (f": {explanation}" if explanation else "")


def role_states(
    context: JobContext,
    children: Sequence[Child],
    observed: Observed,
    attempt: TrainerAttempt | None,
    now: float,
    created_with: Callable[[str], int],
) -> dict[str, RoleState]:
    """Return the state of every role by its name in the status.

    The name of a reward model is ``model/<scorer>``, that of an environment ``environment/<name>``. ``created_with``
    returns the pods with which a missing Deployment, or Redis, will be created: its creation changes no status.
    """
    states, of_role = defaultdict[str, list[RoleState]](list), defaultdict[str, list[Object]](list)
    for child in children:
        pods = [pod for pod in observed.pods_of(child.role) if child.labels.items() <= labels(pod).items()]
        if child.role == roles.TRAINER_ROLE:
            state = _of_trainer(child, observed, attempt, pods, now)
        elif child.kind is JOB:
            state = _of_replicas(child, observed, pods, now, suspended=context.spec.suspend)
        else:
            state = _of_workload(child, observed, pods, _least(context, observed, child, created_with), now)
        states[child.reported].append(state)
        of_role[child.reported] += pods
    together = {name: _together(parts) for name, parts in states.items()}
    return {
        name: replace(role, remedy=_remedy(role, context) or _held(role, observed, of_role[name]))
        for name, role in together.items()
    }


def _together(states: Sequence[RoleState]) -> RoleState:
    """Return the state of all groups of a role; the first that has a problem explains it."""
    with_problem = next((state for state in states if state.problem), states[-1])
    counts = ("desired", "ready", "updated", "restarts", "held")
    return replace(with_problem, **{name: sum(getattr(state, name) for state in states) for name in counts})


def _held(role: RoleState, observed: Observed, pods: Sequence[Object]) -> str:
    """Return what a role waits for that neither it nor the operator can end; empty if there is nothing."""
    stopped = (job["metadata"]["name"] for job in observed.jobs_of("trainer") if job["spec"].get("suspend"))
    if role.name == "trainer" and not role.is_ready and (name := next(stopped, "")):
        return f"Job {name} is suspended; if it stays so, another program suspends it, such as a queue for all Jobs"
    for pod in [] if role.is_ready else pods:
        if why := held_by(pod):
            return f"Pod {pod['metadata']['name']} {AWAITS_FINALIZER} {why}, which has to be taken off"
        if left := sidecars_left(pod, role.label):
            return f"Pod {pod['metadata']['name']} stays until its sidecars end: {', '.join(left)}"
    return ""


def _least(context: JobContext, observed: Observed, child: Child, created_with: Callable[[str], int]) -> int:
    """Return the pods that Redis or a Deployment has to have: of one that exists while it runs."""
    scaling, least = context.spec.reward.workers.autoscaling, child.pods
    if child.replicas is None and scaling:
        least = max(int(scaling.provider == "hpa"), scaling.min_replicas)
    if context.spec.suspend or (child.role == roles.REWARD_ROLE and awaited(observed)):  # they start after the group
        least = 0
    return least if observed.child(child.kind.kind, child.owner) else max(least, created_with(child.owner))


def _of_workload(child: Child, observed: Observed, pods: list[Object], least: int, now: float) -> RoleState:
    owner = observed.child(child.kind.kind, child.owner)
    if owner is None:
        return RoleState(child.reported, child.role, least)
    status = owner.get("status") or {}
    # Its controller counts again a moment after a pod has ended.
    ready = min(int(status.get("readyReplicas", 0)), sum(map(is_ready, pods)))
    desired = max(int(owner["spec"].get("replicas", 1)), least)  # it may still have to be scaled up
    problem = _problem(pods, _refusal(observed, owner), now)
    restarts, held = sum(map(restarts_of, pods)), sum(not is_over(pod) for pod in pods)
    updated = int(status.get("updatedReplicas", 0))
    return RoleState(child.reported, child.role, desired, ready, updated, restarts, held, *problem)


def _of_replicas(child: Child, observed: Observed, pods: list[Object], now: float, *, suspended: bool) -> RoleState:
    """Return the state of replicas of several pods, each a Job."""
    jobs = [job for job in observed.jobs_of(child.role) if child.labels.items() <= labels(job).items()]
    desired = 0 if suspended else child.pods
    ready, held = sum(map(is_ready, pods)), sum(not is_over(pod) for pod in pods)
    attempts: dict[int, int] = {}
    for job in jobs:
        attempts[replica_of(job)] = max(attempt_of(job), attempts.get(replica_of(job), 0))
    refused = next((why for job in jobs if (why := _refusal(observed, job))), "")
    reason, problem = _problem(pods, refused, now)
    if ready < desired and not problem:
        problem = _last_failure(observed, child.reported)  # of an attempt before: its pods are gone
    restarts = sum(attempts.values())
    return RoleState(child.reported, child.role, desired, ready, len(pods), restarts, held, reason, problem)


def _of_trainer(
    child: Child, observed: Observed, attempt: TrainerAttempt | None, pods: list[Object], now: float
) -> RoleState:
    number, held = attempt.number if attempt else 0, sum(not is_over(pod) for pod in pods)
    pods = [pod for pod in pods if attempt_of(pod) == number]
    running = sum(map(is_running, pods))
    refused = _refusal(observed, attempt.job) if attempt and attempt.job else ""
    # A pod that runs has no problem, whatever befell its sidecars.
    reason, problem = _problem([pod for pod in pods if not is_running(pod)], refused, now)
    problem = problem or _last_failure(observed, child.reported)  # of the attempt before: its pods are gone
    restarts = int(observed.status.get("restarts", 0))
    return RoleState(child.reported, child.role, child.pods, running, len(pods), restarts, held, reason, problem)


def _last_failure(observed: Observed, role: str) -> str:
    reports = observed.status.get("roles") or []
    return next((str(report.get("lastFailure", "")) for report in reports if report["name"] == role), "")


def _refusal(observed: Observed, owner: Object) -> str:
    """Return why the API server rejects the pods of a Job, StatefulSet or Deployment; empty if it does not."""
    refused = [c for c in conditions_of(owner) if c["type"] == "ReplicaFailure" and c["status"] == "True"]
    by_deployment = without_pod_name(str(refused[0].get("message", ""))) if refused else ""
    return observed.refused_pods.get((owner["kind"], owner["metadata"]["name"]), by_deployment)


def _problem(pods: list[Object], refused: str, now: float) -> tuple[str, str]:
    """Return reason and message of why pods are missing or do not run; both empty if unknown."""
    if refused:
        return Reason.REFUSED_BY_CLUSTER, refused
    found = (problem_of(pod, now) for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])))
    problems = [problem for problem in found if problem]
    return min(problems, key=lambda problem: problem[0] == Reason.WAITING_FOR_ROOM, default=("", ""))


def _remedy(role: RoleState, context: JobContext) -> str:
    """Return the end of a condition's message: a sentence; empty if there is nothing to do but wait."""
    pod = names.ROLES[role.label].section
    if role.reason in _EXPLAINED and (told := remedy_of(role.problem, pod)):
        return told
    limit = "spec.transport.managed.memory" if role.name == "transport" else f"{pod}.resources.limits.memory"
    killed = _KILLED.search(role.problem)
    if killed and killed[1] not in (role.label, *_BEFORE_IT):
        limit = f"the memory limit of {killed[1]} in {pod}.template"
    where = " or apply another revision" if context.revision else " in a new job"
    sentences = {
        Reason.UNSCHEDULABLE: f"Add nodes, or lower {pod}.resources, or change its nodeSelector or tolerations",
        Reason.IMAGE_PULL: f"Correct the chart's images and images.pullSecret, or set {pod}.image{where}",
        Reason.CONFIG_MISSING: f"Create what kubectl describe pod --selector plaudit.dev/job={context.name} names",
        Reason.OUT_OF_MEMORY: f"Raise {limit}{where}",
        Reason.CRASHING: f"See kubectl plaudit logs {context.name} {role.label}",
        Reason.REFUSED_BY_CLUSTER: f"Change what the message names in {pod}, or have the policy changed",
    }
    return sentences.get(role.reason, "")


_KILLED = re.compile(r": (\S+) exceeded its memory limit")
_BEFORE_IT = ("prepare", "functions")
"""Containers of ours that start before a role's process, with its resources."""
_EXPLAINED = (
    Reason.UNSCHEDULABLE,
    Reason.CONFIG_MISSING,
    Reason.REFUSED_BY_CLUSTER,
    Reason.IMAGE_PULL,
    Reason.CRASHING,
)
_REMEDIES = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        # the scheduler
        (r'persistentvolumeclaim "([^"]+)" not found', "Create the PersistentVolumeClaim {0}; the pods then start"),
        (
            r'persistentvolumeclaim "([^"]+)" is being deleted',
            "Suspend or delete what uses the PersistentVolumeClaim {0}, then create the claim again",
        ),
        (
            r"unbound immediate PersistentVolumeClaims",
            "See kubectl describe pvc: its StorageClass must exist and provision volumes, or a cluster default must",
        ),
        (
            r"volume node affinity conflict|find available persistent volumes",
            "Add nodes where the volume is (its zone), or use a claim of a StorageClass that any node can mount",
        ),
        (r"ReadWriteOncePod", "Use a claim with access mode ReadWriteMany: the pods of a job share it"),
        (
            r"anti-affinity rules|topology spread constraints",
            "Change affinity, topology or template of {pod}, or add nodes",
        ),
        (r"Too many pods", "Add nodes, or raise the kubelets' maxPods"),
        (r"cannot allocate all claims|resourceclaim", "See kubectl describe resourceclaim and {pod}.resourceClaims"),
        # a quota, a LimitRange
        (
            r"must specify ([a-z.-]+)",
            "Set {0} in {pod}.resources, or in {pod}.template for a container that it adds: a quota of the namespace "
            "counts it",
        ),
        (
            r"requested: persistentvolumeclaims=\d+, used",
            "Raise the namespace's quota of persistentvolumeclaims: Redis needs one, or give spec.transport.url",
        ),
        (
            r"requested: (?:[^:]*,)?(requests\.storage|persistentvolumeclaims|[^=,]*\bstorageclass\.[^=,]*)=",
            "Raise the namespace's quota of {0}, or lower spec.transport.managed.storage; Kubernetes retries",
        ),
        (
            r"requested: (?:[^:]*,)?(count/[^=,]*|services|configmaps|secrets)=",
            "Raise the namespace's quota of {0}: a job needs a fixed number of them",
        ),
        (
            r"requested: (pods)=\d+, used",
            "Raise the namespace's quota of {0}, or lower the replicas; Kubernetes retries",
        ),
        (
            r"insufficient quota to match these scopes",
            "Name a priorityClassName in {pod} that a quota of the namespace is for, or have that quota made",
        ),
        (r"exceeded quota", "Raise the namespace's quota or lower {pod}.resources; Kubernetes retries"),
        (
            r"(?:maximum|minimum) storage usage per PersistentVolumeClaim",
            "Change spec.transport.managed.storage to what the namespace's LimitRange allows, or have that changed",
        ),
        (
            r"(?:maximum|minimum) [a-z-]+ usage per|max limit to request ratio",
            "Change {pod}.resources to what the namespace's LimitRange allows, or have that changed",
        ),
        (
            r"must be less than or equal to ([a-z./-]+) limit",
            "Set {0} in {pod}.resources.limits: without it the namespace's LimitRange gives one, which is lower",
        ),
        # admission, deletion
        (
            rf"{NO_SUCH_KIND} (?:ScaledObject|TriggerAuthentication)",
            "Install KEDA, or set spec.reward.workers.autoscaling.provider to hpa",
        ),
        (
            rf"{AWAITS_FINALIZER} ",
            "Whoever set the finalizer has to take it off; Kubernetes then deletes the object",
        ),
        (r"because it is being terminated", "The namespace is being deleted: apply the job in another one"),
        (
            r"violates PodSecurity",
            "Take what the message names out of {pod}.template, or use a namespace with another pod-security label",
        ),
        (
            r'failed calling webhook "([^"]+)"',
            "The admission webhook {0} does not answer: restart it, or have an administrator remove its configuration",
        ),
        (
            r'admission webhook "([^"]+)" denied',
            "Meet the policy of {0} by {pod}, or have it exempt the objects of jobs (label plaudit.dev/job)",
        ),
        (
            r"ValidatingAdmissionPolicy '([^']+)'",
            "Meet the policy {0} by {pod}, or have it exempt the objects of jobs (label plaudit.dev/job)",
        ),
        (r"pvc ([^ ]+) is being deleted", "Its pod starts once {0} is gone, with a new volume; Kubernetes retries"),
        (
            r'serviceaccount "([^"]+)" not found',
            "Create the service account that {pod}.serviceAccountName names; the pods then start",
        ),
        (
            r"no PriorityClass with name ([^ ]+) was found",
            "Create the PriorityClass {0}, or name another in {pod}.priorityClassName",
        ),
        (
            r'(?i)runtimeclass(?:\.node\.k8s\.io)? "([^"]+)" not found',
            "Create the RuntimeClass {0}, or correct the chart's jobDefaults.runtimeClassName or {pod}.template",
        ),
        # the kubelet
        (
            r"couldn't find key ([^ ]+) in (?:Secret|ConfigMap) ([^ ]+)",
            "Add the key {0} to {1}; the pods then start",
        ),
        (r'(secret|configmap) "([^"]+)" not found', "Create the {0} {1}; the pods then start"),
        (
            r"runAsNonRoot and image will run as root|non-numeric user",
            "Build the image with a numeric USER other than 0, or set the chart's runAsUser",
        ),
        (
            r"(?i)unauthorized|authentication required|pull access denied|no basic auth credentials",
            "Create the pull Secret in the job's namespace (the chart's images.pullSecret, or imagePullSecrets of "
            "{pod}.template) for this registry, or correct the image",
        ),
        (
            r"ErrImageNeverPull|is not present with pull policy of Never",
            "Load the image into the nodes, or change the chart's images.pullPolicy",
        ),
        (
            r"ends with code 0, and Kubernetes starts it again",
            "Let it run for as long as the pod, or give it in initContainers of {pod}.template",
        ),
        (
            r"executable file not found|no such file or directory: unknown",
            "Build {pod}.image from Plaudit's image of the same version, which has what the role runs",
        ),
    )
)
"""What helps against the messages of scheduler, quota, admission and kubelet, the first that applies; ``{pod}`` is the
role's section. Wordings of Kubernetes 1.30 to 1.36."""


def remedy_of(message: str, pod: str) -> str:
    """Return what helps against a message of the cluster, as a sentence; empty if it is not known."""
    for pattern, remedy in _REMEDIES:
        if found := pattern.search(message):
            return remedy.format(*(group or "" for group in found.groups()), pod=pod)
    return ""
