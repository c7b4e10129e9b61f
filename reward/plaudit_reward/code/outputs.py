"""Compare what a program printed or returned with what a test case expects, as leniently as verl.

verl's ``prime_code`` tries one comparison after another; these are its results. Printed text is right when it equals
the expected one, but for blank lines and blanks around lines, or when all lines are numbers that are close. A result is
compared in the JSON form that the program's process wrote (``plaudit_sandbox.plain_values``), which the program may
have forged. It is never turned into a dict or set: keys are only looked up in those of the expected value, so that keys
with equal hashes cost no more than others.

With a ``tolerance`` text is compared word by word, and a result as JSON: tuples are lists, keys are text, and numbers
may differ by ``tolerance · max(1, |expected|)`` unless both are integers.

A program may print megabytes in any form. To read and compare them takes time that cannot be interrupted within a
process, and the worker's event loop has other samples to serve: large outputs are compared in a process
(``python -m plaudit_reward.code.outputs``) that is killed when it takes too much CPU time.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import math
import re
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from plaudit_sandbox.plain_values import encode, with_integer_keys
from plaudit_wire.errors import InfrastructureError

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""Closeness of numbers: numpy's ``allclose``, which verl calls."""
_MOST_DEPTH = 200
_LONGEST_NUMBER = 4_300
"""Characters of a line that is read as a number: Python's own limit for integers."""


def same_output(printed: str, expected: str) -> bool:
    """Return True when a program printed what it should."""
    lines = printed.splitlines()
    if any("\n".join(form).strip() == expected.strip() for form in (lines, [line.strip() for line in lines])):
        return True
    wanted = [line.strip() for line in expected.split("\n") if line]
    lines = [line for line in lines if line]
    return lines == wanted or _close(lines, wanted)


def _close(lines: Sequence[str], wanted: Sequence[str]) -> bool:
    if len(lines) != len(wanted) or all(a.isdigit() and b.isdigit() for a, b in zip(lines, wanted, strict=True)):
        return False
    if any(len(line) > _LONGEST_NUMBER for line in lines):
        return False
    try:
        numbers = [(float(a), float(b)) for a, b in zip(lines, wanted, strict=True)]
    except ValueError:
        return False
    return all(a == b or (math.isfinite(b) and abs(a - b) <= _ABSOLUTE + _RELATIVE * abs(b)) for a, b in numbers)


def same_result(returned: Any, expected: str) -> bool:
    """Return True when a function returned what it should.

    ``expected`` is the JSON text of the result, or of a list that holds it; keys that are numbers are compared as such.
    """
    wanted = _with_number_keys(json.loads(expected))
    value = _as_list(returned)
    if equals(value, wanted):
        return True
    if not (isinstance(wanted, list) and wanted):
        return False
    if equals(value, wanted[0]):
        return True
    rows = _content(value, "list")
    if not rows or _content(rows[0], "tuple") is None:
        return False
    return equals(["list", [_as_list(row) for row in rows]], wanted[0])


def equals(tree: Any, wanted: Any, depth: int = 0) -> bool:
    """Return True when any value in JSON form equals a Python value made of literals, as ``==`` would decide."""
    if depth > _MOST_DEPTH or isinstance(tree, dict):
        return False
    if not isinstance(tree, list):
        return isinstance(wanted, bool | int | float | complex | str | None) and bool(tree == wanted)
    if len(tree) != 2:
        return False
    kind, content = tree
    if not isinstance(kind, str):
        return False
    if kind in _SCALARS:
        return not isinstance(wanted, list | tuple | dict | set | frozenset) and _scalar(kind, content) == wanted
    if not isinstance(content, list):
        return False
    if isinstance(wanted, list | tuple) and type(wanted) is _ORDERED.get(kind):
        pairs = zip(content, wanted, strict=False)
        return len(content) == len(wanted) and all(equals(item, other, depth + 1) for item, other in pairs)
    if kind in {"set", "frozenset"} and isinstance(wanted, set | frozenset):
        found = {id(key) for key in _found_keys(content, {key: key for key in wanted})}
        return len(content) == len(wanted) == len(found)
    if kind in _MAPPINGS and isinstance(wanted, dict):
        return _equal_mapping(content, wanted, depth)
    return False


_ORDERED: dict[Any, type] = {"list": list, "tuple": tuple}
_MAPPINGS = ("dict", "Counter", "OrderedDict")


def _equal_mapping(pairs: list[Any], wanted: dict[Any, Any], depth: int) -> bool:
    if len(pairs) != len(wanted) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    keys = _found_keys([pair[0] for pair in pairs], {key: key for key in wanted})
    if len(keys) != len(pairs) or len({id(key) for key in keys}) != len(wanted):
        return False
    return all(equals(pair[1], wanted[key], depth + 1) for pair, key in zip(pairs, keys, strict=True))


def _found_keys(trees: list[Any], wanted: dict[Any, Any]) -> list[Any]:
    """Return the wanted keys that equal these, in order, up to the first that equals none."""
    found: list[Any] = []
    for tree in trees:
        key = _key(tree, 0)
        if key is _NO_KEY or key not in wanted:
            break
        found.append(wanted[key])
    return found


