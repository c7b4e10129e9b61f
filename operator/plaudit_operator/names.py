"""Name what the operator uses in the cluster: labels, roles, annotations, children, conditions, reasons, exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

GROUP: Final = "plaudit.dev"
FIELD_MANAGER: Final = "plaudit-operator"
CONTROLLER: Final = f"{GROUP}/rljob-operator"
"""Value of ``spec.managedBy`` for this operator; an empty one means the same."""
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_JOB: Final = f"{GROUP}/job"
LABEL_RUN: Final = f"{GROUP}/run"
"""On pods: separates the pods of this run from those of an earlier job of the same name."""
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_CLIENT: Final = f"{GROUP}/client"
"""On pods of users that submit samples to the scoring service of this name: Redis's policy lets them in."""
LABEL_CLIENT_OF: Final = f"{GROUP}/client-of"
"""On namespaces whose clients may reach the scoring services of the namespace in its value."""
LABEL_USES: Final = f"uses.{GROUP}"
"""Prefix of labels on the reward workers of jobs: ``uses.plaudit.dev/<service>`` lets them reach that RewardService."""
LABEL_SCORER: Final = f"{GROUP}/scorer"
LABEL_ENVIRONMENT: Final = f"{GROUP}/environment"
"""On what belongs to an entry of ``spec.environments``."""
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_ROLLOUT_GROUP: Final = f"{GROUP}/rollout-group"
"""On what belongs to an entry of ``rollout.groups``."""
LABEL_REPLICA: Final = f"{GROUP}/replica"
"""On the Jobs and pods of a rollout of several pods: its number, from 0."""
LABEL_GATEWAY_SETTINGS: Final = f"{GROUP}/gateway-settings"
"""On the gateways of a RewardService: digest of their settings."""
LABEL_REVISION: Final = f"{GROUP}/revision"
"""On pods and ConfigMaps of a RewardService: the revision of its scoring, which is also the version in each result."""
LABEL_MODEL: Final = f"{GROUP}/model"
"""On the servers of a RewardService's model: separates them from those of the model before or after it."""
LABEL_MACHINE_ROLE: Final = f"{GROUP}/machine-role"
"""On the pods of machines, which the job's broker makes: ``agent``, or ``tests``."""
SELECTOR: Final = f"{MANAGED_BY}={FIELD_MANAGER}"
"""Selects all objects that the operator created."""
INPUTS: Final = f"{GROUP}/inputs"
"""Annotation: digest of the part of the user's spec that a pod template is rendered from."""
MANIFEST: Final = f"{GROUP}/manifest"
"""Annotation: digest of the manifest that an object was last written from; a manifest that lost a field differs too."""
TEMPLATE: Final = f"{GROUP}/template"
"""Annotation on Jobs: digest of the pod template that they were made from, which they cannot change."""
SHORT_ATTEMPTS: Final = f"{GROUP}/short-attempts"
"""Annotation on the Job of a rollout of several pods: attempts before it that ended early, one after another."""
RUN_KEY: Final = "run.json"
"""Key of the job's ConfigMap with kind and uid of the object that its run began with: another may have adopted it."""
KEDA_PAUSE: Final = "autoscaling.keda.sh/paused-replicas"
COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
KUEUE_MANAGED: Final = "kueue.x-k8s.io/managed"
"""Label: with the annotation ``KUEUE_PARENT`` it makes Kueue manage pods of a Job, StatefulSet or Deployment."""
KUEUE_PARENT: Final = "kueue.x-k8s.io/pod-suspending-parent"
KUEUE_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
KUEUE_TOPOLOGY: Final = "kueue.x-k8s.io/podset"
KUEUE_SERVING: Final = "kueue.x-k8s.io/pod-group-serving"
"""Annotation: keeps the group's quota until all of its pods are gone. Otherwise Kueue takes back the quota of each pod
that ends with code 0, for good, and the pod's replacement stays gated."""
KUEUE_GATE: Final = "kueue.x-k8s.io/admission"
METRICS_PORT: Final = 9090
HEALTH_PORT: Final = 8080
REDIS_PORT: Final = 6379
MODEL_PORT: Final = 8000
GATEWAY_PORT: Final = 8710
SANDBOXES_PORT: Final = 8720
ENDPOINT_PORT: Final = 8730
RENDEZVOUS_PORT: Final = 29500
REPLICA_PORT: Final = 29501
WEIGHTS_PORT: Final = 29510
"""Of the first rank in a trainer's pod; the next ranks have the next ports."""
EXIT_FAILED: Final = 3
"""Too many scores failed: another attempt would meet the same scorers."""
EXIT_STOPPED: Final = 4
"""The trainer was stopped before its last step; another attempt resumes from its checkpoint."""
EXIT_NO_RETRY: Final = 42
"""The user's own code asked for no further attempts."""


