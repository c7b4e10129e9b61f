"""Reward workers that score programs: one as root, one as an unprivileged user in a restricted container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

import plaudit_job
import plaudit_metrics
import plaudit_reward
import plaudit_sandbox
import plaudit_wire

WORKER = Path(__file__).parent / "worker_program.py"
SECRET = "token-of-the-worker"
NOBODY = 65534


class Worker:
    """A worker process that scores programs."""

    secret = SECRET

    def __init__(self, state: str) -> None:
        python, user = (sys.executable, None) if state == "ROOT" else (python_for_nobody(), nobody())
        parts = [
            Path(part.__file__).parent.parent
            for part in (plaudit_reward, plaudit_metrics, plaudit_sandbox, plaudit_job, plaudit_wire)
        ]
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        self._process = subprocess.Popen(
            [python, "-P", str(WORKER), state],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            cwd="/",
            env={"PYTHONPATH": ":".join([*map(str, parts), packages]), "PLAUDIT_SECRET_JUDGE_KEY": SECRET},
        )
        self.hello = self._read()
        self.pid: int = self.hello["pid"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker is gone: {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def score(self, program: str, stdin: str = "", expected: str = "", limit_s: float = 60.0, **options: Any) -> Any:
        """Scores one program on one test case."""
        return self.score_cases(program, {"inputs": [stdin], "outputs": [expected]}, limit_s, **options)

    def score_cases(self, program: str, ground_truth: Any, limit_s: float = 60.0, **options: Any) -> Any:
        return self.score_response(f"```python\n{program}```", ground_truth, limit_s, **options)

    def score_response(self, response: str, ground_truth: Any, limit_s: float = 60.0, **options: Any) -> Any:
        asked = {"response": response, "ground_truth": ground_truth, "limit_s": limit_s}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asked, "options": {"asScript": True, **options}}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def nobody() -> int | None:
    return NOBODY if os.geteuid() == 0 else None


@cache
@cache
def python_for_nobody() -> str:
    """An interpreter of this version that an unprivileged user may run, with this program."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            reads = f"open({str(WORKER)!r}).close()"
            subprocess.run([path, "-c", reads], check=True, user=nobody(), capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    pytest.skip(f"no {version} that an unprivileged user may run, or this checkout is closed to others")


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[str], Worker]]:
    """Gives the worker of a state; each is started once, and serves all files."""
    with ExitStack() as started:
        yield cache(lambda state: started.enter_context(Worker(state)))


@pytest.fixture(params=["ROOT", "UNPRIVILEGED"])
def worker(request: pytest.FixtureRequest, workers: Callable[[str], Worker]) -> Worker:
    if request.param == "ROOT" and os.geteuid() != 0:
        pytest.skip("this is not root")
    return workers(request.param)


@pytest.fixture(scope="session")
def start_worker() -> Callable[[str], Worker]:
    return Worker
