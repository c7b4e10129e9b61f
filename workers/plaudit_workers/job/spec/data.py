"""``spec.data``: prompts for training and validation."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from plaudit_workers.job.spec.rollout import SamplingSpec
from plaudit_workers.job.spec.section import FilePath, Section


class PassRateSpec(Section):
    """Leave out prompts that a model always or never solved, by a share that was measured before the run."""

    field: str = Field(default="pass_rate", min_length=1)
    """The number in ``extra_info`` of each row, from 0 to 1. Default pass_rate."""
    min: float = Field(default=0.0, ge=0, le=1)
    """Rows below it are left out. Default 0: none."""
    max: float = Field(default=1.0, ge=0, le=1)
    """Rows above it are left out. Default 1: none."""

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, so no prompt is left; exchange them")
        return self


class SkipSolvedSpec(Section):
    """Skip prompts that this run has always solved."""

    threshold: float = 1.0
    """A group solves its prompt if its mean reward is at least this. Default 1: all samples have the full reward."""
    min_visits: int = Field(default=2, ge=1, le=1000)
    """A prompt is skipped once so many groups have solved it and none has not. Default 2: one may be luck."""


class TrainDataSpec(Section):
    """The prompts of training."""

    path: FilePath = Field(min_length=1)
    """A ``.parquet`` or ``.jsonl`` file in verl's columns: ``data_source``, ``prompt`` (messages or text),
    ``reward_model.ground_truth``, ``extra_info``; with ``data.images`` also ``images``."""
    shuffle: bool = True
    """Shuffle for every epoch, from ``spec.seed``. Default true: files are often sorted by source or difficulty."""
    max_prompt_length: int = Field(default=1024, ge=1, le=1_000_000)
    """Tokens; longer prompts (chat template applied) are left out and counted. Default 1,024, as in verl; with
    ``rollout.sampling.maxTokens`` it must fit into ``rollout.engine.maxModelLength``."""
    pass_rate: PassRateSpec | None = None
    """Train only prompts of a measured difficulty. Default: all."""
    skip_solved: SkipSolvedSpec | None = None
    """Skip prompts that this run has always solved. Default: none is skipped."""


class ValidationSamplingSpec(Section):
    """The sampling of validation samples."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 takes the likeliest token. Default 0: repeated validations give the same answers."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this. Default 1: all."""
    top_k: int = Field(default=-1, ge=-1)
    """The k likeliest tokens. Default -1: all."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The most tokens of a response. Default: ``rollout.sampling.maxTokens``."""

    def filled_from(self, training: SamplingSpec) -> SamplingSpec:
        """Return the sampling of validation, with the response length of training where none is given."""
        return SamplingSpec(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens or training.max_tokens,
            stop=training.stop,
        )


class ValidationDataSpec(Section):
    """Prompts that are scored at intervals and never trained."""

    path: FilePath = Field(min_length=1)
    """A ``.parquet`` or ``.jsonl`` file in the same columns as the training data."""
    every_steps: int = Field(default=20, ge=1)
    """Steps between two validations; the first is before step 1, the last after the last step. Default 20: a few per
    cent of the work with usual data sizes."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Samples of each prompt. Default 1: enough at temperature 0."""
    sampling: ValidationSamplingSpec = ValidationSamplingSpec()
    """Their sampling."""


class ImagesSpec(Section):
    """Images in prompts, for a model with a vision tower such as Qwen2.5-VL."""

    max_per_prompt: int = Field(default=4, ge=1, le=64)
    """The most images of a prompt; a row with more is refused. Default 4. Rollouts are built for as many."""
    max_pixels: int | None = Field(default=None, ge=3136, le=67_108_864)
    """The model's processor scales larger images down to so many pixels; each takes fewer tokens then. Default: the
    limit in the processor's own configuration."""


class DataSpec(Section):
    """Training prompts and, optionally, validation prompts."""

    train: TrainDataSpec
    """The training data."""
    images: ImagesSpec | None = None
    """Read verl's column ``images``, and train a model with a vision tower. Default: prompts are text, and files with
    this column are refused."""
    validation: ValidationDataSpec | None = None
    """The validation data. Default: none."""
