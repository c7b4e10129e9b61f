"""``plaudit run --resume``: which run, what may differ, and a run that has finished."""

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from plaudit_job.problem import JobError
from plaudit_metrics.sources.steps import RunEnding, write_ending
from plaudit_wire.errors import RefusedError
from plaudit_workers.cli import main
from plaudit_workers.data_facts import DataFacts, FactsOfRows, FileFacts
from plaudit_workers.data_files import checked_rows
from plaudit_workers.launch.preflight import RunLock, prepare


def job_file(folder: Path, **algorithm: Any) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    (folder / "train.jsonl").write_text(
        '{"prompt": "2 + 2", "reward_model": {"ground_truth": "4"}, "data_source": "sums"}\n'
    )
    spec = {
        "model": {"source": "./model"},
        "data": {"train": {"path": "train.jsonl"}},
        "algorithm": {"steps": 10, "promptsPerStep": 1, "samplesPerPrompt": 8, **algorithm},
        "rollout": {"engine": {"kind": "scripted"}},
        "reward": {"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}]},
        "trainer": {},
    }
    job = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


class Prepared:
    """Calls ``prepare`` as the command line does; keeps what it printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""

    def __call__(self, run: str | None = None, **options: Any) -> Path | None:
        stream = io.StringIO()
        arguments = argparse.Namespace(
            **{"job": self.folder / "job.yaml", "runs_folder": str(self.folder / "runs"), "run": run, "steps": None}
            | {"address": None, "resume": False, "accept_changes": False, "accept_data_change": False, **options}
        )
        try:
            with contextlib.ExitStack() as stack:
                prepared = prepare(arguments, Console(file=stream, width=200), stack)
        finally:
            self.printed = stream.getvalue()
        return prepared.folder if prepared else None


@pytest.fixture
def run(tmp_path: Path) -> Prepared:
    job_file(tmp_path)
    return Prepared(tmp_path)


def test_what_this_machine_lacks_is_a_problem_of_its_field_and_leaves_no_folder(
    run: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's name would be taken by one that never began."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        service = {"url": "http://127.0.0.1:9", "tokenSecret": {"name": "shared", "key": "token"}}
        reward = {"scorers": [{"name": "s", "kind": "service", "service": service}], "gateway": {"port": port}}
        job = yaml.safe_load((run.folder / "job.yaml").read_text()) | {"spec": {"reward": reward}}
        (run.folder / "job.yaml").write_text(yaml.safe_dump(job))
        with pytest.raises(JobError) as refusal:
            run("mine")
    assert "scorers[0].service.tokenSecret: key 'token' of Secret 'shared' has no value" in str(refusal.value)
    assert f"spec.reward.gateway.port: {port} is in use on this machine. Stop what listens on it" in str(refusal.value)
    assert main(["validate", str(run.folder / "job.yaml")]) == 0
    assert "note: spec.reward.scorers[0].service.tokenSecret: key 'token'" in capsys.readouterr().out
    assert not (run.folder / "runs").exists()
    monkeypatch.setenv("PLAUDIT_SECRET_SHARED_TOKEN", "x")
    assert run("mine") is not None


def test_a_run_that_was_refused_before_it_began_leaves_its_name_free(run: Prepared) -> None:
    folder = run("mine")
    assert folder is not None
    with pytest.raises(RefusedError, match="holds a run already"):
        run("mine")
    write_ending(folder, RunEnding(2, "no room", 0.0))
    (folder / "redis").mkdir()
    assert run("mine") == folder
    assert not (folder / "redis").exists()
    (folder / "service.json").write_text("{}")
    with pytest.raises(RefusedError, match="holds a run already"):
        run("mine")


def checkpoint(folder: Path, step: int, incarnation: int = 1) -> None:
    path = folder / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step, "extra": {"step": step, "incarnation": incarnation}}))


def test_a_resumed_run_prints_the_step_it_continues_from(run: Prepared) -> None:
    folder = run("j-1")
    assert folder is not None
    checkpoint(folder, 12)  # of a trainer that was replaced
    checkpoint(folder, 9, incarnation=2)
    assert run(resume=True, steps=20) == folder
    assert "run j-1: continuing after step 9 of 20" in run.printed
    assert "changed: spec.algorithm.steps: 10 → 20" in run.printed


def test_a_finished_run_is_reported_and_nothing_is_started(run: Prepared) -> None:
    folder = run("j-1")
    assert folder is not None
    checkpoint(folder, 10)
    assert run(resume=True) is None
    assert "run j-1 has finished its 10 steps. To train further, set a larger --steps" in run.printed


def test_a_change_of_meaning_is_shown_and_has_to_be_accepted(run: Prepared) -> None:
    folder = run("j-1")
    assert folder is not None
    before = (folder / "job.yaml").read_text()
    job_file(run.folder, samplesPerPrompt=4)
    with pytest.raises(RefusedError, match=r"spec\.algorithm\.samplesPerPrompt changed.*--accept-changes"):
        run(resume=True)
    assert "changed: spec.algorithm.samplesPerPrompt: 8 → 4" in run.printed
    assert (folder / "job.yaml").read_text() == before
    assert run(resume=True, accept_changes=True) == folder
    assert "samplesPerPrompt: 4" in (folder / "job.yaml").read_text()


def test_another_model_cannot_be_accepted(run: Prepared) -> None:
    run("j-1")
    job = yaml.safe_load((run.folder / "job.yaml").read_text())
    job["spec"]["seed"] = 7
    (run.folder / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(RefusedError, match=r"--resume: spec\.seed: \d+ → 7 differs"):
        run(resume=True, accept_changes=True)


def test_a_run_is_resumed_by_the_job_it_is_of_whatever_its_name(run: Prepared) -> None:
    """Another job's name may begin with this one's, as those of its runs then do."""
    mine = run("chosen")
    job = yaml.safe_load((run.folder / "job.yaml").read_text())
    (run.folder / "job.yaml").write_text(yaml.safe_dump(job | {"metadata": {"name": "j-2", "labels": {"name": "j"}}}))
    other = run()
    assert other is not None
    assert other.name.startswith("j-2-")
    (run.folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert run(resume=True) == mine


def test_the_newest_run_that_closed_a_step_is_resumed(run: Prepared) -> None:
    older, closed, newest = run("j-1"), run("j-2"), run("j-3")
    assert older
    assert closed
    assert newest
    for age, folder in enumerate((newest, closed, older)):
        os.utime(folder / "job.yaml", (1000 - age, 1000 - age))
    assert run(resume=True) == newest
    for folder, time in ((older, 10), (closed, 20)):
        (folder / "steps.jsonl").write_text("{}\n")
        os.utime(folder / "steps.jsonl", (time, time))
    assert run(resume=True) == closed


def test_a_broken_field_hides_no_problem_of_the_files(run: Prepared) -> None:
    job = yaml.safe_load(job_file(run.folder).read_text())
    job["spec"]["algorithm"]["stpes"] = 3
    (run.folder / "train.jsonl").write_text('{"answer": 4}\n')
    (run.folder / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(JobError) as refused:
        run()
    assert {problem.field for problem in refused.value.problems} >= {"spec.algorithm.stpes", "spec.data.train.path"}


HOLDER = """
import sys, time
from pathlib import Path
from plaudit_workers.launch.preflight import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.show("http://127.0.0.1:8710/")
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_one_program_holds_the_folder_of_a_run_until_it_ends_however_it_ends(
    run: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run()
    assert folder is not None
    before = (folder / "job.yaml").read_bytes()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        held = (
            rf"run {folder.name} is running \(pid {holder.pid} on .*, http://127\.0\.0\.1:8710/\); stop it there first"
        )
        job_file(run.folder, steps=3)
        with pytest.raises(RefusedError, match=held):
            run(resume=True)
        assert (folder / "job.yaml").read_bytes() == before
        job, output = str(run.folder / "job.yaml"), folder / "again.jsonl"
        (folder / "samples" / "step-000001-i1.parquet").touch()
        assert main(["rescore", str(folder), "--job", job, "-o", str(output)]) == 2
        assert "stop it there first" in capsys.readouterr().err
        os.kill(holder.pid, signal.SIGKILL)
    finally:
        holder.kill()
        holder.communicate()
    assert run(resume=True) == folder
    with RunLock(folder):
        pass


NOBODY = "http://127.0.0.1:1"
AWAY = f"{NOBODY} accepts no connection from this machine (Connection refused)"


def test_data_that_only_the_runs_own_server_has_is_compared_by_the_trainer(run: Prepared, tmp_path: Path) -> None:
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())
    job["spec"]["data"]["train"] = {"split": "train"}
    job["spec"]["environments"] = [{"name": "board", "command": ["board"], "readiness": {"path": "/health"}}]
    job["spec"]["rollout"]["agent"] = {"kind": "environment", "environment": "board"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    folder = run("j-first")
    assert folder is not None
    (folder / "checkpoints" / "step-000002").mkdir()
    facts = DataFacts([FileFacts(str(folder / "tasks-train.jsonl"), 12, "0")])
    extra = {"incarnation": 1, "step": 2, "data": facts.plain()}
    (folder / "checkpoints" / "step-000002" / "state.json").write_text(json.dumps({"extra": extra}))
    assert run(resume=True) == folder


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    before = DataFacts([FileFacts("/d/a/train.jsonl", 10, "0"), FileFacts("/d/b/train.jsonl", 10, "1")])
    after = DataFacts([FileFacts("/d/a/train.jsonl", 10, "2"), FileFacts("/d/b/train.jsonl", 10, "1")])
    assert after.changes_since(before) == ["/d/a/train.jsonl has other contents in its 10 rows"]


def test_a_run_waits_for_no_agents_server_and_names_a_scorers(run: Prepared, tmp_path: Path) -> None:
    text = (tmp_path / "job.yaml").read_text()
    job = yaml.safe_load(text)
    job["spec"]["reward"]["scorers"].append({"name": "b", "kind": "http", "http": {"url": NOBODY, "shape": "plaudit"}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert run("j-first") is not None
    assert f"spec.reward.scorers[1].http.url: {AWAY}" in run.printed
    job["spec"]["rollout"]["agent"] = {"kind": "tools", "tools": [{"mcp": {"url": NOBODY}}]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(JobError) as refused:
        run("j-second")
    (problem,) = refused.value.problems
    assert (problem.field, problem.message) == ("spec.rollout.agent.tools[0].mcp.url", AWAY)
    assert run("j-third", address="auto") is not None  # the cluster's nodes may reach it
    assert NOBODY not in run.printed


def test_changed_data_is_refused_until_it_is_accepted(run: Prepared, tmp_path: Path) -> None:
    folder = run("j-first")
    assert folder is not None
    data = tmp_path / "train.jsonl"
    facts = FactsOfRows()
    for row in checked_rows(data):
        facts.add(row)
    checkpoint = folder / "checkpoints" / "step-000002"
    checkpoint.mkdir()
    extra = {"incarnation": 1, "step": 2, "data": facts.facts().plain()}
    (checkpoint / "state.json").write_text(json.dumps({"extra": extra}))
    assert run(resume=True) == folder
    data.write_text(data.read_text().replace("2 + 2", "3 + 1"))
    with pytest.raises(RefusedError, match=r"train\.jsonl has other contents in its 1 rows.*--accept-data-change"):
        run(resume=True)
    assert run(resume=True, accept_data_change=True) == folder
    assert "changed data: train.jsonl has other contents" in run.printed
    assert run(resume=True) == folder
