"""Run programs in a reward worker's local sandbox, and return how they ended.

It has a few fork servers, each with one program at a time. A fork server that dies is replaced, and its run repeated;
other runs are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from plaudit_reward.code.sandbox.messages import FromServer, Prepare, Ran, Ready, RunProgram, Unable
from plaudit_reward.code.sandbox.oom import num_oom_kills
from plaudit_wire.errors import ConfigurationError, InfrastructureError, WorkerKilledError
from plaudit_wire.frames import frame

_START_WITHIN_S = 60.0
_ANSWER_WITHIN_S = 30.0
"""After the program's time limit; a fork server that is later than this hangs."""
_LOOK_EVERY_S = 0.005
_INHERITED = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
"""Variables that Python may need to start; the others hold the worker's secrets."""

_decoder = msgspec.msgpack.Decoder(list[FromServer])


class Sandbox:
    """Run programs; open it before use.

    Args:
        allow_without_landlock: run programs also where the kernel has no Landlock.
    """

    def __init__(self, processes: int, *, allow_without_landlock: bool = False) -> None:
        self._prepare = Prepare(allow_without_landlock)
        self._servers = [_ForkServer(self._prepare) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_ForkServer] = asyncio.LifoQueue()
        self._tasks: set[asyncio.Task[Ran]] = set()

    async def open(self) -> None:
        """Start the fork servers.

        Raises:
            ConfigurationError: programs cannot be confined on this machine.
            InfrastructureError: no process can be started.
        """
        await asyncio.gather(*(server.start() for server in self._servers))
        for server in self._servers:
            self._free.put_nowait(server)

    async def run(self, run: RunProgram, on_begin: Callable[[], None] = lambda: None) -> Ran:
        """Run a program once, on a free fork server; ``on_begin`` is called when it has one.

        Raises:
            WorkerKilledError: fork servers die, also under a program that is known to be good.
            InfrastructureError: the machine could not run it: it is out of memory, or cannot start processes.
        """
        server = await self._free.get()
        on_begin()
        # A task of its own: a caller that is cancelled must not leave an answer behind for the next one.
        task = asyncio.create_task(self._run_on(server, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ran = await asyncio.shield(task)
        if ran.ending == "killed":
            raise InfrastructureError(f"a program could not be run to its end: {ran.reason}")
        return ran

    async def _run_on(self, server: _ForkServer, run: RunProgram) -> Ran:
        try:
            return await _run_again_when_healthy(server, run)
        finally:
            self._free.put_nowait(server)

    async def close(self) -> None:
        """End all programs and fork servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))


_KNOWN_GOOD = RunProgram("print(6 * 7)", as_script=True)


async def _run_again_when_healthy(server: _ForkServer, run: RunProgram) -> Ran:
    """Run a program; when the fork server dies under it, find out whether the program or the machine is to blame.

    The program is, when a new fork server runs a program that is known to be good, dies again under this one, and the
    kernel has killed nothing for lack of memory.

    Raises:
        WorkerKilledError: the machine is to blame.
        InfrastructureError: no fork server can be started.
    """
    before = num_oom_kills()
    try:
        return await server.run(run)
    except WorkerKilledError:
        good = await server.run(_KNOWN_GOOD)
        if good.ending != "finished" or num_oom_kills() > before:
            raise
    try:
        return await server.run(run)
    except WorkerKilledError as error:
        if num_oom_kills() > before:
            raise
        return Ran("crashed", reason=f"the sandbox's process died under it twice: {error}")


class _ForkServer:
    """Hold one fork server; start it again when it has died and is needed."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._spawn())
            async with asyncio.timeout(_START_WITHIN_S):
                answer = await self._ask(self._prepare)
        except (OSError, EOFError, TimeoutError) as error:
            await self.stop()
            raise InfrastructureError(f"the sandbox's fork server does not start: {error!r}") from error
        if isinstance(answer, Unable):
            await self.stop()
            raise ConfigurationError(answer.message)
        assert isinstance(answer, Ready)

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-m",
            "plaudit_reward.code.sandbox.fork_server",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def run(self, run: RunProgram) -> Ran:
        if self._process is None:
            await self.start()
        try:
            async with asyncio.timeout(run.limits.time_s + _ANSWER_WITHIN_S):
                answer = await self._ask(run)
        except (OSError, EOFError, TimeoutError) as error:
            await self.stop()
            raise WorkerKilledError(f"the sandbox's fork server died or hung under a program: {error!r}") from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        assert isinstance(answer, Ran)
        return answer

    async def _ask(self, message: Prepare | RunProgram) -> FromServer:
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(frame([message]))
        await self._writer.drain()
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        (answer,) = _decoder.decode(await self._reader.readexactly(length))
        return answer

    async def stop(self) -> None:
        """End it and the program that it runs: both end when the connection is closed."""
        if self._writer is not None:
            self._writer.transport.abort()
        process, self._process, self._reader, self._writer = self._process, None, None, None
        if process is None:
            return
        with contextlib.suppress(PermissionError):  # a root that may not kill others: it ends with its connection
            process.kill()
        while process.poll() is None:  # noqa: ASYNC110 - no event tells of a process's end
            await asyncio.sleep(_LOOK_EVERY_S)
