"""Run test cases on a Sandbox Fusion server. Results are those of verl's ``sandbox_fusion``, with one exception.

A server that is unreachable, overloaded or broken is an infrastructure error here, which is retried. verl counts the
test case as failed, so that an outage looks like wrong programs.

The API: ``POST`` of ``code``, ``stdin``, ``language``, ``compile_timeout``, ``run_timeout`` (seconds) and
``memory_limit_MB``; the response has ``status`` (``Success``, ``Failed``, ``SandboxError``), ``compile_result`` and
``run_result``, each with ``status`` (``Finished``, ``Error``, ``TimeLimitExceeded``), ``return_code``, ``stdout`` and
``stderr``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from plaudit_reward.code.asserts import AssertCheck, Executed, Part, script_of
from plaudit_reward.code.cases import Case, CaseResult, SampleTimer, last_block, names_python, without_attributes
from plaudit_reward.code.outputs import OutputComparison
from plaudit_reward.http import HttpClient, NoResponseError, ResponseTooLargeError, excerpt, proxy_for, retry_after_s
from plaudit_sandbox.sandbox import PREAMBLE, ProgramLimits
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import CallTimeoutError, DataError, InfrastructureError

_ATTEMPTS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_ANSWER_WITHIN_S = 10.0
"""After the program's own time, as verl waits."""
_TRANSIENT = frozenset({408, 425, 429})
_BYTES_PER_CHARACTER = 6
"""The longest that JSON needs for one character."""
_BESIDE_THE_EXPECTED_BYTES = 1 << 20
"""Printed beside what is expected, mostly to stderr. More is not read: a response is decoded on the event loop, where
16 MiB of control characters take 0.2 s."""


class _Result(msgspec.Struct):
    """The result of compiling or running."""

    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Answer(msgspec.Struct):
    """The response of the server."""

    status: str
    message: str | None = None
    compile_result: _Result | None = None
    run_result: _Result | None = None


