"""A scoring service as its user starts it: `plaudit run`, `plaudit submit`, the example's loop, Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "07-reward-service"
PLAUDIT = [sys.executable, "-m", "plaudit_workers.cli"]

pytestmark = pytest.mark.timeout(600)


class Service:
    """The running command and what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, output: Path) -> None:
        self.process = process
        self.folder = folder
        self._output = output

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*PLAUDIT, "submit", str(EXAMPLE / "samples.jsonl"), "--runs-folder", str(self.folder.parent)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    runs = tmp_path_factory.mktemp("runs")
    command = [*PLAUDIT, "run", str(EXAMPLE / "job.yaml"), "--runs-folder", str(runs), "--run", "scores"]
    with (runs / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    running = Service(process, runs / "scores", runs / "output")
    while "is ready" not in running.printed:
        assert process.poll() is None, running.printed
        time.sleep(0.1)
    yield running
    if process.poll() is None:
        process.kill()
        process.wait()


def test_a_file_is_scored_in_its_order_and_the_same_command_changes_nothing(service: Service, tmp_path: Path) -> None:
    output = tmp_path / "scores.jsonl"
    done = service.submit("-o", str(output))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["score"] for line in lines] == [1.0, 1.0, pytest.approx(0.1 * 40 / 56)]
    assert set(lines[0]["scorers"]) == {"correct", "brief"}
    again = service.submit("-o", str(output))
    assert (again.returncode, len(output.read_text().splitlines())) == (0, 3)
    assert "already has the scores of all 3 samples" in again.stderr


def test_the_examples_loop_gets_its_rewards(service: Service) -> None:
    command = [sys.executable, str(EXAMPLE / "loop.py"), "--run", "scores", "--runs-folder", str(service.folder.parent)]
    done = subprocess.run([*command, "--steps", "2"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("32 scored") == 2


def test_its_metrics_count_samples_without_steps(service: Service) -> None:
    service.submit()
    wanted = 'plaudit_score_seconds_count{outcome="scored",scorer="brief"}'
    url = re.findall(r"http://127\.0\.0\.1:\d+", service.printed)[0]
    for _ in range(100):
        series = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        if wanted in series:
            break
        time.sleep(0.1)
    assert wanted in series
    assert 'plaudit_samples_total{outcome="scored"} 0.0' not in series
    assert 'plaudit_stage_seconds_count{stage="score"}' in series


def test_ctrl_c_is_its_end(service: Service) -> None:
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(120) == 0, service.printed
    assert "Warning" not in service.printed
    gone = service.submit()
    assert gone.returncode == 2
    assert "cannot be reached" in gone.stderr