_NO_KEY = object()


def _key(tree: Any, depth: int) -> Any:
    """Return the hashable value of a key or of an item of a set; ``_NO_KEY`` when it is none."""
    if not isinstance(tree, list | dict):
        return tree
    if isinstance(tree, dict) or len(tree) != 2 or depth > _MOST_DEPTH:
        return _NO_KEY
    kind, content = tree
    if not isinstance(kind, str):
        return _NO_KEY
    if kind in _SCALARS:
        return _scalar(kind, content)
    parts = [_key(part, depth + 1) for part in content] if kind == "tuple" and isinstance(content, list) else [_NO_KEY]
    return _NO_KEY if any(part is _NO_KEY for part in parts) else tuple(parts)


_SCALARS = frozenset({"int", "float", "complex", "bytes"})


def _scalar(kind: str, content: Any) -> Any:
    try:
        if kind == "complex":
            real, imaginary = (_scalar(*part) if isinstance(part, list) else float(part) for part in content[1])
            return complex(real, imaginary)
        if kind == "int":
            return int(content, 16)
        return float(content) if kind == "float" else bytes.fromhex(content)
    except (TypeError, ValueError, OverflowError):
        return _NO_KEY


def _content(tree: Any, *kinds: str) -> list[Any] | None:
    """Return the items of a container of one of these kinds; None for anything else."""
    found = isinstance(tree, list) and len(tree) == 2 and tree[0] in kinds and isinstance(tree[1], list)
    return tree[1] if found else None


def _as_list(tree: Any) -> Any:
    """Return a tuple's form as that of a list, anything else as it is."""
    items = _content(tree, "tuple")
    return tree if items is None else ["list", items]


def _with_number_keys(wanted: Any) -> Any:
    inner = wanted if isinstance(wanted, list) and wanted else [wanted]
    if not isinstance(inner[0], dict) or with_integer_keys(inner[0]) is inner[0]:
        return wanted
    return [with_integer_keys(item) if isinstance(item, dict) else item for item in inner]


_INTEGER = re.compile(r"[+-]?[0-9]+")


def same_words(printed: str, expected: str, tolerance: float) -> bool:
    """Return True when two texts have the same words, numbers within the tolerance."""
    words, wanted = printed.split(), expected.split()
    return len(words) == len(wanted) and all(_same_word(*pair, tolerance) for pair in zip(words, wanted, strict=True))


def _same_word(word: str, wanted: str, tolerance: float) -> bool:
    if word == wanted:
        return True
    if max(len(word), len(wanted)) > _LONGEST_NUMBER or "_" in word + wanted:
        return False
    try:
        if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(wanted):
            return int(word) == int(wanted)
        return _near(float(word), float(wanted), tolerance)
    except ValueError:
        return False


def _near(number: float, wanted: float, tolerance: float) -> bool:
    return number == wanted or (
        math.isfinite(wanted) and abs(number - wanted) <= tolerance * max(1.0, abs(wanted)) and math.isfinite(number)
    )


def same_json(tree: Any, wanted: Any, tolerance: float, depth: int = 0) -> bool:
    """Return True when a value in JSON form is a JSON value, numbers within the tolerance."""
    if depth > _MOST_DEPTH or isinstance(tree, dict):
        return False
    if isinstance(wanted, list):
        items = _content(tree, *_ORDERED)
        return (
            items is not None
            and len(items) == len(wanted)
            and all(same_json(*pair, tolerance, depth + 1) for pair in zip(items, wanted, strict=True))
        )
    if isinstance(wanted, dict):
        pairs = _content(tree, *_MAPPINGS)
        return pairs is not None and _same_members(pairs, wanted, tolerance, depth)
    value = _scalar(*tree) if isinstance(tree, list) and len(tree) == 2 and tree[0] in {"int", "float"} else tree
    if isinstance(wanted, float) or (isinstance(value, float) and isinstance(wanted, int)):
        return isinstance(value, int | float) and _near(float(value), float(wanted), tolerance)
    return not isinstance(value, list) and bool(value == wanted)


def _same_members(pairs: list[Any], wanted: dict[str, Any], tolerance: float, depth: int) -> bool:
    if len(pairs) != len(wanted) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    names = [_member_name(pair[0]) for pair in pairs]
    return set(names) == wanted.keys() and all(
        same_json(pair[1], wanted[name], tolerance, depth + 1) for name, pair in zip(names, pairs, strict=True)
    )


def _member_name(key: Any) -> str:
    """Return a key as JSON writes it."""
    value = _scalar(*key) if isinstance(key, list) and len(key) == 2 and key[0] in {"int", "float"} else key
    return value if isinstance(value, str) else json.dumps(value)


def _same_json_result(returned: Any, expected: str, tolerance: float) -> bool:
    wanted = json.loads(expected)
    inner = wanted[:1] if isinstance(wanted, list) else []  # as in verl, a list may hold the result
    return any(same_json(returned, each, tolerance) for each in (wanted, *inner))


