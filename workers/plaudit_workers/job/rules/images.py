"""Check the fields that ``data.images`` excludes."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import Spec

_FIELD = "spec.data.images"


def image_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what cannot work with images in prompts."""
    if spec.data.images is None:
        return
    trainer, rollout = spec.trainer, spec.rollout
    refused = (
        (
            "spec.rollout.agent.kind",
            rollout.agent.kind != "singleTurn",
            f"is {rollout.agent.kind}: agents continue prompts of text",
            "Set it to singleTurn",
        ),
        (
            "spec.rollout.engine.kind",
            rollout.engine.kind == "scripted",
            "is scripted, which has no processor of images",
            "Set it to vllm",
        ),
        (
            "spec.trainer.lora",
            trainer.lora is not None,
            "trains adapters, which vLLM does not apply to vision towers",
            "Remove it: all weights are trained",
        ),
        (
            "spec.trainer.compile",
            trainer.compile,
            "compiles layers; those of vision towers depend on each image's size",
            "Remove it",
        ),
        (
            "spec.trainer.sequenceParallelSize",
            trainer.sequence_parallel_size > 1,
            f"is {trainer.sequence_parallel_size}: ranks that share a row cannot share its images",
            "Set it to 1, or lower data.images.maxPixels",
        ),
    )
    for field, applies, complaint, remedy in refused:
        if applies:
            message = f"{complaint}, and data.images is set"
            yield Problem(field, message, f"{remedy}, or remove data.images", also=(_FIELD,))
