"""Read the test cases of a data row, and define how a backend runs them: in the local sandbox, or on Sandbox Fusion."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
import time
from typing import Any, Literal, NamedTuple, Protocol, Self

from plaudit_reward.scorer import Attempt
from plaudit_sandbox.sandbox import Ending, ProgramLimits
from plaudit_wire.errors import DataError


class Case(NamedTuple):
    """Hold one test case."""

    stdin: str
    """Standard input of the program; the arguments of a function, one JSON text a line."""
    expected: str | None
    """The text that it must print, or the JSON text of the result; None: only ``behind`` counts."""
    behind: str = ""
    """Text of an assert about what the program defines; it is evaluated outside the program's process."""


class Cases(NamedTuple):
    """Hold the test cases of a data row; at least one."""

    function: str | None
    """Name of the function to call, or None for programs that read and print."""
    cases: list[Case]


def cases_of(ground_truth: Any) -> Cases:
    """Read a row's ground truth, in the form of verl's code data sets: an object, or its JSON text.

    It has ``inputs`` and ``outputs``, lists of the same length. Without ``fn_name`` each input is what the program
    reads and each output what it prints (text, or a list of lines). With ``fn_name`` each input is the arguments, one
    JSON text a line, and each output the JSON text of the result. ``assert_case`` (a list of texts, each an assert
    about what the program defines) may take the place of both. Raises ``DataError`` for any other form.
    """
    if isinstance(ground_truth, str | bytes):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise DataError(f"ground_truth is not JSON: {error}; {_FORM}") from error
    if not isinstance(ground_truth, dict):
        raise DataError(f"ground_truth is {type(ground_truth).__name__}; {_FORM}")
    function = ground_truth.get("fn_name")
    if function is not None and not isinstance(function, str):
        raise DataError(f"ground_truth.fn_name is {function!r}; give the function's name, or leave it out")
    asserts = ground_truth.get("assert_case")
    if asserts is not None:
        asserts = _texts("assert_case", asserts)
    inputs = _texts("inputs", ground_truth.get("inputs", None if asserts is None else [""] * len(asserts)))
    expected = _expected(ground_truth, asserts)
    if not inputs:
        raise DataError("ground_truth has no test case: inputs is empty")
    behind = asserts if asserts is not None else [""] * len(inputs)
    if not len(inputs) == len(expected) == len(behind):
        raise DataError(
            f"ground_truth has {len(inputs)} inputs, {len(expected)} outputs and {len(behind)} assert_case; each case "
            "needs one of each that the row has"
        )
    _check_asserts(expected, behind)
    if function is not None:
        _check_json(inputs, expected)
    return Cases(function, [Case(*parts) for parts in zip(inputs, expected, behind, strict=True)])


_FORM = "code rules need an object with inputs and outputs, lists of the same length"


def _expected(ground_truth: dict[str, Any], asserts: list[str] | None) -> list[str | None]:
    if asserts is not None and "outputs" not in ground_truth:
        return [None] * len(asserts)
    outputs = ground_truth.get("outputs")
    if asserts is not None and isinstance(outputs, list) and all(output is None for output in outputs):
        return list(outputs)
    return list(_texts("outputs", outputs))


def _texts(name: str, values: Any) -> list[str]:
    if not isinstance(values, list):
        raise DataError(f"ground_truth.{name} is {type(values).__name__}; {_FORM}")
    return [_text(f"ground_truth.{name}[{index}]", value) for index, value in enumerate(values)]


