"""Jobs, groups and batches with images, for the tests of trainer and rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from builders import job_document
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.images import ImageProcessor
from plaudit_workers.tokenizer import ChatTemplate
from plaudit_workers.training.data import PromptData
from plaudit_workers.training.model.batch import TrainingBatch, TrainingSequence
from plaudit_workers.training.prompts import PromptRenderer
from plaudit_workers.training.state import PromptRow
from tiny_vision import mixed_rows, write_rows


def vision_job(source: Path, folder: Path, **sections: Any) -> RLJob:
    """A job on four rows: one image, two, none, one that is scaled down."""
    path = folder / "train.parquet"
    if not path.exists():
        write_rows(path, mixed_rows())
    spec = {
        "model": {"source": str(source), "dtype": "float32"},
        "data": {"train": {"path": str(path), "shuffle": False, "maxPromptLength": 256}, "images": {}},
        "algorithm": {"steps": 4, "optimizer": {"learningRate": 3e-3}},
        "rollout": {"sampling": {"maxTokens": 12}, "engine": {"maxModelLength": 512}},
        "reward": {"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}]},
        "trainer": {"microBatchTokens": 256},
    }
    return RLJob.model_validate(job_document(**(spec | sections)))


def opened(job: RLJob, folder: Path) -> tuple[ImageProcessor, list[PromptRow]]:
    """The job's processor with its images stored in a run's folder, and its prompts."""
    images = ImageProcessor.of_job(job, folder)
    assert images is not None
    template = ChatTemplate.of_model(job.spec.model, [])
    images.give_template(template, job.spec.model)
    data = PromptData.for_training(job.spec.data, PromptRenderer(template, images), 1)
    return images, [data.prompt_at(number) for number in range(len(data))]


def sequence(
    images: ImageProcessor, row: PromptRow, response: Sequence[int], logprobs: Sequence[float], advantage: float = 1.0
) -> TrainingSequence:
    """A response to a prompt, to train on."""
    return TrainingSequence(
        group=f"t-{row.row}",
        index=0,
        prompt_ids=images.expand(np.frombuffer(row.prompt_ids, "<i4"), row.images),
        response_ids=np.array(response, np.int32),
        behaviour_logprobs=np.array(logprobs, np.float32),
        loss_mask=np.ones(len(response), np.bool_),
        advantage=advantage,
        version_spans=((0, PolicyVersion(1, 0)),),
        images=row.images,
    )


def random_batch(images: ImageProcessor, rows: Sequence[PromptRow], seed: int, copies: int = 2) -> TrainingBatch:
    """Random responses of several lengths to the prompts, of which some contain the token of an image."""
    random = np.random.default_rng(seed)
    sequences = []
    for number, row in enumerate([*rows] * copies):
        response = random.integers(0, 40, int(random.integers(3, 12)))
        if number % 3 == 0:
            response[1] = images.token_id
        advantage = float(random.normal())
        sequences.append(sequence(images, row, response.tolist(), [-3.0] * len(response), advantage))
    return TrainingBatch(tuple(sequences), 1.0, {})