@dataclass(frozen=True)
class Role:
    """Describe what is true of the pods of one role in every job; ``children/all.py`` has what one job has of it."""

    section: str
    """The section of a job that describes its pods, as messages name it."""
    reported: str = ""
    """Its name in the status, if that is not its label."""
    grouped: bool = False
    """True if its pods start together with those of other such roles, where a job starts as a whole."""
    revised: bool = False
    """True if a new revision of a RewardService replaces its pods."""
    renewed: bool = False
    """True if they take new images with a revision: models would load anew, and keep theirs."""
    budgeted: bool = False
    """True if a drain may evict one of its pods at a time, where there are several."""


ROLES: Final[Mapping[str, Role]] = {
    "trainer": Role("spec.trainer.pod", grouped=True),
    "rollout": Role("spec.rollout.pod", grouped=True, budgeted=True),
    "reward": Role("spec.reward.workers.pod", revised=True, budgeted=True),
    "gateway": Role("spec.reward.gateway.pod", revised=True, budgeted=True),
    "model": Role("the scorer's model.pod", "model/<scorer>", grouped=True),
    "environment": Role("the environment's pod", "environment/<name>"),
    "sandboxes": Role("the pod of the machines' broker"),
    "metrics": Role("spec.metrics.pod", renewed=True),
    "redis": Role("spec.transport.managed.pod", "transport", grouped=True, renewed=True),
}
"""Roles by the value of their label, which is also the name of their container and of their user in Redis."""
REVISED_ROLES: Final = tuple(role for role, facts in ROLES.items() if facts.revised)


def run_id(name: str, uid: str) -> str:
    """Return the id of the run: the job's name and the beginning of its uid."""
    return f"{name}-{uid[:6]}"


def job_config(name: str) -> str:
    """Return the name of the ConfigMap with the resolved job, its files and the frozen pod templates."""
    return f"{name}-job"


def revision_config(name: str, revision: str) -> str:
    """Return the name of the ConfigMap that the pods of one revision of a RewardService read."""
    return f"{name}-job-{revision}"


def redis_secret(name: str, uid: str) -> str:
    """Return the name of the Secret with Redis's passwords, unique by uid: the operator cannot read an earlier one."""
    return f"{name}-redis-{uid[:8]}"


def gateway_secret(name: str, uid: str) -> str:
    """Return the name of the Secret with the tokens of a gateway's callers, unique by uid."""
    return f"{name}-gateway-{uid[:8]}"


def sandboxes_objects(name: str, uid: str) -> str:
    """Return the name of the Secret and the RoleBinding of a job's broker of machines, unique by uid as Secrets are."""
    return f"{name}-sandboxes-{uid[:8]}"


def gateway_url(name: str, namespace: str) -> str:
    """Return the URL of a service's gateways inside the cluster."""
    return f"http://{role_object(name, 'gateway')}.{namespace}.svc:{GATEWAY_PORT}"


def role_object(name: str, role: str) -> str:
    """Return the name of the objects of a role: Deployment, StatefulSet, Service, service account, policies."""
    return f"{name}-{role}"


def model_object(name: str, scorer: str) -> str:
    """Return the name of the Deployment and Service of a scorer's reward model.

    In a RewardService, whose models change, the digest of the model stands for the scorer.
    """
    return f"{name}-m-{scorer}"


def trainer_job(name: str, attempt: int) -> str:
    """Return the name of the Job of one attempt of the trainer."""
    return f"{name}-trainer-{attempt}"


def rollout_object(name: str, group: str) -> str:
    """Return the name of the Deployment of a rollout group, which begins the names of its Jobs too."""
    return f"{name}-r-{group}" if group else role_object(name, "rollout")


