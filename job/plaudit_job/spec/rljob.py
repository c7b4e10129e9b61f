"""RLJob: the description of a job, on a laptop, on a Ray cluster and on Kubernetes.

The smaller sections are here: metadata, environments, lifecycle, scheduling, metrics, storage, files and trainer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from plaudit_job.spec.algorithm import AlgorithmSpec, ModelSpec
from plaudit_job.spec.pod import PodSpec, quantity
from plaudit_job.spec.rewards import RewardSpec
from plaudit_job.spec.rollout import DataSpec, RolloutSpec, TrainDataSpec
from plaudit_job.spec.section import BYTE_QUANTITY, DNS_LABEL, MUTABLE, Command, FilePath, Opaque, Section
from plaudit_job.spec.transport import TransportSpec


class ReadinessSpec(Section):
    """The condition under which a server takes requests."""

    path: str = Field(default="", pattern=r"^(/.*)?$")
    """Path that answers GET with a status below 400. Default empty: the port accepts connections."""
    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds that a server may take to start under ``plaudit run``. Default 300."""


class EnvironmentServerSpec(Section):
    """One server; its URL is in ``PLAUDIT_ENVIRONMENT_<NAME>_URL`` for agents, tools and scorers."""

    name: str = Field(max_length=20, pattern=DNS_LABEL)
    """Its name, such as ``sandbox``; part of the names of its pods and of the variable."""
    image: str = ""
    """Container image, for Kubernetes. Default empty: the operator's image for workers."""
    command: Command = Field(default=[])
    """Program, by its name or path, and its arguments; ``PORT`` and ``HOST`` in its environment are where it listens.
    Required for ``plaudit run``. Default empty: the image's own."""
    port: int = Field(default=8000, ge=1, le=65_535)
    """TCP port on Kubernetes. ``plaudit run`` chooses a free one. Default 8000."""
    replicas: int = Field(default=1, ge=1, le=10_000)
    """Number of servers behind the URL on Kubernetes; ``plaudit run`` starts one. Default 1."""
    session_affinity: Literal["none", "clientIP"] = "none"
    """``clientIP``: on Kubernetes all connections of one pod reach the same server, which servers with sessions by
    cookie (NeMo Gym's) need with several ``replicas``. ``none``: each connection reaches any of them. Default
    ``none``."""
    readiness: ReadinessSpec = ReadinessSpec()
    """The condition under which it takes requests."""
    pod: PodSpec = PodSpec()
    """Pods of the servers; a runtime class such as gVisor's goes into ``template``."""

    @property
    def variable(self) -> str:
        """Return the environment variable with its URL."""
        return url_variable(self.name)


def url_variable(name: str) -> str:
    """Return the environment variable with the URL of an environment."""
    return f"PLAUDIT_ENVIRONMENT_{name.upper().replace('-', '_')}_URL"


class ExitCodesSpec(Section):
    """Exit codes of the trainer."""

    operator: Literal["In", "NotIn"] = "In"
    """``In``: one of ``values``; ``NotIn``: none of them. Default In."""
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(min_length=1, max_length=64)
    """The exit codes."""


class FailureRuleSpec(Section):
    """What follows a certain end of an attempt of the trainer: exactly one of ``onExitCodes`` and ``onReasons``."""

    action: Literal["Fail", "Count", "Ignore"]
    """``Fail``: the job fails. ``Count``: another attempt, which counts towards ``maxRestarts``. ``Ignore``: another
    attempt, which counts towards ``maxDisruptions``."""
    on_exit_codes: ExitCodesSpec | None = None
    """Applies if a rank of the attempt exited with such a code."""
    on_reasons: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(default=[], max_length=64)
    """Applies if a pod of the attempt has one of these reasons: of the pod (``Evicted``, ``TopologyAffinityError``), of
    its condition DisruptionTarget (``PreemptionByScheduler``), or of a container (``OOMKilled``)."""


class BackoffSpec(Section):
    """Pauses between attempts that end early: without a closed step, and sooner than ``resetAfterSeconds``."""

    initial_seconds: float = Field(default=10.0, ge=0, le=86_400)
    """Pause after the second early end in a row; it doubles with each further one. The first early end is followed by
    the next attempt at once. Default 10."""
    max_seconds: float = Field(default=300.0, ge=0, le=86_400)
    """Longest pause. Default 300."""
    reset_after_seconds: float = Field(default=600.0, ge=0, le=86_400)
    """An attempt that ran as long as this has not ended early. Default 600."""


