"""``rule: code``: scores programs by their test cases (codecontests, apps, codeforces, taco).

A program that fails, whatever it tried, is a wrong answer: value 0 for that test case, and why in the score's
``failure``. A sample without a value could not be tested: its row has no test cases, or the sandbox is broken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from plaudit_reward.code.backend import Backend, CaseResult
from plaudit_reward.code.cases import Case, cases_of
from plaudit_reward.code.fusion import FusionBackend
from plaudit_reward.code.local import LocalBackend
from plaudit_reward.code.options import CodeOptions
from plaudit_reward.errors import ScoreTimeoutError
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.sample import Sample


class CodeScorer:
    """Scores programs.

    Args:
        name: of the scorer in the job.
        options: what the job says about it.
        processes: test cases at a time in the local sandbox.
    """

    def __init__(self, name: str, options: CodeOptions, *, processes: int) -> None:
        self.name = name
        self._options = options
        self._limits = options.limits()
        self._backend = _backend(options, processes)
        self._num_in_work = 0

    async def open(self) -> None:
        """Starts the sandbox.

        Raises:
            ConfigurationError: programs cannot be locked up on this machine.
        """
        await self._backend.open()

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """The share of test cases that pass, or 1 when all pass, as the options say."""
        test = cases_of(sample.ground_truth)
        program = self._backend.program(sample.response)
        if program is None:
            return Score.scored(0.0, failure="the response has no code block")
        shares = self._options.gives_shares(functions=test.function is not None)
        counted = test.cases[: self._options.num_counted(len(test.cases), shares=shares)]
        work = _Work(attempt, self._backend.waits_for)
        self._num_in_work += 1
        run = partial(self._run, work, program, test.function)
        try:
            results = await (_all(run, counted) if shares else _until_one_fails(run, counted))
        finally:
            self._num_in_work -= 1
            work.settle()
        return _score(results, len(counted), shares=shares)

    async def _run(self, work: _Work, program: str, function: str | None, case: Case) -> CaseResult:
        try:
            async with asyncio.timeout(None) as timer:
                return await self._backend.run(program, function, case, self._limits, lambda: work.begin(timer))
        except TimeoutError:
            raise ScoreTimeoutError(f"the test cases took longer than {work.limit_s:g} s") from None
        finally:
            work.end(timer)

    def room(self) -> int:
        """How many more samples could begin soon."""
        return max(0, self._backend.num_samples - self._num_in_work)

    async def close(self) -> None:
        """Ends processes and connections."""
        await self._backend.close()


def _backend(options: CodeOptions, processes: int) -> Backend:
    if options.url is not None:
        return FusionBackend(options.url, options.concurrency)
    return LocalBackend(processes, as_script=options.as_script, allow_without_landlock=options.allow_without_landlock)


class _Work:
    """The time of one sample: counted while at least one of its test cases runs, all else was waiting for a place."""

    def __init__(self, attempt: Attempt, waits_for: str) -> None:
        self.limit_s = attempt.limit_s
        self._attempt = attempt
        self._waits_for = waits_for
        self._began_s = time.monotonic()
        self._spent_s = 0.0
        self._since_s = 0.0
        self._running: set[asyncio.Timeout] = set()

    def begin(self, timer: asyncio.Timeout) -> None:
        """A test case has a place; ``timer`` ends it when the sample's time is up."""
        if not self._running:
            self._since_s = time.monotonic()
        self._running.add(timer)
        running_s = time.monotonic() - self._since_s
        timer.reschedule(asyncio.get_running_loop().time() + self.limit_s - self._spent_s - running_s)

    def end(self, timer: asyncio.Timeout) -> None:
        """A test case is over; it may never have begun."""
        if timer in self._running:
            self._running.remove(timer)
            if not self._running:
                self._spent_s += time.monotonic() - self._since_s

    def settle(self) -> None:
        """Tells the attempt how long was waited."""
        waited_s = max(0.0, time.monotonic() - self._began_s - self._spent_s)
        if self._waits_for == "process":
            self._attempt.queued_s += waited_s
        else:
            self._attempt.waited_s += waited_s


async def _all(run: Callable[[Case], Coroutine[Any, Any, CaseResult]], cases: Sequence[Case]) -> list[CaseResult]:
    """Runs all at a time; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(case)) for case in cases]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _until_one_fails(
    run: Callable[[Case], Coroutine[Any, Any, CaseResult]], cases: Sequence[Case]
) -> list[CaseResult]:
    results: list[CaseResult] = []
    for case in cases:
        results.append(await run(case))
        if not results[-1].passed:
            break
    return results


def _score(results: Sequence[CaseResult], num_cases: int, *, shares: bool) -> Score:
    num_passed = sum(result.passed for result in results)
    value = num_passed / num_cases if shares else float(num_passed == num_cases)
    extra: dict[str, float | str] = {"passed": float(num_passed), "cases": float(num_cases)}
    failed = next((index for index, result in enumerate(results) if not result.passed), None)
    if failed is not None:
        extra["failure"] = f"case {failed}: {results[failed].failure()}"
    return Score.scored(value, **extra)
