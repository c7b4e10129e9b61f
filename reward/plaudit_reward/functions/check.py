"""Whether a reward file can be used as a job says, told before anything starts: ``problem_of``.

The file is imported in a child process (``python -m plaudit_reward.functions.check``), for it may do anything; an
instance of a class is not made, since that may take a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from plaudit_reward.errors import ConfigurationError
from plaudit_reward.functions.function import UserFunction
from plaudit_reward.functions.target import Target

_IMPORTED_WITHIN_S = 60.0


def problem_of(target: Target) -> str | None:
    """What is wrong with a function in a file: file, function, argument and remedy; None when nothing is.

    A file that takes longer than a minute to import is left to the workers, which say the same.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "plaudit_reward.functions.check"],
            input=msgspec.json.encode(target),
            capture_output=True,
            timeout=_IMPORTED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    try:
        found: str | None = msgspec.json.decode(done.stdout, type=str | None)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        return (
            f"importing {target.path} ended its process (exit status {done.returncode}; {last}): a reward file must "
            "survive its own import"
        )
    return found


def _main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # what the file prints is no answer
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    found: str | None = None
    try:
        UserFunction(target).check()
    except ConfigurationError as error:
        found = str(error)
    os.write(answer, msgspec.json.encode(found))
    os._exit(0)  # threads that the file has started are not waited for


if __name__ == "__main__":
    _main()
