"""The ranks of one pod: numbered across pods, ended together, the first failure's exit code kept."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from plaudit_workers.launch.ranks import environments, run

ENVIRONMENT = {**os.environ, "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


def rank(script: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script)]


def test_ranks_are_numbered_across_pods():
    numbers = [(each["RANK"], each["LOCAL_RANK"]) for each in environments(ENVIRONMENT)]
    assert numbers == [("2", "0"), ("3", "1")]


def test_all_done_is_done(tmp_path: Path):
    assert run(rank(f"open({str(tmp_path)!r} + f'/{{rank}}', 'w')"), ENVIRONMENT) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_the_first_failure_ends_the_others_and_gives_its_code():
    began = time.monotonic()
    assert run(rank("sys.exit(42) if rank == 3 else time.sleep(600)"), ENVIRONMENT) == 42
    assert time.monotonic() - began < 300


def test_a_rank_that_was_killed_counts_as_failed():
    assert run(rank("os.kill(os.getpid(), 9) if rank == 2 else time.sleep(600)"), ENVIRONMENT) == 137


def test_a_stop_is_forwarded_to_every_rank(tmp_path: Path):
    script = rank(
        f"""
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
        open({str(tmp_path)!r} + f'/{{rank}}', 'w')
        time.sleep(600)
        """
    )
    code = f"from plaudit_workers.launch.ranks import run; import os; raise SystemExit(run({script!r}, os.environ))"
    pod = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    pod.terminate()
    assert pod.wait() == 4
