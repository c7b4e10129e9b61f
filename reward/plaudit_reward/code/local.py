"""Test cases in the local sandbox, with the results of verl's ``prime_code``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from plaudit_reward.code.backend import CaseResult
from plaudit_reward.code.cases import Case
from plaudit_reward.code.compare import same_output, same_result
from plaudit_reward.code.sandbox.limits import Limits
from plaudit_reward.code.sandbox.messages import Run
from plaudit_reward.code.sandbox.sandbox import Sandbox
from plaudit_reward.code.sandbox.values import decode_value

_LONG_BYTES = 1 << 18
"""Longer output is compared in a thread: the worker's event loop has others to serve."""
_SAMPLES_PER_PROCESS = 4
"""Their test cases are short, and a process must not wait for the next sample."""


class LocalBackend:
    """Runs test cases in processes of this machine.

    Args:
        processes: test cases at a time.
        as_script: run programs as ``python program.py`` does.
        allow_without_landlock: see ``Sandbox``.
    """

    waits_for: Literal["process", "limit"] = "process"

    def __init__(self, processes: int, *, as_script: bool = False, allow_without_landlock: bool = False) -> None:
        self._sandbox = Sandbox(processes, allow_without_landlock=allow_without_landlock)
        self._as_script = as_script
        self.num_samples = processes * _SAMPLES_PER_PROCESS

    async def open(self) -> None:
        """Starts the sandbox.

        Raises:
            ConfigurationError: programs cannot be locked up on this machine.
        """
        await self._sandbox.open()

    def program(self, response: str) -> str | None:
        """The last block of Python; where there is no fence, the whole response."""
        return response.rpartition("```python")[2].partition("```")[0]

    async def run(
        self, program: str, function: str | None, case: Case, limits: Limits, on_begin: Callable[[], None]
    ) -> CaseResult:
        """Runs one test case; what is expected never enters the sandbox."""
        source = f"{program}\n\n{case.behind}" if case.behind else program
        ran = await self._sandbox.run(Run(source, case.stdin, function, self._as_script, limits), on_begin)
        if ran.ending != "finished":
            return CaseResult(False, ran.ending, ran.reason)
        if len(ran.stdout) < _LONG_BYTES:
            return _judge(ran.stdout, function, case)
        return await asyncio.to_thread(_judge, ran.stdout, function, case)

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()


def _judge(stdout: bytes, function: str | None, case: Case) -> CaseResult:
    if case.expected is None:
        return CaseResult(True, "finished")
    if function is None:
        return CaseResult(same_output(stdout.decode("utf-8", "replace"), case.expected), "finished")
    try:
        returned = decode_value(stdout)
    except (ValueError, RecursionError):
        return CaseResult(False, "finished", "it left no result")
    return CaseResult(same_result(returned, case.expected), "finished")
