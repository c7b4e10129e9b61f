"""One pass tells all that is wrong, each problem once and with its line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from plaudit_job.load import load_job
from plaudit_job.problem import JobError, Problem
from small_job import SMALL_JOB, changed, problems_of

BAD = """\
apiVersion: plaudit.dev/v1
kind: RLJob
metadata: {name: Digits}
spec:
  seed:
  model: {source: ./model}
  data: {train: {path: d.parquet}}
  algorithm:
    stepz: 3
    promptsPerStep: 10
    miniBatchesPerStep: 4
    loss:
      clipLow: 7
  rollout: {engine: {kind: vllm, tensorParallel: 2}}
  reward:
    scorers:
      - {name: a, kind: rule}
      - kind: rule
      - {name: a, kind: rule, weight: heavy}
    minSamplesPerGroup: 99
  trainer: {ranks: 3}
"""


def test_problems_of_every_kind_come_in_the_order_of_the_file(write_job: Callable[..., Path]) -> None:
    path = write_job(BAD)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert [(problem.line, problem.field) for problem in caught.value.problems] == [
        (1, "apiVersion"),
        (3, "metadata.name"),
        (5, "spec.seed"),
        (9, "spec.algorithm.stepz"),
        (10, "spec.algorithm.promptsPerStep"),
        (13, "spec.algorithm.loss.clipLow"),
        (14, "spec.rollout.engine.tensorParallel"),
        (18, "spec.reward.scorers[1].name"),
        (19, "spec.reward.scorers[2].weight"),
        (19, "spec.reward.scorers[2].name"),
        (20, "spec.reward.minSamplesPerGroup"),
        (21, "spec.trainer.strategy"),
    ]
    assert str(caught.value).splitlines()[1].startswith(f"{path}:3: metadata.name: 'Digits' is not a valid name. ")


def test_rules_about_a_broken_field_are_not_guessed_at() -> None:
    # The default of 64 prompts could not be divided by 7 either, but nobody wrote 64.
    job = changed({"algorithm.promptsPerStep": "many", "algorithm.miniBatchesPerStep": 7})
    assert [problem.field for problem in problems_of(job)] == ["spec.algorithm.promptsPerStep"]


def test_an_empty_spec_reports_only_missing_sections() -> None:
    job = "{apiVersion: plaudit.dev/v1alpha1, kind: RLJob, metadata: {name: a}, spec: {}}"
    assert [str(problem) for problem in problems_of(job)] == ["spec.reward: is missing. Add reward: …"]


@pytest.mark.parametrize(
    "spec", ["[]", "3", "text", "{reward: 3}", "{reward: {scorers: [3]}}", "{reward: {scorers: x}}"]
)
def test_sections_of_the_wrong_shape_are_reported(spec: str) -> None:
    job = f"{{apiVersion: plaudit.dev/v1alpha1, kind: RLJob, metadata: {{name: a}}, spec: {spec}}}"
    assert len(problems_of(job)) == 1


def test_a_null_is_refused_in_any_section_but_kept_in_opaque_ones() -> None:
    scorer = {"name": "a", "kind": "python", "python": {"path": "r.py", "arguments": {"limit": None}}, "when": None}
    problems = problems_of(changed({"reward.scorers": [scorer]}))
    assert [(problem.field, problem.message) for problem in problems] == [
        ("spec.reward.scorers[0].when", "has no value")
    ]


def test_a_valid_job_has_no_problems() -> None:
    assert problems_of(SMALL_JOB) == []


def test_a_mistyped_section_is_one_problem() -> None:
    job = changed({})
    job["spec"]["rewards"] = job["spec"].pop("reward")
    (problem,) = problems_of(job)
    assert str(problem).startswith("spec.rewards: is not a field of this section. Did you mean reward?")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("algorithm.num_generations", "TRL's num_generations is spec.algorithm.samplesPerPrompt here"),
        ("data.train_files", "verl's train_files is spec.data.train.path here (docs/coming-from-verl.md)"),
    ],
)
def test_settings_of_other_trainers_are_answered_by_name(field: str, words: str) -> None:
    (problem,) = problems_of(changed({field: 8}))
    assert words in str(problem)


def test_no_message_ends_in_two_full_stops() -> None:
    assert str(Problem("spec.seed", "is wrong.", "Mend it")) == "spec.seed: is wrong. Mend it"
