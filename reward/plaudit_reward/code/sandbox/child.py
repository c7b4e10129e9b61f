"""One run of one program: locks its process up, runs the program, leaves. Called by the fork server after a fork."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from plaudit_reward.code.sandbox import landlock
from plaudit_reward.code.sandbox.limits import limit_this_process
from plaudit_reward.code.sandbox.messages import Run
from plaudit_reward.code.sandbox.program import run_program
from plaudit_reward.code.sandbox.seccomp import architecture, filter_program, install, prctl

RAISED = 1
"""Exit code of a run whose program raised."""
LOCKED = b"\x06"
"""Comes first on standard error, when the process is locked up and the program begins."""

_PR_SET_PDEATHSIG = 1
_RULESET = 3
"""Where Landlock's ruleset is while everything else is closed."""
_REASON_CHARACTERS = 300


def run_and_leave(run: Run, streams: tuple[int, int, int], ruleset: int | None, server: int) -> NoReturn:
    """Becomes the program.

    Args:
        run: the program.
        streams: file with its input, pipe for what it prints, pipe for what it prints on the side.
        ruleset: of Landlock; None where there is none.
        server: process id of the fork server.
    """
    code = RAISED
    try:
        _lock_up(run, streams, ruleset, server)
        os.write(2, LOCKED)
        run_program(run)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) and ended.code else RAISED
    except BaseException as error:
        _tell(error)
    finally:
        os._exit(code & 0xFF)  # whatever happens, a program must not come back into the fork server


def _lock_up(run: Run, streams: tuple[int, int, int], ruleset: int | None, server: int) -> None:
    """Takes away all that a program could use against anybody; privileges the fork server has given up already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
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


def _tell(error: BaseException) -> None:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the program's own __str__
        text = type(error).__name__
    line = " ".join(text.split())[:_REASON_CHARACTERS]
    try:
        os.write(2, f"\n{line}".encode(errors="replace"))
    except OSError:
        return  # it closed its standard error
