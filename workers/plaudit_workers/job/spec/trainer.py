"""``spec.trainer``: the process group that updates the policy and conducts the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.pod import PodSpec
from plaudit_workers.job.spec.section import FilePath, Section


class CheckpointSpec(Section):
    """What a run can be taken up from: model, optimizer, data cursor, ledger. Kept in the run's folder."""

    every_steps: int = Field(default=10, ge=1)
    """Steps between two checkpoints; the last step always writes one. Default 10: at most ten steps are done again."""
    keep: int = Field(default=2, ge=1, le=1000)
    """Newest checkpoints that stay on disk. Default 2: one may be half read while the next is written."""
    resume_from: FilePath = ""
    """Folder of another run's checkpoint to start from. Default empty: from ``model.source``, or from this run's own
    newest checkpoint."""


class TrainerSpec(Section):
    """Ranks, their strategy, memory and checkpoints."""

    ranks: int = Field(default=1, ge=1, le=100_000)
    """Processes that share the update, one per GPU. Default 1."""
    ranks_per_pod: int = Field(default=8, ge=1, le=64)
    """Ranks of one pod (= its GPUs) when there are more than this. Default 8: the GPUs of a usual node."""
    strategy: Literal["single", "fsdp2"] = "single"
    """``single``: one process holds everything; ``fsdp2``: parameters and optimizer are sharded over the ranks. Default
    single: it needs no process group."""
    micro_batch_tokens: int = Field(default=16_384, ge=1, le=100_000_000)
    """Tokens, prompts included, in one forward and backward pass of one rank; bounds activation memory. A longer sample
    is a micro-batch of its own. Default 16,384."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """What a run can be taken up from."""
    sinks: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default=[])
    """Where the figures of each step go besides ``steps.jsonl``. Default none."""
    pod: PodSpec = PodSpec()
    """Pods of the trainer."""

    @property
    def pods(self) -> int:
        """Pods of one attempt."""
        return max(1, self.ranks // self.ranks_per_pod)