class FailurePolicySpec(Section):
    """What follows the end of an attempt of the trainer. ``plaudit run`` uses only ``maxRestarts``.

    The first rule that applies decides. Without one, exit codes 42 and 3 fail the job, an end by the cluster counts as
    a disruption, and any other as a restart.
    """

    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Restarts of the trainer before the job fails; disruptions by the cluster do not count. Default 3."""
    max_disruptions: int = Field(default=100, ge=0, le=100_000)
    """Attempts of the trainer that the cluster may end (drain, preemption, eviction, a kubelet's refusal) before the
    job fails. Kubernetes only. Default 100."""
    rules: list[FailureRuleSpec] = Field(default=[], max_length=32)
    """Rules for certain ends, in order. Kubernetes only. Default none."""
    backoff: BackoffSpec = BackoffSpec()
    """Pauses between attempts that end early. Kubernetes only."""


class LifecycleSpec(Section):
    """Deadlines and cleanup. ``plaudit run`` uses only ``failurePolicy.maxRestarts``."""

    pre_running_deadline_seconds: int = Field(default=1800, ge=1)
    """Seconds from creation or resumption within which the job must run; else it fails and releases its resources.
    Default 1,800."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """Seconds from start or resumption after which a running job fails. Default: no limit."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """Seconds from the end of the job until the object is deleted. Default: never."""
    cleanup: Literal["All", "KeepTransport", "None"] = "All"
    """What is deleted at the end: ``All`` keeps the object and the shared volume, ``KeepTransport`` also keeps Redis,
    ``None`` deletes nothing but machines (``sandboxes``). Default All."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """Restarts after an attempt of the trainer has ended."""


class Metadata(Section):
    """Name and labels, as on any Kubernetes object."""

    name: str = Field(min_length=1, max_length=40, pattern=DNS_LABEL)
    """Name of the job: at most 40 of a-z, 0-9 and ``-``, because the names of its pods are this name and a suffix. A
    run's id is this name and a short uid."""
    namespace: str = Field(default="", max_length=63)
    """Kubernetes namespace. Default empty: that of the context; ``plaudit run`` ignores it."""
    labels: dict[str, str] = Field(default={})
    """Labels of the object; Plaudit ignores them."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the object; Plaudit ignores them."""


class SchedulingSpec(Section):
    """Queue, gang, priority. ``plaudit run`` ignores it."""

    queue_name: str = Field(default="", max_length=63, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")
    """Kueue's local queue: trainer, rollouts, reward models and Redis wait there until they are admitted together.
    Default empty: none."""
    gang: Literal["none", "native"] = "none"
    """``native``: trainer, rollouts, reward models and Redis start together or not at all, through Kubernetes' own
    PodGroup. Default none: not every cluster has it."""
    priority_class_name: str = Field(default="", max_length=253)
    """Priority class of all pods. Default empty: the cluster's default."""

    @property
    def whole(self) -> bool:
        """Return True for a job whose pods start together or not at all."""
        return self.gang != "none" or bool(self.queue_name)


class RewardLatencySpec(Section):
    """The job's own objective for the time from a finished sample to its score; alerts burn against it."""

    threshold_seconds: float = Field(default=30.0, gt=0)
    """Seconds from a finished sample to its score. Default 30."""
    target: float = Field(default=0.99, gt=0, lt=1)
    """Target share of samples within the threshold. Default 0.99."""


class TracesSpec(Section):
    """OpenTelemetry spans of single samples, sent by the metrics process."""

    endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a collector for OTLP over HTTP, such as ``http://collector:4318``. Default empty: no spans."""
    share: float = Field(default=0.01, ge=0, le=1)
    """Share of samples that are sent; the slowest of each step are always sent. Default 0.01."""


class MetricsSpec(Section):
    """The metrics process."""

    reward_latency: Annotated[RewardLatencySpec, MUTABLE] = RewardLatencySpec()
    """The objective for reward latency."""
    traces: TracesSpec = TracesSpec()
    """Spans of single samples."""
    keep_samples: bool = True
    """Write every closed group with texts, scores and timings to ``samples/``. Default true: ``rescore`` and the
    samples view need them."""
    pod: PodSpec = PodSpec()
    """Its pod."""


class StorageSpec(Section):
    """The volume that all processes share; under ``plaudit run``, the run's folder."""

    claim_name: str = ""
    """Name of an existing PersistentVolumeClaim of the job's namespace that many pods can mount (ReadWriteMany).
    Default empty: none, enough for a job that only scores."""
    mount_path: str = Field(default="/plaudit", pattern=r"^/")
    """Mount point in every pod; a run's folder is ``<mountPath>/runs/<namespace>/<run>/``. Default ``/plaudit``."""


class FileItem(Section):
    """One file of the ConfigMap."""

    key: str = Field(min_length=1)
    """Key in the ConfigMap that ``configMap`` names."""
    path: str = Field(min_length=1, pattern=r"^[^/]")
    """Relative path under which ``path`` fields of the job refer to it."""


class FilesSpec(Section):
    """Reward functions and templates for Kubernetes: a ConfigMap that is copied, with its digest, at admission."""

    config_map: str = ""
    """Name of a ConfigMap in the job's namespace. Default empty: files come from the image or the volume."""
    items: list[FileItem] = Field(default=[])
    """Keys to use. Default empty: all, under their own names."""


class SandboxPodSpec(Section):
    """The pods of machines."""

    template: Opaque = Field(default={})
    """Pod template of every machine, for everything that has no field here: ``runtimeClassName``, ``nodeSelector``,
    ``tolerations``, labels for Kueue, …"""


class SandboxesSpec(Section):
    """The machines of samples: each sample has one, from its first command to the end of its group."""

    provider: Literal["process", "container", "pods", "agentSandbox"] = "process"
    """``process``: a folder of the run and Linux namespaces around each command, without root, a container runtime or
    a network; for tasks without an image. ``container``: a container of podman or docker on the machine of ``plaudit
    run``. ``pods``: pods of the job's namespace, on Kubernetes alone, which one process of the job makes and holds.
    ``agentSandbox``: such pods, which the controller of Agent Sandbox makes for claims, where the cluster has it.
    Default process."""
    image: str = ""
    """For every provider but ``process``: image of tasks that name none and have no ``environment/Dockerfile``. Default
    empty: such tasks are refused."""
    registry: str = "localhost"
    """For every provider but ``process``: where ``plaudit images-of`` has put the images of tasks. Default
    localhost."""
    network: Literal["none", "public"] = "none"
    """For every provider but ``process``: the widest network that a task may ask for. Default none."""
    max_concurrent: int = Field(default=16, ge=1, le=10_000)
    """With pods (``pods``, ``agentSandbox``): machines of the whole run; a sample waits, in order of arrival, until one
    is free. Otherwise the commands that one rollout, and the tests that one reward worker, runs at the same time. Time
    limits begin after the wait. Default 16."""
    warm: int = Field(default=0, ge=0, le=10_000)
    """With pods: machines kept ready, within ``maxConcurrent``, for each image that the admitted prompts need next.
    Default 0: a machine is started when its sample begins."""
    pod: SandboxPodSpec = SandboxPodSpec()
    """The pods of machines, where they are pods."""
    memory: str = Field(default="2Gi", pattern=BYTE_QUANTITY)
    """Most memory of a machine; a task that asks for less gets less. Default 2Gi, as Harbor's tasks."""
    disk: str = Field(default="10Gi", pattern=BYTE_QUANTITY)
    """Most disk of a machine; a task that asks for less gets less. Default 10Gi, as Harbor's tasks."""
    keep: Literal["none", "failed", "all"] = "none"
    """For every provider but ``container``: machines whose files stay in the run's folder (``kept-sandboxes``) when
    their group ends, for ``plaudit rescore``. ``failed``: those of samples whose tests gave no reward. Default none."""

    @property
    def are_pods(self) -> bool:
        """Return True if machines are pods of Kubernetes."""
        return self.provider in ("pods", "agentSandbox")

    @property
    def memory_bytes(self) -> int:
        """Return ``memory`` as a number."""
        return int(quantity(self.memory))

    @property
    def disk_bytes(self) -> int:
        """Return ``disk`` as a number."""
        return int(quantity(self.disk))


class CheckpointSpec(Section):
    """Checkpoints to resume from: model, optimizer, data cursor and ledger, in the run's folder."""

    every_steps: int = Field(default=10, ge=1)
    """Steps between two checkpoints; the last step always writes one. Default 10: a resume repeats at most ten steps.
    """
    keep: int = Field(default=2, ge=1, le=1000)
    """Number of newest checkpoints to keep. Default 2: one may be being read while the next is written."""
    resume_from: FilePath = ""
    """Folder of another run's checkpoint to start from. Default empty: from ``model.source``, or from this run's own
    newest checkpoint."""


class LoraSpec(Section):
    """Train low-rank adapters beside frozen weights: W x + alpha / rank · B A x, with B = 0 at the start."""

    rank: int = Field(default=32, ge=1, le=512)
    """Rows of A, columns of B. Default 32: about 1 % of a 7B model's parameters, and enough for RL's small updates."""
    alpha: float = Field(default=64.0, gt=0, le=100_000)
    """Scale of the adapters, divided by rank. Default 64: twice the default rank, a usual choice."""
    target_modules: list[str] = Field(default=[])
    """Names of the linear layers that get an adapter, such as ``q_proj``. Default empty: all but the output head."""


class WeightsSpec(Section):
    """How new weights reach the rollouts."""

    transfer: Literal["files", "direct"] = "files"
    """``files``: the trainer writes every version to the run's folder and rollouts read it there; ``direct``: rollouts
    receive it over TCP from the memory of the trainer's ranks, and files are written only for a rollout that cannot.
    Default files: no memory for a second copy of the weights, and no open port."""
    full_every: int = Field(default=1, ge=1, le=1000)
    """With ``transfer: files``, versions from one that is written whole to the next; those between are files of what
    changed since the version before, usually 1 to 5 % of the bytes. Each rank then keeps its file's bytes in host
    memory, and each rollout the whole weights in its temporary folder. Default 1: every version is whole."""


class TrainerSpec(Section):
    """Ranks, their strategy, memory and checkpoints."""

    ranks: int = Field(default=1, ge=1, le=100_000)
    """Processes that share an update, one per GPU. Default 1."""
    ranks_per_pod: int = Field(default=8, ge=1, le=64)
    """Ranks (and GPUs) of one pod, when there are more ranks than this. Default 8: the GPUs of a typical node."""
    strategy: Literal["single", "fsdp2"] = "single"
    """``single``: one process holds everything; ``fsdp2``: parameters and optimizer state are sharded over the ranks.
    Default single: no process group."""
    fsdp_size: int | None = Field(default=None, ge=1, le=100_000)
    """Consecutive ranks over which ``fsdp2`` shards parameters and optimizer state; such groups of ranks are replicas
    of each other (hybrid sharding, HSDP): layers are then gathered within a group, such as the GPUs of a node, and
    only gradients are summed over all. Default: all ranks, which needs the least memory."""
    sequence_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Consecutive ranks that compute each packed row together, each a run of its tokens, so that longer samples fit
    (Ulysses). Must divide the ranks and the model's attention heads. Default 1: each rank computes rows of its own."""
    micro_batch_tokens: int = Field(default=16_384, ge=1, le=100_000_000)
    """Tokens, prompts included, in one forward and backward pass of one rank; bounds activation memory. A longer sample
    gets its own micro-batch. Default 16,384."""
    activation_checkpointing: Literal["auto", "none", "layers", "selective"] = "auto"
    """Compute layers a second time in the backward pass instead of keeping their activations: ``layers`` keeps the
    input of each layer, ``selective`` the output of attention too. Default auto: ``layers`` on GPUs, ``none`` on
    CPUs."""
    activation_offload: bool = False
    """Keep the inputs of layers, which are all that ``activationCheckpointing: layers`` saves, in pinned host memory
    between the forward and the backward pass. No effect on CPUs. Default false: no copies over PCIe."""
    cpu_offload: bool = False
    """Keep each rank's parameters, gradients and optimizer state in host memory (FSDP2's CPU offload): layers are
    copied to the GPU when they compute, and the update runs on the CPU. Requires several ranks. Default false: slower
    by the copies and the update."""
    compile: bool = False
    """Compile each layer but its attention with ``torch.compile``. Default false: a start takes minutes longer."""
    lora: LoraSpec | None = None
    """Train, publish and store low-rank adapters only. Samples in progress then finish under the adapter that began
    them. Default: all weights are trained."""
    weights: WeightsSpec = WeightsSpec()
    """How new weights reach the rollouts."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints to resume from."""
    sinks: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default=[])
    """Where the metrics of each step are logged, besides ``steps.jsonl``. Default none."""
    pod: PodSpec = PodSpec()
    """Pods of the trainer."""

    @property
    def shards(self) -> int:
        """Return the number of ranks that hold a copy of the parameters together."""
        return min(self.fsdp_size or self.ranks, self.ranks)

    @property
    def pods(self) -> int:
        """Return the number of pods of one attempt."""
        return max(1, self.ranks // self.ranks_per_pod)


API_VERSION = "plaudit.dev/v1alpha1"
_MOST_ADAPTERS = 8
_CONTROLLER = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9._~]*[A-Za-z0-9])?)?$"
TRAINING_SECTIONS = ("model", "data", "algorithm", "rollout", "trainer")
"""Sections of which a job has all or none: a job without them only scores samples that others submit."""


