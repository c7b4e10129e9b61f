"""Start a child process on one end of a connection. Used by ``process`` and by the processes of agents."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from plaudit_reward.functions.environment import function_environment


def start_child(module: str) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start a module in a session of its own; return it, our end of its connection and of the pipe that it prints to.

    Its arguments are its end of the connection and our process id.

    Raises:
        OSError: no process can be started (memory, limit of processes).
    """
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            env=function_environment(os.environ),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except OSError:
        ours.close()
        os.close(read_end)
        raise
    finally:
        theirs.close()
        os.close(write_end)
    return process, ours, read_end
