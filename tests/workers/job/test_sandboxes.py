"""Jobs whose samples have machines: tasks as rows, tools in machines, scorers of kind verifier."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import job_document
from harbor_tasks import write_sum_task
from plaudit_job.load import load_job, parse_job
from plaudit_job.problem import JobError
from plaudit_workers.data_files import RowError, checked_rows
from plaudit_workers.launch.checks import check_files
from plaudit_workers.launch.data_checks import check_data

JOB: dict[str, Any] = job_document(
    "terminal",
    model={"source": "org/model"},
    data={"train": {"tasks": "tasks"}},
    algorithm={"steps": 1},
    rollout={"agent": {"kind": "tools", "tools": [{"sandbox": "bash"}]}},
    reward={"scorers": [{"name": "tests", "kind": "verifier"}]},
    trainer={},
)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    job = copy.deepcopy(JOB)
    change(job["spec"])
    return job


def test_a_job_with_tasks_a_shell_and_a_verifier_is_valid() -> None:
    spec = parse_job(JOB).spec
    assert spec.uses_sandboxes
    assert spec.data.train.source == "tasks"
    assert (spec.sandboxes.memory_bytes, spec.sandboxes.disk_bytes) == (2 << 30, 10 << 30)


def test_a_class_of_an_environment_may_have_the_machine_alone() -> None:
    agent = {"kind": "environment", "path": "/shell.py", "class": "Shell", "sandbox": True}
    assert parse_job(changed(lambda spec: spec["rollout"].update(agent=agent))).spec.uses_sandboxes


def in_machine(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change to a program that runs in the sample's machine."""
    agent = {"kind": "endpoint", "command": ["my-agent", "{instruction}"], "sandbox": True, **changes}
    return lambda spec: spec["rollout"].update(agent=agent)


@pytest.mark.parametrize("provider", ["process", "container", "pods", "agentSandbox"])
def test_a_program_of_an_endpoint_agent_may_run_in_the_machine(provider: str) -> None:
    sandboxes = {"provider": provider, **({} if provider == "process" else {"image": "debian:12"})}
    spec = parse_job(changed(lambda spec: (in_machine()(spec), spec.update(sandboxes=sandboxes)))).spec
    assert (spec.uses_sandboxes, spec.programs_in_pods) == (True, provider in ("pods", "agentSandbox"))


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        (
            in_machine(command=[], path="agent.py"),
            "spec.rollout.agent.sandbox",
            "is for kind environment with class and kind endpoint with command",
        ),
        (
            lambda spec: (
                in_machine()(spec),
                spec["reward"]["scorers"].append({"name": "own", "kind": "environment"}),
            ),
            "spec.rollout.agent.sandbox",
            "what a program prints in the policy's machine is no reward for scorer 'own'",
        ),
        (
            lambda spec: spec["data"]["train"].update(path="a.parquet"),
            "spec.data.train.tasks",
            "is set beside path. Give one of path, mixture, tasks and split",
        ),
        (
            lambda spec: spec["data"].update(columns={"prompt": "question"}),
            "spec.data.columns",
            "is set, but data.train.tasks is no table",
        ),
        (
            lambda spec: spec["data"].update(train={}),
            "spec.data.train.path",
            "is missing. Give one of path, mixture, tasks and split",
        ),
        (
            lambda spec: spec["data"].update(validation={"path": "a.parquet"}),
            "spec.reward.scorers[0].kind",
            "the rows of data.validation.path have no tests",
        ),
        (
            lambda spec: spec["rollout"]["agent"].update(tools=[{"sandbox": "session"}]),
            "spec.rollout.agent.tools[0].sandbox",
            "is session, and no process lives from one command to the next with the provider process",
        ),
        (
            lambda spec: spec["rollout"]["agent"].update(sandbox=True),
            "spec.rollout.agent.sandbox",
            "is for kind environment with class and kind endpoint with command, and the kind is tools",
        ),
        (
            lambda spec: spec["reward"]["scorers"].append({"name": "again", "kind": "verifier"}),
            "spec.reward.scorers[1].kind",
            "is verifier, as reward.scorers[0].kind is, and a sample's tests run once. Remove one of the two",
        ),
        (
            lambda spec: spec["rollout"].update(agent={}),
            "spec.reward.scorers[0].kind",
            "no sample of this job has a machine",
        ),
        (
            lambda spec: [spec.pop(name) for name in ("model", "data", "algorithm", "rollout", "trainer")],
            "spec.reward.scorers[0].kind",
            "no sample of this job has a machine",
        ),
        (
            lambda spec: spec["rollout"]["agent"]["tools"][0].update(config="tools.yaml"),
            "spec.rollout.agent.tools[0]",
            "exactly one of path with function, config, mcp and sandbox",
        ),
        (
            lambda spec: spec.update(sandboxes={"provider": "vm"}),
            "spec.sandboxes.provider",
            "'vm'",
        ),
        (
            lambda spec: spec.update(sandboxes={"provider": "container", "warm": 2}),
            "spec.sandboxes.warm",
            "is 2, which is for pods, and the provider is container",
        ),
        (
            lambda spec: spec.update(sandboxes={"image": "debian:12"}),
            "spec.sandboxes.image",
            "is debian:12, which is for containers and pods, and the provider is process",
        ),
        (
            lambda spec: spec.update(sandboxes={"provider": "container", "keep": "failed"}),
            "spec.sandboxes.keep",
            "containers are not kept",
        ),
        (lambda spec: spec.update(sandboxes={"memory": "much"}), "spec.sandboxes.memory", "number of bytes"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    change: Callable[[dict[str, Any]], object], field: str, text: str
) -> None:
    with pytest.raises(JobError) as refused:
        parse_job(changed(change))
    assert [problem.field for problem in refused.value.problems] == [field]
    assert text in str(refused.value)


