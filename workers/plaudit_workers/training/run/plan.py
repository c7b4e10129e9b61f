"""Hold the parts of a job that the conductor needs, as plain data: from an ``RLJob``, or by hand in simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from plaudit_wire.messages import Sampling
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.rollout import SamplingSpec
from plaudit_workers.training.run.prompt_order import SolvedRule
from plaudit_workers.training.run.schedule import Schedule


@dataclass(frozen=True)
class ValidationPlan:
    """Hold interval and sampling of validations."""

    every_steps: int
    samples_per_prompt: int
    sampling: Sampling

    def is_due(self, step: int, last_step: int) -> bool:
        """Return True if the policy after ``step`` is validated (0: before the first step)."""
        return step % self.every_steps == 0 or step == last_step


@dataclass(frozen=True)
class RunPlan:
    """Hold the plan of a run."""

    schedule: Schedule
    samples_per_prompt: int
    sampling: Sampling
    seed: int = 1
    validation: ValidationPlan | None = None
    max_validation_in_flight: int = 256
    """Validation groups admitted and not ended, beside the training groups."""
    checkpoint_every_steps: int = 10
    resume_from: str = ""
    """Another run's checkpoint to start from; empty: start from the job's model."""
    rollouts_sleep: bool = False
    """Rollouts free their GPUs while the trainer updates."""
    models_sleep: bool = False
    """Served models do, or some of them."""
    keep_samples: bool = True
    skip_solved: SolvedRule | None = None
    """The prompts that are skipped because the run has always solved them; None: none."""
    retry_pauses_s: tuple[float, ...] = (10.0, 60.0, 300.0)
    """Pauses before the prompts of a step with too many failed scores are admitted again; after the last the job fails.
    """

    @classmethod
    def from_job(cls, job: RLJob) -> Self:
        """Read a resolved job."""
        spec = job.spec
        algorithm = spec.algorithm
        validation, solved = spec.data.validation, spec.data.train.skip_solved
        return cls(
            schedule=Schedule(
                steps=algorithm.steps,
                prompts_per_step=algorithm.prompts_per_step,
                mini_batches_per_step=algorithm.mini_batches_per_step,
                max_staleness=algorithm.max_staleness,
                order=algorithm.order,
                max_failed_share=spec.reward.max_failed_share,
                max_replaced=algorithm.max_replaced,
            ),
            samples_per_prompt=algorithm.samples_per_prompt,
            sampling=_sampling(spec.rollout.sampling),
            seed=spec.seed,
            validation=None
            if validation is None
            else ValidationPlan(
                every_steps=validation.every_steps,
                samples_per_prompt=validation.samples_per_prompt,
                sampling=_sampling(validation.sampling.filled_from(spec.rollout.sampling)),
            ),
            checkpoint_every_steps=spec.trainer.checkpoint.every_steps,
            resume_from=spec.trainer.checkpoint.resume_from,
            rollouts_sleep=spec.rollout.sleep_during_updates,
            models_sleep=spec.reward.sleeping_models,
            keep_samples=spec.metrics.keep_samples,
            skip_solved=None if solved is None else SolvedRule(solved.threshold, solved.min_visits),
        )


def _sampling(section: SamplingSpec) -> Sampling:
    return Sampling(
        max_tokens=section.max_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        stop=list(section.stop),
    )
