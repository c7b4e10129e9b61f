"""``spec.data``: prompts to train on and to validate with."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.rollout import SamplingSpec
from plaudit_workers.job.spec.section import FilePath, Section


class TrainDataSpec(Section):
    """The prompts of training."""

    path: FilePath = Field(min_length=1)
    """A ``.parquet`` or ``.jsonl`` file in verl's columns: ``data_source``, ``prompt`` (messages or text),
    ``reward_model.ground_truth``, ``extra_info``."""
    shuffle: bool = True
    """Draw a new order, from ``spec.seed``, each time the data begins anew. Default true: files are often sorted by
    source or difficulty."""
    max_prompt_length: int = Field(default=1024, ge=1, le=1_000_000)
    """Tokens; longer prompts (chat template applied) are left out and counted. Default 1,024: verl's habit; together
    with ``rollout.sampling.maxTokens`` it has to fit ``rollout.engine.maxModelLength``."""


class ValidationSamplingSpec(Section):
    """How validation samples are drawn."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 takes the likeliest token. Default 0: one sample a prompt then says the same each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this. Default 1: all."""
    top_k: int = Field(default=-1, ge=-1)
    """The k likeliest tokens. Default -1: all."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most tokens of a response. Default: ``rollout.sampling.maxTokens``."""

    def over(self, training: SamplingSpec) -> SamplingSpec:
        """The sampling of validation, with what is not said here taken from training."""
        return SamplingSpec(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens or training.max_tokens,
        )


class ValidationDataSpec(Section):
    """Prompts that are scored now and then and never trained on."""

    path: FilePath = Field(min_length=1)
    """A ``.parquet`` or ``.jsonl`` file in the same columns as the training data."""
    every_steps: int = Field(default=20, ge=1)
    """Steps between two validations; the first comes before step 1, the last after the last step. Default 20: a few
    per cent of the work with usual data sizes."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Samples of each prompt. Default 1: enough at temperature 0."""
    sampling: ValidationSamplingSpec = ValidationSamplingSpec()
    """How they are drawn."""


class DataSpec(Section):
    """Training prompts and, if wanted, validation prompts."""

    train: TrainDataSpec
    """What is trained on."""
    validation: ValidationDataSpec | None = None
    """What is measured on the way. Default: nothing."""
