"""Example 12 as its reader would run it: a model learns to see, is stopped in between, and goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytestmark = pytest.mark.timeout(900)

BLIND = 0.25
"""Mean reward of the best policy that does not see the image: four colours are equally frequent."""


def test_a_model_learns_to_name_the_colour_of_an_image_and_resumes(
    example: Callable[[str], Path], plaudit_run: Callable[..., Any]
) -> None:
    job = example("12-images") / "job.yaml"
    first = plaudit_run(job, "--steps", "6", name="colours")
    assert first.exit_code == 0, first.output
    stored = {path.name: path.read_bytes() for path in (first.folder / "images").glob("*/*")}
    run = plaudit_run(job, "--steps", "30", "--resume", name="colours")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == list(range(1, 31))
    assert run.steps[-1].incarnation > run.steps[0].incarnation
    assert run.steps[0].statistics["reward/mean"] < BLIND
    assert run.mean_reward(last=5) > 2 * BLIND
    for step in run.steps:
        assert step.statistics["actor/logprob_mismatch"] < 1e-4

    assert {path.name for path in (run.folder / "images").glob("*/*")} == stored.keys()
    for file in (run.folder / "samples").glob("*.parquet"):
        for row in pyarrow.parquet.read_table(file).to_pylist():
            assert row["prompt"] == "<bos><|vision_start|><|image_pad|><|vision_end|>?="
            assert row["prompt_tokens"] == 9
            assert len(row["images"]) == 1
            assert row["images"][0] in stored


def test_a_job_whose_images_are_not_read_is_refused_before_it_starts(
    example: Callable[[str], Path], plaudit_run: Callable[..., Any], change_job: Callable[..., Path]
) -> None:
    run = plaudit_run(change_job(example("12-images") / "job.yaml", data__images=None), "--steps", "1")
    assert run.exit_code == 2
    assert "has column images. Set spec.data.images to train a model with a vision tower on them" in run.output
