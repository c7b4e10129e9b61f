"""The examples' jobs, rewards and data, without running a job (tests/e2e does)."""

import asyncio
import random
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit_job.load import load_job
from plaudit_workers.launch.checks import check_files
from plaudit_workers.launch.code_checks import ignored, unsupported
from plaudit_workers.launch.data_checks import check_data

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("01-copy-digits", "02-verl-reward", "03-slow-rewards", "04-judge")


def script(name: str, file: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name / file))


@pytest.mark.parametrize("name", NAMES)
def test_an_examples_job_runs_as_it_is(name: str) -> None:
    job = load_job(EXAMPLES / name / "job.yaml")
    assert list(unsupported(job)) == []
    assert ignored(job) == []


def test_the_demo_has_the_measured_hyperparameters() -> None:
    spec = load_job(EXAMPLES / "01-copy-digits" / "job.yaml").spec
    algorithm, optimizer = spec.algorithm, spec.algorithm.optimizer
    assert (algorithm.steps, algorithm.prompts_per_step, algorithm.samples_per_prompt) == (150, 16, 16)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.beta1, optimizer.beta2) == (1e-3, 0, 0.9, 0.95)
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.28)
    assert (algorithm.loss.entropy_coefficient, optimizer.max_grad_norm) == (0.03, 1)


def test_prepare_writes_all_that_the_job_needs_to_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "03-slow-rewards"  # runs the script of 01-copy-digits
    script = str(EXAMPLES / name / "prepare.py")
    monkeypatch.setattr(sys, "argv", [script, "--folder", str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    for file in ("job.yaml", "reward.py"):
        shutil.copy(EXAMPLES / name / file, tmp_path)
    job = load_job(tmp_path / "job.yaml")
    assert [*check_files(job), *check_data(job).problems] == []


@pytest.mark.parametrize("name", ["01-copy-digits", "02-verl-reward"])
def test_rows_are_the_same_each_time(name: str) -> None:
    row = script(name, "prepare.py")["row"]
    assert [row("train", i, random.Random(5)) for i in range(3)] == [
        row("train", i, random.Random(5)) for i in range(3)
    ]
    assert row("train", 0, random.Random(5)) != row("train", 0, random.Random(6))


def test_every_character_of_the_word_problems_is_in_the_vocabulary() -> None:
    names = script("02-verl-reward", "prepare.py")
    draw = random.Random(0)
    texts = [names["row"]("train", i, draw)["prompt"][0]["content"] for i in range(200)]
    assert set("".join(texts)) <= set(names["SYMBOLS"])


@pytest.mark.parametrize(("written", "score"), [("314159", 1.0), ("314", 0.5), ("", 0.0), ("999999", 1 / 6)])
def test_copying_is_rewarded_by_the_share_of_right_digits(written: str, score: float) -> None:
    assert script("01-copy-digits", "reward.py")["compute_score"]("", written, "314159") == pytest.approx(score)


@pytest.mark.parametrize(
    ("written", "arguments", "score"),
    [
        ("so #### 7", {}, 1.0),
        ("so #### 1,007", {"ground_truth": "1007"}, 1.0),
        ("so 7", {}, 0.0),
        ("so 7", {"method": "flexible"}, 1.0),
        ("so 8", {"method": "flexible", "format_score": 0.1}, 0.1),
        ("no number", {"method": "flexible", "format_score": 0.1}, 0.0),
    ],
)
def test_the_verl_reward_scores_like_verls_gsm8k(written: str, arguments: dict[str, Any], score: float) -> None:
    ground_truth = arguments.pop("ground_truth", "7")
    assert script("02-verl-reward", "reward.py")["compute_score"]("", written, ground_truth, **arguments) == score


def test_delays_are_uniform_and_the_same_for_the_same_sample() -> None:
    names = script("03-slow-rewards", "reward.py")
    delays = [names["delay_s"]("123456", {"index": index}, 0.05) for index in range(2000)]
    assert all(0.05 <= delay <= 2.0 for delay in delays)
    assert sum(delays) / len(delays) == pytest.approx(0.05 * 20.5, rel=0.05)
    assert delays[0] == names["delay_s"]("123456", {"index": 0}, 0.05)
    score = names["compute_score"]("", "314", "314159", {"index": 0}, scale=0.0)
    assert asyncio.run(score) == 0.5


def test_the_four_strategies_differ_in_two_fields(tmp_path: Path) -> None:
    files = script("03-slow-rewards", "compare.py")["write_jobs"](tmp_path)
    jobs = {name: yaml.safe_load(file.read_text()) for name, file in files.items()}
    pairs = {
        name: (job["spec"]["algorithm"].pop("maxStaleness"), job["spec"]["algorithm"].pop("miniBatchesPerStep"))
        for name, job in jobs.items()
    }
    assert pairs == {"barrier": (0, 1), "mini-batches": (0, 4), "one-step-off": (1, 1), "both": (1, 4)}
    assert all(job == jobs["barrier"] for job in jobs.values())
    for file in files.values():
        load_job(file)