def _same_text(written: str, expected: str, tolerance: float) -> bool:
    """Compare what a server's program printed: a function's result is JSON there."""
    with contextlib.suppress(ValueError, RecursionError):
        return same_json(encode(json.loads(written)), json.loads(expected), tolerance)
    return same_words(written, expected, tolerance)


OutputForm = Literal["printed", "result", "literals", "printed beside", "same text"]
"""The form of the output: printed text; a function's result; answers to an assert's calls, compared with literals; the
printed text beside such answers; printed text that must be the same except for final line ends (Sandbox Fusion)."""


def judge(form: OutputForm, written: bytes, expected: str, tolerance: float | None = None) -> bool:
    """Return True when a program wrote what is expected; never raises for what a program can write."""
    try:
        if tolerance is not None and form in _TOLERANT:
            return _TOLERANT[form](written, expected, tolerance)
        return _JUDGES[form](written, expected)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError):
        return False


def _literals(written: bytes, expected: str) -> bool:
    answers = json.loads(written)["answers"]
    return all(
        "value" in answers[number] and equals(answers[number]["value"], ast.literal_eval(source))
        for number, source in json.loads(expected)
    )


_JUDGES: dict[OutputForm, Callable[[bytes, str], bool]] = {
    "printed": lambda written, expected: same_output(written.decode("utf-8", "replace"), expected),
    "result": lambda written, expected: same_result(json.loads(written), expected),
    "literals": _literals,
    "printed beside": lambda written, expected: same_output(json.loads(written)["printed"], expected),
    "same text": lambda written, expected: (
        written.decode("utf-8", "surrogatepass").rstrip("\n") == expected.rstrip("\n")
    ),
}
_TOLERANT: dict[OutputForm, Callable[[bytes, str, float], bool]] = {
    "printed": lambda written, *rest: same_words(written.decode("utf-8", "replace"), *rest),
    "result": lambda written, *rest: _same_json_result(json.loads(written), *rest),
    "printed beside": lambda written, *rest: same_words(json.loads(written)["printed"], *rest),
    "same text": lambda written, *rest: _same_text(written.decode("utf-8", "replace"), *rest),
}
_SMALL_BYTES = 1 << 16
"""Output up to this length is compared in the worker: a millisecond or two."""
_WITHIN_S = 20.0
"""CPU seconds; an honest output of 16 MiB takes about two."""
_LONGEST_WAIT_FACTOR = 10.0
"""By the clock: a process that gets less of a processor is the machine's fault."""
_MEMORY_BYTES = 4 << 30
_LENGTH = struct.Struct("<I")


class _Task(msgspec.Struct, array_like=True):
    """Request one comparison."""

    form: OutputForm
    written: bytes
    expected: str
    tolerance: float | None


_decoder = msgspec.msgpack.Decoder(_Task)


class OutputComparison:
    """Compare outputs; start the process when it is first needed, and again after one that was killed.

    Args:
        tolerance: of numbers; None: text and results are compared as verl does.
        within_s: CPU seconds of one comparison.
    """

    def __init__(self, tolerance: float | None = None, within_s: float = _WITHIN_S) -> None:
        self._tolerance = tolerance
        self._within_s = within_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def compare(self, form: OutputForm, written: bytes, expected: str) -> bool:
        """Return True when a program wrote what is expected.

        Output that cannot be compared within the limits on CPU time and memory is wrong: an honest program's can.

        Raises ``InfrastructureError`` if there is no process, or no processor, for it.
        """
        if len(written) <= _SMALL_BYTES:
            return judge(form, written, expected, self._tolerance)
        async with self._turn:
            try:
                async with asyncio.timeout(max(1.0, self._within_s) * _LONGEST_WAIT_FACTOR):
                    return await self._compare(_Task(form, written, expected, self._tolerance))
            except (EOFError, ConnectionError):
                await self.close()
                return False
            except TimeoutError:
                await self.close()
                raise InfrastructureError("the process that compares outputs gets too little of a processor") from None
            except OSError as error:
                raise InfrastructureError(f"no process can be started to compare outputs: {error}") from error
            except BaseException:
                await self.close()
                raise

    async def _compare(self, task: _Task) -> bool:
        if self._process is None:
            command = [sys.executable, "-P", "-m", "plaudit_reward.code.outputs", str(self._within_s)]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        body = msgspec.msgpack.encode(task)
        self._process.stdin.write(_LENGTH.pack(len(body)) + body)
        await self._process.stdin.drain()
        return await self._process.stdout.readexactly(1) == b"\x01"

    async def close(self) -> None:
        """End the process; a later comparison starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Compare until the worker closes the pipe or ends; SIGPROF ends this process after a comparison's CPU time."""
    within_s = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tasks, verdicts = sys.stdin.buffer, sys.stdout.buffer
    while header := tasks.read(_LENGTH.size):
        task = _decoder.decode(tasks.read(_LENGTH.unpack(header)[0]))
        signal.setitimer(signal.ITIMER_PROF, within_s)
        verdict = judge(task.form, task.written, task.expected, task.tolerance)
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdicts.write(bytes([verdict]))
        verdicts.flush()


if __name__ == "__main__":
    main()