def test_tasks_are_rows_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_sum_task(tmp_path / name)
    rows = [numbered.row for numbered in checked_rows(tmp_path)]
    assert [Path(row.extra_info["task"]).name for row in rows] == ["a", "b"]
    assert rows[0].prompt == [{"role": "user", "content": "Write the sum of a and b to sum."}]
    assert len(rows[0].extra_info["digest"]) == 64


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"task.toml": "[environment]\ntpu = 'v5'"}, "task b: task.toml: environment.tpu: TPUs are not supported"),
        ({"instruction.md": " "}, "task b: instruction.md is empty"),
        ({"environment/Dockerfile": "FROM debian"}, "task b needs an image of its environment/Dockerfile"),
        ({"task.toml": "[verifier.env]\nKEY = '${PLAUDIT_UNSET}'"}, "task b: the variable PLAUDIT_UNSET is not set"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_before_the_run(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    write_sum_task(tmp_path / "tasks" / "a")
    write_sum_task(tmp_path / "tasks" / "b")
    for name, content in files.items():
        (tmp_path / "tasks" / "b" / name).write_text(content)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    job = load_job(tmp_path / "job.yaml")
    found = [*check_files(job), *check_data(job, renders=False).problems]
    problems = [each for each in found if each.field == "spec.data.train.tasks"]
    assert len(problems) == 1
    assert complaint in str(problems[0])


def test_a_folder_without_tasks_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"holds no data file.*or a folder of Harbor tasks"):
        list(checked_rows(tmp_path))


def test_tasks_that_could_have_separate_tests_are_noted(tmp_path: Path) -> None:
    written = {"a": "", "b": "artifacts = ['/app/sum']", "c": "artifacts = ['/app/sum']\n[verifier.environment]"}
    for name, config in written.items():
        write_sum_task(tmp_path / "tasks" / name, config=config)
    job = parse_job(changed(lambda spec: spec["data"]["train"].update(tasks=str(tmp_path / "tasks"))))
    notes = [str(note) for note in check_data(job, renders=False).notes]
    assert len(notes) == 1
    assert "1 of 3 tasks name artifacts, but their tests run in the agent's machine (b)" in notes[0]