class FusionBackend:
    """Run test cases on a Sandbox Fusion server; a ``url`` without a path gets ``/run_code``."""

    waits_for: Literal["process", "limit"] = "limit"

    def __init__(self, url: str, concurrency: int, tolerance: float | None = None) -> None:
        parts = urlsplit(url)
        self._url = url if parts.path not in {"", "/"} else urlunsplit(parts._replace(path="/run_code"))
        self.num_samples = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._comparison = OutputComparison(tolerance)
        self._asserts = AssertCheck(self._comparison, "")
        self._http = HttpClient(max_connections=concurrency, proxy=proxy_for(self._url))

    async def open(self) -> None:
        """Do nothing: a server that is unreachable for a moment must not end a job."""

    def program(self, response: str) -> str | None:
        """Return the last block of Python, else the first block, as verl's ``sandbox_fusion`` does.

        Else return the last block between tildes, or None.
        """
        if "```python" in response:
            return without_attributes(response.rpartition("```python")[2].partition("```")[0])
        _, fence, rest = response.partition("```")
        if not fence:
            return last_block(response)
        block = rest.partition("```")[0]
        first, newline, others = block.partition("\n")
        return others if newline and (first.strip().isalpha() or names_python(first.strip())) else block

    async def run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        """Run one test case; the expected output or value is never sent along with the program."""

        async def execute(part: Part, text: str, payload: str, stdin: str) -> Executed:
            return await self._execute(script_of(part, text, payload), stdin, _bounded(limits, case.behind), timer)

        call = partial(self._run, program, function, case, limits, timer)
        return await self._asserts.check_then_call(execute, program, function, case, call)

    async def _run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        code = program
        if function is not None:
            forget = "" if "class Solution" in program else f"globals().pop({function!r}, None)"  # as program.py does
            code = f"{PREAMBLE}{forget}\n{program}\n\n{_CALL.replace('FUNCTION', repr(function))}"
        assert case.expected is not None
        executed = await self._execute(code, case.stdin, _bounded(limits, case.expected), timer)
        if executed.ending != "finished":
            return CaseResult(False, executed.ending, executed.reason)
        return CaseResult(await self._comparison.compare("same text", executed.stdout, case.expected), "finished")

    async def _execute(self, code: str, stdin: str, limits: ProgramLimits, timer: SampleTimer) -> Executed:
        """Run a program on the server.

        A program that the server fails to run again and again, while it runs another one, is to blame itself.
        """
        async with self._places:
            timer.begin()
            try:
                return await self._request_again_when_healthy(_body(code, stdin, limits), limits)
            finally:
                timer.end()

    async def _request_again_when_healthy(self, body: dict[str, Any], limits: ProgramLimits) -> Executed:
        try:
            return _executed(await self._request_until_answered(body, limits))
        except (ServerFailureError, FusionRefusedError):
            good = {**body, "code": _KNOWN_GOOD}
            healthy = _executed(await self._request_until_answered(good, limits))
            if healthy.stdout.strip() != b"42":
                raise
        try:
            return _executed(await self._request_until_answered(body, limits))
        except (ServerFailureError, FusionRefusedError) as error:
            return Executed("crashed", reason=str(error))

    def blames_program(self, num_done: int) -> bool:
        """Return True when the server responds: it has then ended at least one case of the sample."""
        return num_done > 0

    async def _request_until_answered(self, body: dict[str, Any], limits: ProgramLimits) -> _Answer:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._request(body, limits)
            except _TransientError as error:
                if attempt == _ATTEMPTS:
                    kind = ServerFailureError if error.under_program else InfrastructureError
                    raise kind(f"{error} ({_ATTEMPTS} times)") from error
                pause_s = backoff_s(attempt, _FIRST_PAUSE_S, jitter=(0.5, 1.5))
                if error.retry_after_s is not None:
                    pause_s = min(_LONGEST_PAUSE_S, error.retry_after_s)
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns")

    async def _request(self, body: dict[str, Any], limits: ProgramLimits) -> _Answer:
        """Send one request; raise ``_TransientError`` if another may succeed, ``FusionRefusedError`` if none will."""
        limit_s = 2 * limits.time_s + _ANSWER_WITHIN_S
        most = limits.output_bytes * _BYTES_PER_CHARACTER
        try:
            response = await self._http.post(self._url, msgspec.json.encode(body), limit_s, max_bytes=most)
        except ResponseTooLargeError:
            return _Answer("OutputLimit")
        except (NoResponseError, CallTimeoutError) as error:
            raise _TransientError(f"Sandbox Fusion at {error}") from error
        status, content = response.status, response.body
        if status in _TRANSIENT or status >= 500 or 300 <= status < 400:
            busy = status in _TRANSIENT or status == 503
            raise _TransientError(
                f"Sandbox Fusion at {self._url} responded {status}",
                retry_after_s(response.headers),
                under_program=not busy,
            )
        if status >= 400:
            raise FusionRefusedError(
                f"Sandbox Fusion at {self._url} refused the program with {status}: {excerpt(content)}"
            )
        try:
            return msgspec.json.decode(content, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _TransientError(f"the server at {self._url} is not a Sandbox Fusion: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._comparison.close()
        await self._http.close()


class FusionRefusedError(DataError):
    """The server refused a request: for its input, or for the program."""


class ServerFailureError(InfrastructureError):
    """The server failed under this program: it may be the server's fault, or the program's."""


class _TransientError(Exception):
    """The server did not respond this time."""

    def __init__(self, message: str, retry_after_s: float | None = None, *, under_program: bool = True) -> None:
        super().__init__(message)
        self.under_program = under_program
        self.retry_after_s = retry_after_s


_KNOWN_GOOD = "print(6 * 7)"


def _bounded(limits: ProgramLimits, expected: str) -> ProgramLimits:
    most = min(limits.output_bytes, len(expected.encode()) + _BESIDE_THE_EXPECTED_BYTES)
    return msgspec.structs.replace(limits, output_bytes=most)


def _body(code: str, stdin: str, limits: ProgramLimits) -> dict[str, Any]:
    return {
        "code": code,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limits.time_s,
        "run_timeout": limits.time_s,
        "memory_limit_MB": max(1, limits.memory_bytes >> 20),
        "files": {},
        "fetch_files": [],
    }


def _executed(answer: _Answer) -> Executed:
    if answer.status == "OutputLimit":
        return Executed("output limit")
    compiled, ran = answer.compile_result, answer.run_result
    if answer.status == "Success" and ran is not None and ran.status == "Finished":
        return Executed("finished", (ran.stdout or "").encode("utf-8", "surrogatepass"))
    if answer.status == "Failed":
        for result in filter(None, (compiled, ran)):
            if result.status == "TimeLimitExceeded":
                return Executed("time limit")
            if result.status == "Error" or (result.status == "Finished" and result.return_code != 0):
                return Executed("raised", reason=(result.stderr or "").strip().rpartition("\n")[2])
    message = answer.message or "without a message"
    raise ServerFailureError(f"Sandbox Fusion could not run the program: {answer.status}, {message}")


_CALL = """
import json, sys
def _plaudit_call(name):
    text = sys.stdin.read()
    arguments = [json.loads(line) for line in text.split("\\n")] if text.strip() else []
    scope = globals()
    function = scope[name] if name in scope else getattr(scope["Solution"](), name)
    result = function(*arguments)
    plain = isinstance(result, (int, float, str)) and not isinstance(result, bool)
    if plain or not isinstance(result, (dict, list, tuple, bool, type(None))):
        print(result)
    else:
        print(json.dumps(result))
_plaudit_call(FUNCTION)
"""
"""Added to a program: calls a function with its input and prints the result, as JSON, plain for scalars."""
