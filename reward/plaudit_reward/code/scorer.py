"""Score programs by their test cases: ``rule: code`` (codecontests, apps, codeforces, taco).

A program that fails, whatever it tried, is a wrong answer: that test case counts 0, and the score's ``failure`` names
the reason. A sample gets no value only when it could not be tested: its row has no test cases, or the sandbox is
broken.
"""

from __future__ import annotations

import asyncio
import math
import textwrap
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from plaudit_job.rules.arguments import CodeOptions
from plaudit_reward.code.asserts import AssertCheck, Executed, Part
from plaudit_reward.code.cases import (
    Backend,
    Case,
    CaseResult,
    SampleTimer,
    cases_of,
    is_unicode,
    last_block,
    without_attributes,
)
from plaudit_reward.code.fusion import FusionBackend
from plaudit_reward.code.outputs import OutputComparison
from plaudit_reward.scorer import Attempt, Score
from plaudit_sandbox.sandbox import PREAMBLE, ProgramLimits, Ran, RunProgram, Sandbox
from plaudit_wire.errors import ScoreTimeoutError
from plaudit_wire.records import Sample

_SAMPLES_PER_PROCESS = 4
"""Test cases are short, and a process must not wait for the next sample."""


class LocalBackend:
    """Run test cases in the local sandbox, with the results of verl's ``prime_code``.

    ``as_script``: as ``python program.py`` runs them; ``tolerance``: of ``OutputComparison``.
    """

    waits_for: Literal["process", "limit"] = "process"

    def __init__(
        self,
        processes: int,
        *,
        as_script: bool = False,
        allow_without_landlock: bool = False,
        tolerance: float | None = None,
    ) -> None:
        self._sandbox = Sandbox(processes, allow_without_landlock=allow_without_landlock)
        self._as_script = as_script
        self._comparison = OutputComparison(tolerance)
        self._asserts = AssertCheck(self._comparison, PREAMBLE)
        self.num_samples = processes * _SAMPLES_PER_PROCESS

    async def open(self) -> None:
        """Start the sandbox; raise ``ConfigurationError`` where programs cannot be confined on this machine."""
        await self._sandbox.open()

    def program(self, response: str) -> str | None:
        """Return the last block of Python; the whole response, up to a fence, where it has none."""
        before, fence, block = response.rpartition("```python")
        as_in_verl = fence and not block.startswith("-") and not before.endswith("`")  # python-repl; a longer fence
        program = None if as_in_verl else last_block(response)
        if program is not None:
            return program
        program = without_attributes(block.partition("```")[0])
        return textwrap.dedent(program) if self._as_script else program  # a block of a list is indented

    async def run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        """Run one test case; the expected output or value never enters the program's process."""

        async def execute(part: Part, text: str, payload: str, stdin: str) -> Executed:
            ran = await self._sandboxed(RunProgram(text, stdin, part=part, payload=payload, limits=limits), timer)
            return Executed(ran.ending, ran.stdout, ran.reason)

        call = partial(self._run, program, function, case, limits, timer)
        return await self._asserts.check_then_call(execute, program, function, case, call)

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
        left_s, waited_s = math.nan, 0.0

        def begin() -> float:
            nonlocal left_s
            left_s = timer.begin()
            return left_s

        try:
            ran = await self._sandbox.run(run, begin)
            waited_s = ran.waited_s
        finally:
            if not math.isnan(left_s):
                timer.end(waited_s)
        if ran.ending == "time limit" and left_s < run.limits.time_s:
            return msgspec.structs.replace(ran, reason=f"of {timer.limit_s:g} s for all test cases of the sample")
        return ran

    def blames_program(self, num_done: int) -> bool:
        """Return True: the sandbox measures the program's own time."""
        return True

    async def close(self) -> None:
        """End the sandbox."""
        await self._comparison.close()
        await self._sandbox.close()


