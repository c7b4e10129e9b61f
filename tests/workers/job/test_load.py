"""Job files: what is no job file is refused in one sentence; defaults fill a short one; paths become absolute."""

from collections.abc import Callable
from pathlib import Path

import pytest

from builders import job_document
from plaudit_job.load import load_job, locate, parse_job, read_job
from plaudit_job.problem import JobError, Problem
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Sampling
from plaudit_workers.launch.data_checks import check_data
from plaudit_workers.training.state import RunPlan
from small_job import SMALL_JOB, changed

BILLION_LAUGHS = "a0: &a0 x\na:\n" + "".join(f" - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))


def test_a_short_job_is_filled_with_defaults(write_job: Callable[..., Path]) -> None:
    spec = load_job(write_job(SMALL_JOB)).spec
    assert spec.trains
    assert spec.algorithm.samples_per_prompt == 8
    assert spec.rollout.engine.kind == "vllm"
    assert spec.reward.on_failure == "mask"
    assert spec.reward.min_samples_per_group == 2
    assert spec.reward.scorers[0].python.function == "compute_score"
    assert spec.trainer.checkpoint.every_steps == 10
    assert spec.data.validation is None


def test_jobs_share_the_sections_that_neither_of_them_writes(write_job: Callable[..., Path]) -> None:
    first, second = (load_job(write_job(SMALL_JOB)).spec for _ in range(2))
    assert first.lifecycle is second.lifecycle
    assert first.transport is second.transport
    assert first.reward == second.reward
    assert first.reward is not second.reward


def test_groups_of_one_need_one_sample() -> None:
    job = parse_job(changed({"algorithm.samplesPerPrompt": 1, "algorithm.advantage": "reinforcePlusPlus"}))
    assert job.spec.reward.min_samples_per_group == 1


def test_a_job_with_rewards_alone_is_valid_and_does_not_train() -> None:
    job = parse_job(job_document(reward={"scorers": [{"name": "gsm8k", "kind": "rule"}]}))
    assert not job.spec.trains


def test_a_job_can_be_built_in_python_by_its_python_names() -> None:
    scorers = [{"name": "a", "kind": "rule"}]
    job = RLJob(
        api_version="plaudit.dev/v1alpha1",
        kind="RLJob",
        metadata={"name": "a"},
        spec={"reward": {"scorers": scorers, "min_samples_per_group": 1}},
    )
    assert job.spec.reward.min_samples_per_group == 1


def test_validation_uses_the_length_of_training_by_default() -> None:
    own = {"minP": 0.1, "repetitionPenalty": 1.2, "minTokens": 3}
    given = {"data.validation": {"path": "v.jsonl", "sampling": own}, "rollout.sampling": {"maxTokens": 7}}
    plan = RunPlan.from_job(parse_job(changed(given)))
    assert plan.validation is not None
    sampling = plan.validation.sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 7)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.1, 1.2, 3)
    assert plan.sampling == Sampling(max_tokens=7)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "the file is empty"),
        ("- a\n- b\n", None, "the file contains a list instead of a mapping"),
        ("just words", None, "the file contains a single value instead of a mapping"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not valid YAML"),
        ("a: 1\na: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: \x07", None, "not valid YAML"),
        ("a: 1\nb:\n- 2026-99-99\n", 3, "'2026-99-99' cannot be read (month must be in 1..12)"),
        ("a: 1\nb: " + "9" * 6000, 2, "cannot be read (Exceeds the limit"),
        ("a: 1\nb: !!bool maybe\n", 2, "'maybe' cannot be read ('maybe')"),
        (BILLION_LAUGHS, 1, "is larger than 4 Mi characters"),
        ("a: " + "[" * 5000, 1, "nested more than 64 levels deep"),
        ("a: 1\nb: [1, " + "9" * 40 + "]\n", 2, "is an integer beyond 64 bits"),
        ("a: 1\n? {b: {c: 1}}\n: 2\n", 2, "a mapping or a list stands where a key should"),
        ("a: 1\nb: {[1, [2]]: 2}\n", 2, "a mapping or a list stands where a key should"),
        ('a: 1\n"[": ' + "9" * 40 + "\n", 2, "is an integer beyond 64 bits"),
        ('a: 1\n"b[x].]": {"[-1]": ' + "9" * 40 + "}\n", None, "is an integer beyond 64 bits"),
        ("- " * 5000, None, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_job_is_reported_in_one_sentence(
    write_job: Callable[..., Path], text: str, line: int | None, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        load_job(write_job(text))
    (problem,) = caught.value.problems
    assert problem.line == line
    assert words in problem.message


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (
        ("absent.yaml", "no such file"),
        (".", "cannot read it"),
        ("binary.yaml", "not UTF-8 text"),
    ):
        with pytest.raises(JobError, match=words):
            load_job(tmp_path / name)


def test_a_bad_job_is_a_refusal_like_any_other() -> None:
    assert issubclass(JobError, RefusedError)


def test_paths_become_absolute_beside_the_job_file(write_job: Callable[..., Path], tmp_path: Path) -> None:
    fields = {
        "model.tokenizer": "../tokenizer",
        "data.validation": {"path": "/volume/test.jsonl"},
        "reward.combine": {"kind": "python", "path": "lib/c.py", "function": "f"},
        "trainer.checkpoint": {"resumeFrom": "old/step-1"},
        "rollout.agent": {"kind": "endpoint", "command": ["venv/bin/python", "-u"], "path": "agent.py"},
        "environments": [{"name": "box", "command": ["python", "servers/box.py", "box.toml", "--fast"]}],
    }
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "box.py").touch()
    spec = load_job(write_job(changed(fields))).spec
    assert spec.model.source == str(tmp_path / "model")
    assert spec.model.tokenizer == str(tmp_path.parent / "tokenizer")
    assert spec.data.train.path == str(tmp_path / "data/train.parquet")
    assert spec.data.validation.path == "/volume/test.jsonl"
    assert spec.reward.scorers[0].python.path == str(tmp_path / "reward.py")
    assert spec.reward.combine.path == str(tmp_path / "lib/c.py")
    assert spec.trainer.checkpoint.resume_from == str(tmp_path / "old/step-1")
    assert spec.rollout.agent.command == [str(tmp_path / "venv/bin/python"), "-u"]
    assert spec.rollout.agent.path == str(tmp_path / "agent.py")
    # Of a command's arguments only those that name a file: others may mean anything.
    assert spec.environments[0].command == ["python", str(tmp_path / "servers/box.py"), "box.toml", "--fast"]


def test_a_path_of_a_user_that_this_machine_lacks_is_beside_the_job_file(
    write_job: Callable[..., Path], tmp_path: Path
) -> None:
    spec = load_job(write_job(changed({"model.tokenizer": "~no-such-user/tokenizer"}))).spec
    assert spec.model.tokenizer == str(tmp_path / "~no-such-user/tokenizer")


def test_a_command_whose_program_is_no_text_is_refused_by_name(write_job: Callable[..., Path]) -> None:
    server = {"name": "box", "command": [{"./serve.sh": None}]}
    with pytest.raises(JobError, match=r"environments\[0\]\.command\[0\]: \{'./serve.sh': None\} is not text"):
        load_job(write_job(changed({"environments": [server]})))


def test_a_source_is_a_hub_id_unless_it_looks_like_a_path_or_is_one(
    write_job: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "beside").mkdir()
    for written, expected in (
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("./model", str(tmp_path / "model")),
        ("beside", str(tmp_path / "beside")),
        ("/models/m", "/models/m"),
    ):
        assert load_job(write_job(changed({"model.source": written}))).spec.model.source == expected


def test_paths_stay_as_written_for_kubernetes(write_job: Callable[..., Path]) -> None:
    assert read_job(write_job(SMALL_JOB)).spec.model.source == "./model"


def test_problems_found_later_get_the_lines_of_their_fields(write_job: Callable[..., Path]) -> None:
    path = write_job(SMALL_JOB)
    fields = ["spec.data.train.path", "spec.reward.scorers[0].python.path", "spec.storage.claimName", ""]
    located = locate([Problem(field, "", "") for field in fields], path)
    assert [problem.line for problem in located] == [8, 13, 5, None]


def test_what_is_too_long_for_a_file_name_is_no_path(write_job: Callable[..., Path]) -> None:
    program = "print('a server')\n" * 100
    fields = {
        "environments": [{"name": "box", "command": ["python", "-c", program]}],
        "data.train": {"path": "a" * 300},
    }
    job = load_job(write_job(changed(fields)))
    assert job.spec.environments[0].command == ["python", "-c", program]
    assert "spec.data.train.path" in {problem.field for problem in check_data(job, ["spec.model"]).problems}
