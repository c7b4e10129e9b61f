"""Confine one program's process, run the program, exit. The template process calls it after a fork."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import msgspec

from plaudit_reward.code.sandbox.confinement import landlock
from plaudit_reward.code.sandbox.confinement.seccomp import architecture, filter_program, install, prctl
from plaudit_reward.code.sandbox.limits import limit_this_process
from plaudit_reward.code.sandbox.messages import RunProgram
from plaudit_reward.code.sandbox.program import run_program

RAISED = 1
"""Exit code when the program raised."""
CONFINED = b"\x06"
"""Comes first on standard error, when the process is confined and the program begins."""

_PR_SET_PDEATHSIG = 1
_RULESET = 3
"""File descriptor of Landlock's ruleset while all others are closed."""
_REASON_CHARACTERS = 300

_decoder = msgspec.msgpack.Decoder(RunProgram)


def run_and_leave(task: int, streams: tuple[int, int, int], ruleset: int | None, template: int) -> NoReturn:
    """Run the program in this process, then exit.

    Args:
        task: file with the ``RunProgram``.
        ruleset: of Landlock; None where the kernel has none.
    """
    code = RAISED
    try:
        run = read_task(task)
        _confine(run, streams, ruleset, template)
        os.write(2, CONFINED)
        run_program(run)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) and ended.code else RAISED
    except BaseException as error:
        _report(error)
    finally:
        os._exit(code & 0xFF)  # whatever happens, a program must not return into the template's code


def read_task(task: int) -> RunProgram:
    """Read the program from the file that ``supervision`` wrote."""
    with open(task, "rb") as file:
        return _decoder.decode(file.read())


def _confine(run: RunProgram, streams: tuple[int, int, int], ruleset: int | None, template: int) -> None:
    """Take away everything a program could use against others; the template has given up all privileges before."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template:
        os._exit(RAISED)  # it ended before the line above
    os.setsid()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    if ruleset is not None:
        os.dup2(ruleset, _RULESET)
    os.closerange(3 if ruleset is None else _RULESET + 1, os.sysconf("SC_OPEN_MAX"))
    limit_this_process(run.limits)
    if ruleset is not None:
        landlock.restrict(_RULESET)
        os.close(_RULESET)
    os.environ.clear()
    sys.argv = ["program.py"]
    install(filter_program(architecture(), os.getpid(), opens=ruleset is not None))


def _report(error: BaseException) -> None:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the program's own __str__
        text = type(error).__name__
    line = " ".join(text.split())[:_REASON_CHARACTERS]
    try:
        os.write(2, f"\n{line}".encode(errors="replace"))
    except OSError:
        return  # it closed its standard error
