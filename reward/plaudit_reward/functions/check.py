"""Check a reward file before anything starts.

A child process (``python -m plaudit_reward.functions.check``) imports the file, because an import can do anything. No
instance of a class is made, since that may take a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from plaudit_reward.functions.function import UserFunction, function_environment
from plaudit_reward.functions.result import Target
from plaudit_wire.errors import ConfigurationError

IMPORTED_WITHIN_S = 60.0
"""A longer import is stopped, and the function stays unchecked."""


class CheckResult(msgspec.Struct, frozen=True):
    """Hold the result of checking one function."""

    problem: str | None = None
    """File, function, argument and remedy; None for a function that can be called."""
    columns: tuple[str, ...] = ()
    """Columns of the data that the function requires (TRL's form)."""
    timed_out: bool = False
    """The import took longer than a minute and was stopped; the workers will import the file without a limit."""


def check(target: Target) -> CheckResult:
    """Import a function's file in a child process and compare its signature with the job's arguments."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "plaudit_reward.functions.check"],
            input=msgspec.json.encode(target),
            capture_output=True,
            env=function_environment(os.environ),
            timeout=IMPORTED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CheckResult(timed_out=True)
    try:
        return msgspec.json.decode(done.stdout, type=CheckResult)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        return CheckResult(
            f"importing {target.path} ended its process (exit status {done.returncode}; {last}): a reward file must "
            "survive its own import"
        )


def _main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # the file may print; only the report goes to standard output
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    try:
        report = CheckResult(columns=UserFunction(target).check())
    except ConfigurationError as error:
        report = CheckResult(str(error))
    os.write(answer, msgspec.json.encode(report))
    os._exit(0)  # do not wait for threads that the file has started


if __name__ == "__main__":
    _main()
