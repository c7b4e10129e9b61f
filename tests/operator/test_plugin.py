"""``kubectl plaudit``: what it says of a job, and what it refuses. On a real cluster: tests/e2e_cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plaudit_operator import names
from plaudit_operator.names import Reason
from plaudit_operator.plugin import ended, main, missing_pods, summary, unknown_job
from plaudit_wire.printable import printable

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
EARLIER = "2025-12-31T22:00:00Z"


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    words = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**words, "lastTransitionTime": EARLIER}


def job(phase: str, *conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "gsm8k", "uid": "1", "creationTimestamp": EARLIER},
        "spec": {"algorithm": {"steps": 200}},
        "status": {"phase": phase, "conditions": list(conditions), **status},
    }


NO_GPU = condition("RolloutReady", "False", Reason.UNSCHEDULABLE, "rollout 0/2: gsm8k-rollout-x: 0/3 nodes")
FINE = condition("RewardReady", "True", Reason.READY, "reward 4/4")


def test_the_summary_tells_progress_roles_trouble_and_events():
    progress = {"step": 42, "rewardMean": 0.61234, "verdict": "reward", "backlog": 117}
    roles = [{"name": "rollout", "ready": 0, "desired": 2, "restarts": 3, "lastFailure": "out of memory"}]
    events = [
        {"metadata": {}, "lastTimestamp": EARLIER, "type": "Warning", "reason": "Degraded", "message": "so it is"}
    ]
    said = summary(job("Running", NO_GPU, FINE, progress=progress, roles=roles, run="gsm8k-1"), events, NOW)
    head, run, _, _, rollout, _, trouble, *_ = said.splitlines()
    progressed = "step 42 of 200   reward 0.612   waiting for reward   117 samples unscored"
    assert head == f"gsm8k   Running   {progressed}   2h old"
    assert run == "run gsm8k-1"
    assert rollout.split(maxsplit=3) == ["rollout", "0/2", "3", "out of memory"]
    assert trouble == "RolloutReady Unschedulable (2h): rollout 0/2: gsm8k-rollout-x: 0/3 nodes"
    assert said.splitlines()[-1] == "2h          Warning   Degraded   so it is"
    assert "RewardReady" not in said


def test_a_job_that_no_operator_has_seen_says_so():
    new = {"metadata": {"name": "gsm8k", "creationTimestamp": EARLIER}, "spec": {}}
    assert summary(new, [], NOW) == "gsm8k   not processed by an operator yet   2h old\n"


def test_a_suspended_job_says_it_once():
    roles = [condition(kind, "False", Reason.SUSPENDED_BY_USER) for kind in ("RolloutReady", "RewardReady")]
    suspended = condition("Suspended", "True", Reason.SUSPENDED_BY_USER, "Redis and volumes stay")
    said = summary(job("Suspended", *roles, suspended), [], NOW).splitlines()
    assert said[-1] == "Suspended SuspendedByUser (2h): Redis and volumes stay"
    assert len(said) == 3


def test_a_job_that_ended_shows_only_its_end():
    over = job("Failed", NO_GPU, condition("Failed", "True", Reason.TOO_MANY_RESTARTS, "exit code 1"))
    assert ended(over) == "Failed"
    said = summary(over, [], NOW)
    assert "Failed TooManyRestarts (2h): exit code 1" in said
    assert "Unschedulable" not in said


def test_why_a_role_cannot_be_asked_is_the_reason_of_its_condition():
    assert "rollout 0/2: gsm8k-rollout-x: 0/3 nodes" in missing_pods(job("Starting", NO_GPU), "rollout")
    gone = missing_pods(job("Complete", condition("Complete", "True", Reason.TRAINER_DONE)), "metrics")
    assert "is Complete" in gone
    assert "lifecycle.cleanup" in gone


def test_an_unknown_job_is_refused_with_the_known_names():
    assert unknown_job("gsm", "team-a", [job("Running")]).endswith("Jobs in it: gsm8k (Running)")
    assert "-n NAMESPACE" in unknown_job("gsm", "team-a", [])


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as refused:
        main(["status", "gsm8k"])
    assert "kubectl is not on PATH" in str(refused.value)


@pytest.mark.parametrize("role", names.ROLES)
def test_the_logs_of_each_role_can_be_asked_for(role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "kubectl").write_text('#!/bin/sh\ncase "$1" in get) echo \'{"items": [{}]}\';; *) echo "$@";; esac\n')
    (tmp_path / "kubectl").chmod(0o755)
    command = [sys.executable, "-m", "plaudit_operator.plugin", "logs", "gsm8k", role]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert f"plaudit.dev/role={role} --container {role}" in done.stdout


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["logs", "gsm8k", "driver"], "rollout"),
        (["logs"], "job"),
        (["restart", "gsm8k"], "suspend"),
        (["open", "gsm8k", "--port", "http"], "--port"),
        (["open", "gsm8k", "--port", "0"], "--port: '0' is no number from 1 to 65535"),
        (["top", "gsm8k", "--every", "nan"], "--every: 'nan' is no number from 0.1 to 86400"),
        (["logs", "gsm8k", "--tail", "9" * 5000], "is no number from -1"),
        (["suspend", ""], "'' is no name of a job"),
        (["status", "rlj/gsm8k"], "'rlj/gsm8k' is no name of a job"),
        (["status", "gsm8k", "\x1b[2J"], "unrecognized arguments: \ufffd[2J"),
    ],
)
def test_a_wrong_command_line_is_refused(line: list[str], word: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(line)
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "kubectl get printed no JSON"),
        (b"\xff<html>\x1b[2J", "kubectl get printed no JSON"),
        (b"[" * 100_000, "kubectl get printed no JSON"),
        (b"[]", "an answer of the API server has an unknown form"),
        (b'{"metadata": 5}', "an answer of the API server has an unknown form"),
        (b'{"metadata": {"name": "x", "uid": "u"}, "items": [null]}', "has an unknown form"),
        (b'{"metadata": {"name": "x", "uid": "u"}, "status": {"conditions": 5}, "items": []}', "has an unknown form"),
    ],
)
def test_an_answer_of_another_form_is_one_line(
    answer: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "answer").write_bytes(answer)
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\nexec cat {tmp_path}/answer\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SystemExit) as refused:
        main(["status", "gsm8k"])
    assert words in str(refused.value)
    assert str(refused.value).isprintable()


def test_control_sequences_of_the_cluster_do_not_reach_the_terminal():
    hostile = "\x1b]0;owned\x07\x9b2J\u202e[/x] line one\nline two"
    crashing = job("Running", condition("Degraded", "True", Reason.CRASHING, hostile))
    said = printable(summary(crashing, [], NOW), keep="\n")
    assert all(character.isprintable() or character == "\n" for character in said)
    assert "[/x] line one\nline two" in said
    assert "owned" in said


def test_help_loads_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "plaudit_operator.plugin", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "plaudit_operator" in loaded
    assert not loaded & {"kubernetes", "pydantic", "numpy", "redis", "rich", "urllib3"}
    assert "suspend" in done.stdout