def rollout_job(name: str, group: str, replica: int, attempt: int) -> str:
    """Return the name of the Job of one attempt of a rollout of several pods.

    The number wraps, so that the pods' host names stay within 63 characters; an attempt's predecessor is gone by then.
    """
    return f"{rollout_object(name, group)}-{replica}-{attempt % 100}"


class ConditionType:
    """List the types of conditions, in the order in which they are shown."""

    SPEC_VALID: Final = "SpecValid"
    ADMITTED: Final = "Admitted"
    TRANSPORT_READY: Final = "TransportReady"
    ROLLOUT_READY: Final = "RolloutReady"
    REWARD_READY: Final = "RewardReady"
    TRAINER_RUNNING: Final = "TrainerRunning"
    ROLLED_OUT: Final = "RolledOut"
    DEGRADED: Final = "Degraded"
    SUSPENDED: Final = "Suspended"
    COMPLETE: Final = "Complete"
    FAILED: Final = "Failed"
    READY: Final = "Ready"
    RECONCILING: Final = "Reconciling"
    STALLED: Final = "Stalled"


CONDITION_ORDER = tuple(value for name, value in vars(ConditionType).items() if name.isupper())
NEEDED = (
    ConditionType.TRANSPORT_READY,
    ConditionType.ROLLOUT_READY,
    ConditionType.REWARD_READY,
    ConditionType.TRAINER_RUNNING,
)
"""Conditions that are all true while a job runs, as far as it has them."""


class Reason:
    """List the reasons of conditions and events; docs/kubernetes/conditions.md has the remedy for each."""

    VALID: Final = "Valid"
    INVALID: Final = "Invalid"
    IMMUTABLE_CHANGED: Final = "ImmutableFieldChanged"
    FILES_MISSING: Final = "FilesMissing"
    FILES_INVALID: Final = "FilesInvalid"
    SERVICE_MISSING: Final = "ServiceMissing"
    ADMITTED: Final = "Admitted"
    NAME_TAKEN: Final = "NameTaken"
    REFUSED_BY_CLUSTER: Final = "RefusedByCluster"
    CALL_FAILED: Final = "CallFailed"
    AWAITING_DELETION: Final = "AwaitingDeletion"
    DELETING: Final = "Deleting"
    READY: Final = "Ready"
    EXTERNAL: Final = "External"
    STARTING: Final = "Starting"
    RUNNING: Final = "Running"
    UNSCHEDULABLE: Final = "Unschedulable"
    WAITING_FOR_ROOM: Final = "WaitingForRoom"
    QUEUED: Final = "Queued"
    GANG_UNAVAILABLE: Final = "GangUnavailable"
    IMAGE_PULL: Final = "ImagePullFailed"
    CONFIG_MISSING: Final = "SecretOrConfigMissing"
    OUT_OF_MEMORY: Final = "OutOfMemory"
    CRASHING: Final = "Crashing"
    NODE_LOST: Final = "NodeLost"
    JUDGE_FAILING: Final = "JudgeFailing"
    REDIS_FULL: Final = "RedisFull"
    AUTOSCALER_FAILING: Final = "AutoscalerFailing"
    HEALTHY: Final = "Healthy"
    SUSPENDED_BY_USER: Final = "SuspendedByUser"
    SUSPENDING: Final = "Suspending"
    NOT_SUSPENDED: Final = "NotSuspended"
    TRAINER_DONE: Final = "TrainerDone"
    FAILURE_RULE: Final = "FailureRule"
    TOO_MANY_RESTARTS: Final = "TooManyRestarts"
    TOO_MANY_DISRUPTIONS: Final = "TooManyDisruptions"
    TOO_MANY_FAILED_SCORES: Final = "TooManyFailedScores"
    DO_NOT_RETRY: Final = "DoNotRetry"
    PRE_RUNNING_DEADLINE: Final = "PreRunningDeadlineExceeded"
    ACTIVE_DEADLINE: Final = "ActiveDeadlineExceeded"
    STALLED: Final = "Stalled"
    NOT_STALLED: Final = "NotStalled"
    BACK_OFF: Final = "BackOff"
    ROLLED_OUT: Final = "RolledOut"
    ROLLING_OUT: Final = "RollingOut"
    ROLL_OUT_STUCK: Final = "RollOutStuck"
    DISRUPTED: Final = "Disrupted"
    ATTEMPT_FAILED: Final = "AttemptFailed"
