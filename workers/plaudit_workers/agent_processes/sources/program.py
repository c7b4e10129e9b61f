"""Load a program that holds conversations over HTTP: a command, or a function that takes the prompt.

A function may return a reward. Its file is imported once, in the template; the command is started anew for each sample.
"""

from __future__ import annotations

import operator
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plaudit_reward.functions.user_file import import_user_file
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.messages import Program


@dataclass(frozen=True)
class RunnableProgram:
    """Hold either a function or a command."""

    function: Callable[[dict[str, Any]], Any] | None = None
    command: list[str] = field(default_factory=list)


def load_program(source: Program) -> RunnableProgram:
    """Import the function, or find the command.

    Raises:
        ConfigurationError: the function or the program is missing.
    """
    if source.function:
        return RunnableProgram(_function(source))
    command = [*(source.command or [sys.executable]), *([os.path.abspath(source.path)] if source.path else [])]
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"command: there is no program {command[0]!r}; give a name on PATH or an absolute path"
        )
    return RunnableProgram(command=command)


def _function(source: Program) -> Callable[[dict[str, Any]], Any]:
    module = import_user_file(source.path, "agent file")
    try:
        found = operator.attrgetter(source.function)(module)
    except AttributeError:
        found = None
    if not callable(found):
        raise ConfigurationError(f"{source.path} has no function {source.function!r}")
    function: Callable[[dict[str, Any]], Any] = found
    return function
