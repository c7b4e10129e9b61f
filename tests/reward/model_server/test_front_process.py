"""Two processes, one server: what passes between them, and that neither outlives the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from plaudit_model_server.__main__ import main
from plaudit_workers.launch.redis import free_port
from waiting import runs

PREAMBLE = """
import os, select, signal, sys, time
from plaudit_model_server.batcher import ForwardError
from plaudit_model_server.front_process import with_front

def forward(sequences):
    if not sequences:
        raise RuntimeError("out of memory")
    return [[float(sum(tokens)), float(os.getpid() == main)] for tokens in sequences]

def occupy(device):
    print("weights move:", device, os.getpid() == main, flush=True)

main = os.getpid()
"""


@contextmanager
def started(front: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a front of these lines, which has printed its first line."""
    body = "".join(f"    {line}\n" for line in front.strip().splitlines())
    code = f"{PREAMBLE}\ndef front(forward, occupy, computing):\n{body}\nsys.exit(with_front(front, forward, occupy))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_passes_are_computed_in_the_process_that_has_the_model() -> None:
    with started("print(os.getpid() == main, forward([[1, 2], [3]]))\nreturn 7") as process:
        assert line_of(process) == "False [[3.0, 1.0], [3.0, 1.0]]"
        assert process.wait(60) == 7


def test_weights_move_in_the_process_that_has_the_model() -> None:
    lines = "occupy(False)\noccupy(True)\nprint(forward([[4]]))\nreturn 0"
    with started(lines) as process:
        assert [line_of(process) for _ in range(3)] == [
            "weights move: False True",
            "weights move: True True",
            "[[4.0, 1.0]]",
        ]
        assert process.wait(60) == 0


def test_a_failed_pass_is_reported_and_ends_both_processes() -> None:
    lines = "try:\n    forward([])\nexcept ForwardError as error:\n    print(error)\nforward([[1]])"
    with started(lines) as process:
        assert line_of(process) == "RuntimeError: out of memory"
        assert process.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_end_awaited(number: signal.Signals) -> None:
    lines = """
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("ready", flush=True)
while not stopped: time.sleep(0.01)
print("stopping", flush=True)
print(forward([[4]]), flush=True)
return 0
"""
    with started(lines) as process:
        assert line_of(process) == "ready"
        process.send_signal(number)
        assert [line_of(process), line_of(process)] == ["stopping", "[[4.0, 1.0]]"]
        assert process.wait(60) == 0


def test_a_front_whose_other_process_is_killed_learns_of_it() -> None:
    lines = """
print(os.getpid(), flush=True)
select.select([computing], [], [])
try:
    forward([[1]])
except ForwardError as error:
    print(error, flush=True)
return 0
"""
    with started(lines) as process:
        front = int(line_of(process))
        process.kill()
        assert line_of(process) == "the computing process has ended"
        until(lambda: not runs(front))


def test_a_front_that_is_killed_ends_the_other_process() -> None:
    with started("print(os.getpid(), flush=True)\ntime.sleep(60)") as process:
        os.kill(int(line_of(process)), signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.engines
def test_the_server_ends_when_the_process_with_its_model_is_killed(model_folder: Callable[[str], Path]) -> None:
    command = [
        sys.executable,
        "-m",
        main.__module__,
        "--model",
        str(model_folder("decoder")),
        "--port",
        str(free_port()),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while '"serving"' not in (line := process.stderr.readline()):
            assert line, "it ended"
        [front] = psutil.Process(process.pid).children()
        process.kill()
        until(lambda: not runs(front.pid))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
