"""Test cases on a Sandbox Fusion server, with the results of verl's ``sandbox_fusion``, but for one.

A server that is away, overloaded or broken is an infrastructure error here: tried again, then told as such. verl counts
the test case as failed, so that an outage looks like wrong programs.

The API: ``POST`` of ``code``, ``stdin``, ``language``, ``compile_timeout``, ``run_timeout`` (seconds) and
``memory_limit_MB``; the answer has ``status`` (``Success``, ``Failed``, ``SandboxError``), ``compile_result`` and
``run_result``, each with ``status`` (``Finished``, ``Error``, ``TimeLimitExceeded``), ``return_code``, ``stdout`` and
``stderr``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from plaudit_reward.code.backend import CaseResult
from plaudit_reward.code.cases import Case
from plaudit_reward.code.sandbox.limits import Limits
from plaudit_reward.code.sandbox.program import PREAMBLE
from plaudit_reward.errors import CallTimeoutError, DataError, InfrastructureError
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError, ResponseTooLargeError
from plaudit_reward.http.proxy import proxy_for
from plaudit_reward.http.response import excerpt, retry_after_s

_ATTEMPTS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_ANSWER_WITHIN_S = 10.0
"""After the program's own time, as verl waits."""
_TRANSIENT = frozenset({408, 425, 429})
_BYTES_PER_CHARACTER = 6
"""The most that JSON needs for one."""


class _Result(msgspec.Struct):
    """Of compiling or running."""

    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Answer(msgspec.Struct):
    """Of the server."""

    status: str
    message: str | None = None
    compile_result: _Result | None = None
    run_result: _Result | None = None


class FusionBackend:
    """Runs test cases on a Sandbox Fusion server.

    Args:
        url: of the server; ``/run_code`` is added where it has no path.
        concurrency: requests at a time.
    """

    waits_for: Literal["process", "limit"] = "limit"

    def __init__(self, url: str, concurrency: int) -> None:
        parts = urlsplit(url)
        self._url = url if parts.path not in {"", "/"} else urlunsplit(parts._replace(path="/run_code"))
        self.num_samples = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._http = HttpClient(max_connections=concurrency, proxy=proxy_for(self._url))

    async def open(self) -> None:
        """Nothing to start: a server that is away for a moment must not end a job."""

    def program(self, response: str) -> str | None:
        """The last block of Python, else the first block, else none: verl's ``sandbox_fusion``."""
        if "```python" in response:
            return response.rpartition("```python")[2].partition("```")[0]
        _, fence, rest = response.partition("```")
        if not fence:
            return None
        block = rest.partition("```")[0]
        first, newline, others = block.partition("\n")
        return others if newline and first.strip().isalpha() else block

    async def run(
        self, program: str, function: str | None, case: Case, limits: Limits, on_begin: Callable[[], None]
    ) -> CaseResult:
        """Runs one test case; asks up to three times while the server is away or overloaded."""
        code = f"{program}\n\n{case.behind}"
        body = {
            "code": code if function is None else _calling(code, function),
            "stdin": case.stdin,
            "language": "python",
            "compile_timeout": limits.time_s,
            "run_timeout": limits.time_s,
            "memory_limit_MB": max(1, limits.memory_bytes >> 20),
            "files": {},
            "fetch_files": [],
        }
        async with self._places:
            on_begin()
            return _judge(await self._ask_until_answered(body, limits), case)

    async def _ask_until_answered(self, body: dict[str, Any], limits: Limits) -> _Answer:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._ask(body, limits)
            except _TransientError as error:
                if attempt == _ATTEMPTS:
                    raise InfrastructureError(f"{error} ({_ATTEMPTS} times)") from error
                await asyncio.sleep(error.pause_s(attempt))
        raise AssertionError("the last attempt returns")

    async def _ask(self, body: dict[str, Any], limits: Limits) -> _Answer:
        """Asks once.

        Raises:
            _TransientError: asking again may help.
            DataError: the server refuses the request itself.
            InfrastructureError: what answers is no Sandbox Fusion, or its sandbox is broken.
        """
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
            raise _TransientError(f"Sandbox Fusion at {self._url} responded {status}", retry_after_s(response.headers))
        if status >= 400:
            raise DataError(f"Sandbox Fusion at {self._url} refused the program with {status}: {excerpt(content)}")
        try:
            return msgspec.json.decode(content, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _TransientError(f"the server at {self._url} is not a Sandbox Fusion: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


class _TransientError(Exception):
    """The server did not answer this time."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    def pause_s(self, attempt: int) -> float:
        """Until the next attempt: what the server asks for, else a random time that doubles in its mean."""
        if self._retry_after_s is not None:
            return min(_LONGEST_PAUSE_S, self._retry_after_s)
        return random.uniform(0.5, 1.5) * _FIRST_PAUSE_S * 2.0 ** (attempt - 1)


def _judge(answer: _Answer, case: Case) -> CaseResult:
    if answer.status == "OutputLimit":
        return CaseResult(False, "output limit")
    compiled, ran = answer.compile_result, answer.run_result
    if answer.status == "Success" and ran is not None and ran.status == "Finished":
        printed = (ran.stdout or "").rstrip("\n")
        return CaseResult(case.expected is None or printed == case.expected.rstrip("\n"), "finished")
    if answer.status == "Failed":
        for result in (compiled, ran):
            if result is not None and (failed := _failure(result)) is not None:
                return failed
    told = answer.message or "without a message"
    raise InfrastructureError(f"Sandbox Fusion could not run the program: {answer.status}, {told}")


def _failure(result: _Result) -> CaseResult | None:
    last_line = (result.stderr or "").strip().rpartition("\n")[2]
    if result.status == "TimeLimitExceeded":
        return CaseResult(False, "time limit")
    if result.status == "Error" or (result.status == "Finished" and result.return_code != 0):
        return CaseResult(False, "raised", last_line)
    return None


def _calling(code: str, function: str) -> str:
    """A program that calls ``function`` with the arguments it reads, and prints the result: JSON, plain for scalars."""
    return f"{PREAMBLE}\n{code}\n\n{_CALL.replace('FUNCTION', repr(function))}"


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
