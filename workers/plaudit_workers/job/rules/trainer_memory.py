"""Check the fields of ``trainer`` that move memory to the host."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import Spec


def trainer_memory_problems(spec: Spec) -> Iterator[Problem]:
    """Yield combinations that cannot work."""
    trainer = spec.trainer
    checkpointing = trainer.activation_checkpointing
    if trainer.activation_offload and checkpointing in ("none", "selective"):
        kept = "everything" if checkpointing == "none" else "the output of attention, which cannot be offloaded"
        yield Problem(
            "spec.trainer.activationOffload",
            f"offloads the inputs of layers, but activationCheckpointing {checkpointing} keeps {kept}",
            "Set activationCheckpointing to layers or auto, or remove activationOffload",
            also=("spec.trainer.activationCheckpointing",),
        )
    if trainer.cpu_offload and (trainer.strategy != "fsdp2" or trainer.ranks == 1):
        yield Problem(
            "spec.trainer.cpuOffload",
            f"is FSDP2's, which runs with several ranks; strategy is {trainer.strategy} and ranks is {trainer.ranks}",
            "Set strategy to fsdp2 and ranks to at least 2, or remove cpuOffload",
            also=("spec.trainer.strategy", "spec.trainer.ranks"),
        )