def is_unicode(text: str) -> bool:
    """Return True when a text can be encoded: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(where: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if isinstance(value, str):
        if not is_unicode(value):
            raise DataError(f"{where} is no valid Unicode text; remove the halves of surrogate pairs from it")
        return value
    raise DataError(f"{where} is {type(value).__name__}; it must be a text, or a list of lines")


def _check_asserts(expected: list[str | None], behind: list[str]) -> None:
    for index, (output, text) in enumerate(zip(expected, behind, strict=True)):
        if output is None and not text.strip():
            raise DataError(f"ground_truth.assert_case[{index}] is empty, so that every program would pass; remove it")


def _check_json(inputs: list[str], expected: list[str | None]) -> None:
    for index, (stdin, result) in enumerate(zip(inputs, expected, strict=True)):
        try:
            for line in stdin.split("\n") if stdin.strip() else ():
                json.loads(line)
            if result is not None:
                json.loads(result)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"ground_truth: case {index} is not JSON ({error}); with fn_name an input is one JSON text an argument "
                "and line, an output the JSON text of the result"
            ) from error


_LINE_ENDS = re.compile(r"\r\n|[\r\n]")
"""Python's, and Markdown's: others may stand in a string of a program."""
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`]*)")
_PYTHON = re.compile(r"(?i)\{?\s*[.#]?(?:i?python|py)(?:[\d.]+)?(?![\w-])")
_ATTRIBUTES = re.compile(r"[ \t]+\S|[:,;{]|[\d.]+(?:[ \t]|\Z)")


def names_python(info: str) -> bool:
    """Return True for what follows a fence of Python: ``py``, ``Python title="a.py"``, ``{.python .lines}``."""
    return _PYTHON.match(info) is not None


def without_attributes(block: str) -> str:
    """Return what follows ``python`` behind a fence, without attributes such as ``title="a.py"`` on the fence's line.

    An attribute is no Python at that place. A program may begin there, as verl reads it.
    """
    first, newline, program = block.partition("\n")
    indented = next((line[0] in " \t" for line in program.splitlines() if line.strip()), True)
    return newline + program if _ATTRIBUTES.match(first) and not indented else block


def last_block(response: str) -> str | None:
    """Return the last fenced block of Python, else the last one without a language; None where there is neither.

    Fences are of backticks or tildes, and may be indented. A block of Python may lack its closing fence, because the
    response was cut.
    """
    blocks: dict[bool, list[str]] = {True: [], False: []}
    lines: list[str] = []
    fence, info = "", ""
    for line in [*_LINE_ENDS.split(response), None]:
        found = None if line is None else _FENCE.fullmatch(line)
        closes = found is not None and not found[2].strip() and bool(fence) and found[1].startswith(fence)
        if (closes or line is None) and fence and (names_python(info) or (closes and not info)):
            blocks[bool(info)].append(textwrap.dedent("\n".join(lines)))
        if closes:
            fence = ""
        elif fence and line is not None:
            lines.append(line)
        elif found is not None:
            fence, info, lines = found[1], found[2].strip(), []
    return next((of_kind[-1] for of_kind in (blocks[True], blocks[False]) if of_kind), None)


class SampleTimer:
    """End the block that it surrounds with ``TimeoutError`` when the sample's programs have run for too long.

    Only the time counts in which at least one of its test cases runs, without that in which programs waited for a
    processor; ``report`` adds the rest to the attempt. Where programs wait for a process of this machine, which ends
    them itself, the block goes on: ``begin`` says what is left for each.
    """

    def __init__(self, attempt: Attempt, waits_for: Literal["process", "limit"]) -> None:
        self._attempt = attempt
        self._waits_for = waits_for
        self._entered_s = time.monotonic()
        self._spent_s = 0.0
        self._forgiven_s = 0.0
        self._since_s = 0.0
        self._num_running = 0
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._timeout.__aexit__(*raised)

    @property
    def limit_s(self) -> float:
        """Return the seconds that all test cases of the sample have together."""
        return self._attempt.limit_s

    def begin(self) -> float:
        """Note that a program begins; return the seconds that are left for it."""
        if self._num_running == 0:
            self._since_s = time.monotonic()
        self._num_running += 1
        self._reschedule()
        return self._left_s()

    def end(self, waited_s: float = 0.0) -> None:
        """Note that a program that began has ended; it waited so long for a processor that others used."""
        self._forgiven_s += waited_s / self._num_running  # of programs that wait together, time passes once
        self._num_running -= 1
        if self._num_running == 0:
            self._spent_s += time.monotonic() - self._since_s
        self._reschedule()

    def _left_s(self) -> float:
        """Return the seconds that are left, while programs run."""
        return self._attempt.limit_s + self._forgiven_s - self._spent_s - (time.monotonic() - self._since_s)

    def _reschedule(self) -> None:
        if self._waits_for == "limit" and not self._timeout.expired():
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(now + self._left_s() if self._num_running else None)

    def report(self) -> None:
        """Add to the attempt how long the sample waited."""
        waited_s = max(0.0, time.monotonic() - self._entered_s - self._spent_s)
        if self._waits_for == "process":
            self._attempt.queued_s += waited_s
        else:
            self._attempt.waited_s += waited_s


class CaseResult(NamedTuple):
    """Hold the result of one test case."""

    passed: bool
    ending: Ending
    reason: str = ""

    def failure(self) -> str:
        """Return why the case did not pass, as text that can be encoded whatever the program raised."""
        how = "wrong answer" if self.ending == "finished" else self.ending
        reason = self.reason.encode("utf-8", "replace").decode()
        return f"{how}: {reason}" if reason else how


class Backend(Protocol):
    """Run test cases, many at a time."""

    waits_for: Literal["process", "limit"]
    """What a test case waits for before it begins."""
    num_samples: int
    """How many samples it can work on at a time."""

    async def open(self) -> None:
        """Start its processes; raise ``ConfigurationError`` if it cannot work on this machine."""

    def program(self, response: str) -> str | None:
        """Return the program in a model's response; None when there is none."""

    async def run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        """Run one test case; ``function`` is None for a program that reads and prints.

        Begins and ends the sample's ``timer`` around everything that runs the program. Raises ``DataError`` if the case
        cannot be judged, ``InfrastructureError`` if no program can be run at present.
        """

    def blames_program(self, num_done: int) -> bool:
        """Return True when a sample whose time is up, with ``num_done`` cases done, has used that time itself."""

    async def close(self) -> None:
        """End processes and connections."""
