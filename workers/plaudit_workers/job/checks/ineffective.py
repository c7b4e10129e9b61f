"""Find fields that change nothing, because of the values of others: notes of ``plaudit validate``."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.algorithm import LOSS_KINDS, AlgorithmSpec, LossSpec, OptimizerSpec
from plaudit_workers.job.spec.rljob import RLJob

_LOSS = "spec.algorithm.loss"
_OF_WEIGHTS = {
    "correction_cap": "correctionCap",
    "correction_floor": "correctionFloor",
    "correction_level": "correctionLevel",
}


def without_effect(job: RLJob) -> list[Problem]:
    """Return fields that change nothing, because of the values of others."""
    if not job.spec.trains:
        return []
    algorithm = job.spec.algorithm
    return [
        *_clip(algorithm),
        *_dual_clip(algorithm.loss),
        *_correction(algorithm.loss),
        *_kl(algorithm.loss),
        *_rate(algorithm.optimizer),
    ]


def _clip(algorithm: AlgorithmSpec) -> Iterator[Problem]:
    correction = algorithm.loss.correction
    if algorithm.loss.kind == "python" or correction == "none" or algorithm.updates_per_step > 1:
        return
    yield Problem(
        f"{_LOSS}.correction",
        f"with {correction} and one update a step the ratio is 1: clipLow, clipHigh and clipRatioC change nothing",
        "Set miniBatchesPerStep or epochs above 1, or correction to none, for a clip that acts",
        also=("spec.algorithm.miniBatchesPerStep",),
    )


def _dual_clip(loss: LossSpec) -> Iterator[Problem]:
    if loss.kind == "python" or LOSS_KINDS[loss.kind].dual_clip:
        return
    if "clip_ratio_c" in loss.model_fields_set:
        others = " or ".join(kind for kind, traits in LOSS_KINDS.items() if traits.dual_clip)
        yield Problem(
            f"{_LOSS}.clipRatioC",
            f"kind {loss.kind} has no dual clip: {loss.clip_ratio_c:g} changes nothing",
            f"Remove it, or set kind to {others}",
            also=(f"{_LOSS}.kind",),
        )


def _correction(loss: LossSpec) -> Iterator[Problem]:
    if loss.correction != "none":
        return
    for name, written in _OF_WEIGHTS.items():
        if name in loss.model_fields_set:
            yield Problem(
                f"{_LOSS}.{written}",
                f"correction none has no importance weights: {getattr(loss, name)} changes nothing",
                "Remove it, or set correction to tis, decoupled or reject",
                also=(f"{_LOSS}.correction",),
            )


def _kl(loss: LossSpec) -> Iterator[Problem]:
    if loss.kl_importance_weight and not loss.has_kl_term:
        yield Problem(
            f"{_LOSS}.klImportanceWeight",
            f"klCoefficient {loss.kl_coefficient:g} and klIn {loss.kl_in} give the loss no term of the divergence: it "
            "changes nothing",
            "Set klCoefficient with klIn: loss, or remove it",
            also=(f"{_LOSS}.klCoefficient", f"{_LOSS}.klIn"),
        )


def _rate(optimizer: OptimizerSpec) -> Iterator[Problem]:
    if optimizer.schedule == "constant" and "min_rate_share" in optimizer.model_fields_set:
        yield Problem(
            "spec.algorithm.optimizer.minRateShare",
            f"with schedule constant the rate does not fall: {optimizer.min_rate_share:g} changes nothing",
            "Remove it, or set schedule to linear or cosine",
            also=("spec.algorithm.optimizer.schedule",),
        )