class Spec(Section):
    """The specification of the job."""

    suspend: Annotated[bool, MUTABLE] = False
    """Release all GPUs and workers, keep Redis and volumes; false resumes from the checkpoint. Kubernetes only. Default
    false."""
    managed_by: str = Field(default="", max_length=63, pattern=_CONTROLLER)
    """Controller of the job, as a domain and a path, such as ``kueue.x-k8s.io/multikueue``. The operator ignores a job
    of another controller than ``plaudit.dev/rljob-operator``, and writes nothing into its status. Kubernetes only.
    Default empty: the operator."""
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    """Seed of every random choice: data order, sampling, weights of new layers. Default 1."""
    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_construct(source=""))
    """The policy. Required unless the job only scores."""
    data: DataSpec = Field(
        default_factory=lambda: DataSpec.model_construct(train=TrainDataSpec.model_construct(path=""))
    )
    """Prompts. Required unless the job only scores."""
    algorithm: AlgorithmSpec = Field(default_factory=lambda: AlgorithmSpec.model_construct(steps=0))
    """Steps, schedule, loss. Required unless the job only scores."""
    rollout: RolloutSpec = RolloutSpec()
    """The generating workers. Required (``rollout: {}`` will do) unless the job only scores."""
    reward: RewardSpec
    """Scorers and their combination."""
    trainer: TrainerSpec = TrainerSpec()
    """The training processes. Required (``trainer: {}`` will do) unless the job only scores."""
    environments: list[EnvironmentServerSpec] = Field(default=[], max_length=16)
    """Servers that agents and scorers use, such as sandboxes. Default none."""
    sandboxes: SandboxesSpec = SandboxesSpec()
    """Machines of samples, for tools and agents with ``sandbox`` and scorers of kind ``verifier``."""
    transport: TransportSpec = TransportSpec()
    """The Redis between the processes."""
    storage: StorageSpec = StorageSpec()
    """The shared volume."""
    files: FilesSpec = FilesSpec()
    """Files that travel with the job."""
    metrics: MetricsSpec = MetricsSpec()
    """Objectives, traces and stored samples."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Queue, gang, priority."""
    lifecycle: Annotated[LifecycleSpec, MUTABLE] = LifecycleSpec()
    """Deadlines and cleanup."""

    @property
    def trains(self) -> bool:
        """Return True for a job that generates and trains, False for a reward service."""
        return not self.model_fields_set.isdisjoint({"rollout", "trainer"})

    @property
    def uses_sandboxes(self) -> bool:
        """Return True if samples have machines: for their tools, or for the tests of their tasks."""
        agent = self.rollout.agent
        of_tools = agent.kind in ("tools", "environment") and any(tool.sandbox for tool in agent.tools)
        return self.trains and (of_tools or (agent.kind in ("environment", "endpoint") and agent.sandbox))

    @property
    def has_broker(self) -> bool:
        """Return True if a process of the job makes and holds the machines of all others."""
        return self.uses_sandboxes and self.sandboxes.are_pods

    @property
    def programs_in_pods(self) -> bool:
        """Return True if agents' programs ask rollouts for their turns over the cluster's network."""
        return self.has_broker and self.rollout.agent.kind == "endpoint"

    @property
    def takes_turns(self) -> bool:
        """Return True if rollouts or served models free their GPUs while the trainer updates."""
        return self.trains and (self.rollout.sleep_during_updates or self.reward.sleeping_models)

    @property
    def adapters_at_once(self) -> int:
        """Return the number of adapters that an engine holds: of all versions that samples may have, at most 8."""
        return min(self.algorithm.max_staleness + 2, _MOST_ADAPTERS)

    @model_validator(mode="before")
    @classmethod
    def _one_sample_is_enough_for_one(cls, written: object) -> object:
        """Default ``minSamplesPerGroup`` to 1 where a group has one sample."""
        if not isinstance(written, dict):
            return written
        algorithm, reward = written.get("algorithm"), written.get("reward")
        if not isinstance(algorithm, dict) or not isinstance(reward, dict):
            return written
        given = {"minSamplesPerGroup", "min_samples_per_group"} & reward.keys()
        if given or algorithm.get("samplesPerPrompt", algorithm.get("samples_per_prompt")) != 1:
            return written
        return {**written, "reward": {**reward, "minSamplesPerGroup": 1}}


class RLJob(Section):
    """A job: name and specification."""

    api_version: Literal["plaudit.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["RLJob"]
    """Kind of the document."""
    metadata: Metadata
    """The job's name."""
    spec: Spec
    """The specification of the job."""
