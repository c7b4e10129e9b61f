"""``spec.trainer``: the process group that updates the policy and conducts the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.kubernetes.pod import PodSpec
from plaudit_workers.job.spec.section import FilePath, Section


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