class CodeScorer:
    """Score programs; ``processes`` is the number of concurrent test cases in the local sandbox."""

    def __init__(self, name: str, options: CodeOptions, processes: int) -> None:
        self.name = name
        self._options = options
        self._limits = ProgramLimits(options.time_seconds, options.memory_bytes, options.output_bytes)
        self._backend = _backend(options, processes)
        self._num_in_work = 0

    async def open(self) -> None:
        """Start the sandbox; raise ``ConfigurationError`` where programs cannot be confined on this machine."""
        await self._backend.open()

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Return the share of test cases that pass, or 1 when all pass, as the options decide.

        Raises ``ScoreTimeoutError`` if the sample's time is up, and a server that did not respond used it.
        """
        test = cases_of(sample.ground_truth)
        program = self._backend.program(sample.response)
        if program is None:
            return Score.scored(0.0, failure="the response has no code block")
        if not is_unicode(program):
            return Score.scored(0.0, failure="the response is no valid Unicode text")
        shares = self._options.gives_shares(functions=test.function is not None)
        counted = test.cases[: self._options.num_counted(len(test.cases), shares=shares)]
        timer = SampleTimer(attempt, self._backend.waits_for)
        results: list[CaseResult | None] = [None] * len(counted)
        self._num_in_work += 1
        try:
            async with timer:
                run = partial(self._run, results, program, test.function, timer)
                await (_all(run, counted) if shares else _until_one_fails(run, counted, results))
        except TimeoutError:
            if not self._backend.blames_program(len(results) - results.count(None)):
                raise ScoreTimeoutError(f"the test cases took longer than {attempt.limit_s:g} s") from None
            late = CaseResult(False, "time limit", f"of {attempt.limit_s:g} s for all test cases of the sample")
            results = [result or late for result in results]
        finally:
            self._num_in_work -= 1
            timer.report()
        return _score(results, len(counted), shares=shares)

    async def _run(
        self,
        results: list[CaseResult | None],
        program: str,
        function: str | None,
        timer: SampleTimer,
        index: int,
        case: Case,
    ) -> None:
        results[index] = await self._backend.run(program, function, case, self._limits, timer)

    def room(self) -> int:
        """Return how many more samples could begin soon."""
        return max(0, self._backend.num_samples - self._num_in_work)

    async def close(self) -> None:
        """End processes and connections."""
        await self._backend.close()


def _backend(options: CodeOptions, processes: int) -> Backend:
    if options.url is not None:
        return FusionBackend(options.url, options.concurrency, options.tolerance)
    return LocalBackend(
        processes,
        as_script=options.as_script,
        allow_without_landlock=options.allow_without_landlock,
        tolerance=options.tolerance,
    )


Runner = Callable[[int, Case], Coroutine[Any, Any, None]]


async def _all(run: Runner, cases: Sequence[Case]) -> None:
    """Run all cases at a time; the first error ends the others.

    Not a ``TaskGroup``: in Python 3.11 a failed one can leave its task with a request to cancel, which a later time
    limit in the same task takes for its own.
    """
    running = [asyncio.ensure_future(run(index, case)) for index, case in enumerate(cases)]
    try:
        await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _until_one_fails(run: Runner, cases: Sequence[Case], results: Sequence[CaseResult | None]) -> None:
    for index, case in enumerate(cases):
        await run(index, case)
        result = results[index]
        if result is not None and not result.passed:
            return


def _score(results: Sequence[CaseResult | None], num_cases: int, *, shares: bool) -> Score:
    num_passed = sum(result is not None and result.passed for result in results)
    value = num_passed / num_cases if shares else float(num_passed == num_cases)
    extra: dict[str, float | str] = {"passed": float(num_passed), "cases": float(num_cases)}
    failures = (f"case {i}: {result.failure()}" for i, result in enumerate(results) if result and not result.passed)
    if failure := next(failures, ""):
        extra["failure"] = failure
    return Score.scored(value, **extra)
