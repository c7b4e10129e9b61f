"""Run a child process: load one user function and run it until its pool closes the connection.

Started as ``python -m plaudit_reward.isolation.child <file descriptor> <parent's process id>`` by ``process``. Its
standard output and error are a pipe to the pool. It ends with its parent, however that one ends.
"""

from __future__ import annotations

import faulthandler
import io
import os
import socket
import sys

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.isolation.child.lifetime import end_when_closed, end_with
from plaudit_reward.isolation.child.sequential import run_sequential
from plaudit_reward.isolation.child.threads import run_threads
from plaudit_reward.isolation.messages import Channel, FunctionLoaded, FunctionRefused, LoadFunction
from plaudit_wire.errors import ConfigurationError


def main() -> int:
    """Load the function, report, run works."""
    end_with(int(sys.argv[2]))
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the last lines of a killed function are logged
    connection = socket.socket(fileno=int(sys.argv[1]))
    end_when_closed(connection)
    channel = Channel(connection)
    (load,) = channel.receive()
    if not isinstance(load, LoadFunction):
        raise TypeError(f"the first message must be Load, not {type(load).__name__}")
    try:
        _run(load, channel)
    except ConfigurationError as error:
        channel.send([FunctionRefused(str(error))])
        return 2
    except EOFError:
        pass
    return 0


def _run(load: LoadFunction, channel: Channel) -> None:
    function = UserFunction(load.target)
    if function.is_async:
        from plaudit_reward.isolation.child.event_loop import run_async  # asyncio takes 30 ms to import

        run_async(function, channel)
        return
    description = function.prepare()
    channel.send([FunctionLoaded(description)])
    if description.isolation == "thread":
        run_threads(function, channel, load.slots)
    else:
        run_sequential(function, channel)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the user's file must not keep the process alive
