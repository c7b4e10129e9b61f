"""Messages between a sandbox and its fork servers; frames are those of ``isolation.messages``."""

from __future__ import annotations

from typing import Literal

import msgspec

from plaudit_reward.code.sandbox.limits import ProgramLimits

Ending = Literal[
    "finished", "raised", "exited", "crashed", "time limit", "memory limit", "output limit", "thread limit", "killed"
]
"""The end of a run. ``exited``: with an exit code other than 0. ``crashed``: by a signal. ``killed``: by the kernel for
lack of memory, which its cgroup's counter proves, or before the program began; only this is no fault of the program."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The first message of the sandbox; the answer is ``Ready`` or ``Unable``."""

    allow_without_landlock: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Programs can be run. From the fork server."""


class Unable(msgspec.Struct, frozen=True, tag=True):
    """Programs cannot be confined here; ``message`` has the reason and the remedy. From the fork server."""

    message: str


class RunProgram(msgspec.Struct, frozen=True, tag=True):
    """Run a program once. From the sandbox."""

    source: str
    """The program's text."""
    stdin: str = ""
    """Its standard input; the arguments of a function, one JSON text a line."""
    function: str | None = None
    """Call this function (or method of a class ``Solution``) instead of running the text as a program."""
    as_script: bool = False
    """Run the text as ``python program.py`` does, not as verl does; see ``program``."""
    part: Literal["program", "calls", "evaluation"] = "program"
    """Perform an assert's calls of the program, or evaluate an assert, instead; see ``asserts``."""
    payload: str = ""
    """Input of that part."""
    limits: ProgramLimits = ProgramLimits()


class Ran(msgspec.Struct, frozen=True, tag=True):
    """The end of a run. From the fork server."""

    ending: Ending
    stdout: bytes = b""
    """Its output; the result of a function as ``result`` writes it."""
    reason: str = ""
    """The last line of standard error, when it did not finish."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """The most memory that it used at a time."""


FromServer = Ready | Unable | Ran
ToServer = Prepare | RunProgram
