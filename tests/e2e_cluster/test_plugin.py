"""``kubectl plaudit`` as a user runs it: kubectl finds the plugin, and the cluster responds."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import Cluster

NAMESPACE = "plugin"
JOB = {
    "apiVersion": "plaudit.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "scores", "namespace": NAMESPACE},
    "spec": {
        "reward": {"scorers": [{"name": "gsm8k", "kind": "rule", "rule": "gsm8k"}]},
        "transport": {"managed": {"memory": "256Mi", "storage": "1Gi"}},
    },
}


@pytest.fixture(scope="module")
def plaudit(installed: Cluster) -> Iterator[Cluster]:
    """A cluster with a service that scores, and the plugin on PATH."""
    before = installed.environment["PATH"]
    installed.environment["PATH"] = f"{before}:{Path(sys.executable).parent}"
    installed.kubectl("create", "namespace", NAMESPACE, check=False)
    assert installed.apply(JOB).returncode == 0
    installed.until("running", lambda: phase(installed) == "Running")
    yield installed
    installed.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    installed.environment["PATH"] = before


def phase(cluster: Cluster) -> str:
    return str(cluster.get("rlj", "scores", NAMESPACE).get("status", {}).get("phase", ""))


def test_status_tells_roles_and_events(plaudit: Cluster):
    said = plaudit.kubectl("plaudit", "status", "scores", "-n", NAMESPACE).stdout
    assert said.startswith("scores   Running")
    assert "transport   1/1" in said
    assert "Admitted" in said


def test_status_without_a_name_lists_jobs(plaudit: Cluster):
    assert "scores" in plaudit.kubectl("plaudit", "-n", NAMESPACE, "status").stdout


def test_log_lines_carry_their_pod(plaudit: Cluster):
    said = plaudit.kubectl("plaudit", "logs", "scores", "reward", "-n", NAMESPACE, "--since", "1h").stdout
    assert "[pod/scores-reward-" in said
    everybody = plaudit.kubectl("plaudit", "logs", "scores", "-n", NAMESPACE).stdout
    assert "[pod/scores-metrics-" in everybody
    assert "[pod/scores-redis-0/redis]" in everybody


def test_logs_of_a_missing_role_are_refused_with_the_reason(plaudit: Cluster):
    done = plaudit.kubectl("plaudit", "logs", "scores", "trainer", "-n", NAMESPACE, check=False)
    assert done.returncode == 1
    assert "has no ready trainer pods" in done.stderr


def test_an_unknown_job_lists_those_there(plaudit: Cluster):
    for command in ("status", "logs", "open", "top", "suspend"):
        done = plaudit.kubectl("plaudit", command, "nobody", "-n", NAMESPACE, check=False)
        assert done.returncode == 1
        assert "Jobs in it: scores (Running)" in done.stderr


def test_open_serves_the_metrics_page_here(plaudit: Cluster):
    port = "19464"
    command = ["kubectl", "plaudit", "open", "scores", "-n", NAMESPACE, "--port", port]
    with subprocess.Popen(command, env=plaudit.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as forward:
        try:
            page = plaudit.until("the page", lambda: answer(f"http://127.0.0.1:{port}/"))
        finally:
            forward.terminate()
    assert "<title>" in page


def answer(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=3) as page:
            text: str = page.read().decode()
            return text
    except OSError:
        return ""


def test_top_draws_one_frame_without_a_terminal(plaudit: Cluster):
    said = plaudit.kubectl("plaudit", "top", "scores", "-n", NAMESPACE).stdout
    assert "a scoring service" in said
    assert "reward" in said


def test_suspend_and_resume(plaudit: Cluster):
    said = plaudit.kubectl("plaudit", "suspend", "scores", "-n", NAMESPACE).stdout
    assert said.startswith("scores is suspended")
    plaudit.until("suspended", lambda: phase(plaudit) == "Suspended")

    def said_to_have_none() -> bool:  # pods that are ending have logs still
        done = plaudit.kubectl("plaudit", "logs", "scores", "reward", "-n", NAMESPACE, check=False)
        return "is Suspended and has no ready reward pods" in done.stderr

    plaudit.until("no reward pods", said_to_have_none)
    assert plaudit.kubectl("plaudit", "resume", "scores", "-n", NAMESPACE).stdout.startswith("scores is resumed")
    plaudit.until("running", lambda: phase(plaudit) == "Running")


def test_an_unreachable_cluster_is_reported_in_kubectls_message(plaudit: Cluster, tmp_path: Path):
    empty = tmp_path / "kubeconfig"
    empty.write_text("apiVersion: v1\nkind: Config\n")
    options = ["status", "scores", "--kubeconfig", str(empty)]
    done = subprocess.run(
        [sys.executable, "-m", "plaudit_operator.plugin", *options],
        env={**plaudit.environment, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kubectl plaudit: ")
