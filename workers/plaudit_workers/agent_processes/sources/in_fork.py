"""Run a function in a fork, where it may open connections and threads: the template, which forks, must not have any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agent_processes.sources.user_code import error_text

Result = TypeVar("Result")


def in_fork(function: Callable[[], Result]) -> Result:
    """Return what a function returned in a fork; it must consist of msgpack's types.

    Raises:
        ConfigurationError: it raised, or its process ended.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        with contextlib.suppress(BaseException), os.fdopen(write_end, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(_outcome(function)))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    result, problem = msgspec.msgpack.decode(data) if data else (None, "its process ended")
    if problem:
        raise ConfigurationError(problem)
    return cast(Result, result)


def first_cause(error: BaseException) -> str:
    """Return the first cause in a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error_text(error)


def _outcome(function: Callable[[], Result]) -> tuple[Result | None, str]:
    try:
        return function(), ""
    except ConfigurationError as error:
        return None, str(error)
    except BaseException as error:  # the user's code, or a client's group of exceptions
        return None, first_cause(error)
