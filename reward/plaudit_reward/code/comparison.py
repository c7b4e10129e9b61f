"""Compare large outputs in a process that is killed when it takes too long; small ones here.

A program may print megabytes in any form. To read and compare them takes time that cannot be interrupted within a
process, and the worker's event loop has other samples to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import struct
import subprocess
import sys

import msgspec

from plaudit_reward.code.judgement import OutputForm, judge
from plaudit_wire.errors import InfrastructureError

_SMALL_BYTES = 1 << 16
"""Output up to this length is compared in the worker: a millisecond or two."""
_WITHIN_S = 20.0
"""An honest output of 16 MiB takes about two seconds."""
_MEMORY_BYTES = 4 << 30
_LENGTH = struct.Struct("<I")


class _Task(msgspec.Struct, array_like=True):
    """One comparison."""

    form: OutputForm
    written: bytes
    expected: str


_decoder = msgspec.msgpack.Decoder(_Task)


class OutputComparison:
    """Compare outputs; start the process when it is first needed, and again after one that was killed."""

    def __init__(self, within_s: float = _WITHIN_S) -> None:
        self._within_s = within_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def compare(self, form: OutputForm, written: bytes, expected: str) -> bool:
        """Return True when a program wrote what is expected.

        Output that cannot be compared within the limits on time and memory is wrong: an honest program's can.
        """
        if len(written) <= _SMALL_BYTES:
            return judge(form, written, expected)
        async with self._turn:
            try:
                async with asyncio.timeout(self._within_s):
                    return await self._compare(_Task(form, written, expected))
            except (TimeoutError, EOFError, ConnectionError):
                await self._stop()
                return False
            except OSError as error:
                raise InfrastructureError(f"no process can be started to compare outputs: {error}") from error
            except BaseException:
                await self._stop()
                raise

    async def close(self) -> None:
        """End the process."""
        await self._stop()

    async def _compare(self, task: _Task) -> bool:
        if self._process is None:
            command = [sys.executable, "-P", "-m", "plaudit_reward.code.comparison"]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        body = msgspec.msgpack.encode(task)
        self._process.stdin.write(_LENGTH.pack(len(body)) + body)
        await self._process.stdin.drain()
        return await self._process.stdout.readexactly(1) == b"\x01"

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Compare until the worker closes the pipe or ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tasks, verdicts = sys.stdin.buffer, sys.stdout.buffer
    while header := tasks.read(_LENGTH.size):
        task = _decoder.decode(tasks.read(_LENGTH.unpack(header)[0]))
        verdicts.write(bytes([judge(task.form, task.written, task.expected)]))
        verdicts.flush()


if __name__ == "__main__":
    main()
