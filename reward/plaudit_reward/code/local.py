"""Run test cases in the local sandbox, with the results of verl's ``prime_code``."""

from __future__ import annotations

from functools import partial
from typing import Literal

from plaudit_reward.code.asserts.check import AssertCheck, Executed
from plaudit_reward.code.asserts.sources import Part
from plaudit_reward.code.backend import CaseResult
from plaudit_reward.code.cases import Case
from plaudit_reward.code.comparison import OutputComparison
from plaudit_reward.code.sandbox.limits import ProgramLimits
from plaudit_reward.code.sandbox.messages import Ran, RunProgram
from plaudit_reward.code.sandbox.preamble import PREAMBLE
from plaudit_reward.code.sandbox.sandbox import Sandbox
from plaudit_reward.code.timer import SampleTimer

_SAMPLES_PER_PROCESS = 4
"""Test cases are short, and a process must not wait for the next sample."""


class LocalBackend:
    """Run test cases in processes of this machine; ``as_script``: as ``python program.py`` does."""

    waits_for: Literal["process", "limit"] = "process"

    def __init__(self, processes: int, *, as_script: bool = False, allow_without_landlock: bool = False) -> None:
        self._sandbox = Sandbox(processes, allow_without_landlock=allow_without_landlock)
        self._as_script = as_script
        self._comparison = OutputComparison()
        self._asserts = AssertCheck(self._comparison, PREAMBLE)
        self.num_samples = processes * _SAMPLES_PER_PROCESS

    async def open(self) -> None:
        """Start the sandbox; raise ``ConfigurationError`` where programs cannot be confined on this machine."""
        await self._sandbox.open()

    def program(self, response: str) -> str | None:
        """Return the last block of Python; the whole response where it has no fence."""
        return response.rpartition("```python")[2].partition("```")[0]

    async def run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        """Run one test case; the expected output or value never enters the program's process."""
        call = partial(self._run, program, function, case, limits, timer)
        if not case.behind:
            return await call()

        async def execute(part: Part, text: str, payload: str, stdin: str) -> Executed:
            ran = await self._sandboxed(RunProgram(text, stdin, part=part, payload=payload, limits=limits), timer)
            return Executed(ran.ending, ran.stdout, ran.reason)

        return await self._asserts.check_then_call(execute, program, case, call if function is not None else None)

    async def _run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        ran = await self._sandboxed(RunProgram(program, case.stdin, function, self._as_script, limits=limits), timer)
        if ran.ending != "finished":
            return CaseResult(False, ran.ending, ran.reason)
        assert case.expected is not None
        form: Literal["printed", "result"] = "printed" if function is None else "result"
        return CaseResult(await self._comparison.compare(form, ran.stdout, case.expected), "finished")

    async def _sandboxed(self, run: RunProgram, timer: SampleTimer) -> Ran:
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True
            timer.begin()

        try:
            return await self._sandbox.run(run, begin)
        finally:
            if begun:
                timer.end()

    def blames_program(self, num_done: int) -> bool:
        """Return True: the sandbox measures the program's own time."""
        return True

    async def close(self) -> None:
        """End the sandbox."""
        await self._comparison.close()
        await self._sandbox.close()
