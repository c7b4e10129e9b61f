"""What a sandbox and its fork servers say to each other; frames are those of ``isolation.messages``."""

from __future__ import annotations

from typing import Literal

import msgspec

from plaudit_reward.code.sandbox.limits import Limits

Ending = Literal[
    "finished", "raised", "exited", "crashed", "time limit", "memory limit", "output limit", "thread limit", "killed"
]
"""How a run ended: ``exited`` is an exit code other than 0, ``crashed`` a signal of its own doing (a segmentation
fault), ``killed`` a SIGKILL that the sandbox did not send: the machine is out of memory."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """First of all; answered by ``Ready`` or ``Unable``. From the sandbox."""

    allow_without_landlock: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Programs can be run. From the fork server."""

    landlock_abi: int
    """0: without Landlock no file can be opened."""


class Unable(msgspec.Struct, frozen=True, tag=True):
    """This machine cannot lock programs up; ``message`` says why and what to do. From the fork server."""

    message: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run a program once. From the sandbox."""

    source: str
    """The program's text."""
    stdin: str = ""
    """What it can read; of a function, its arguments: one JSON text a line."""
    function: str | None = None
    """Call this function (or method of a class ``Solution``) instead of running the text as a program."""
    as_script: bool = False
    """Run the text as ``python program.py`` would, not as verl does; see ``program``."""
    limits: Limits = Limits()


class Ran(msgspec.Struct, frozen=True, tag=True):
    """How it went. From the fork server."""

    ending: Ending
    stdout: bytes = b""
    """What it printed; of a function, its result as ``values`` writes it."""
    reason: str = ""
    """The last line on standard error, where it did not finish."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """The most memory it had at a time."""


FromServer = Ready | Unable | Ran
ToServer = Prepare | Run
