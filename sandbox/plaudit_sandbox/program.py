"""Run a model's program: confine its process, which the template has just forked, run the program there, exit.

Three forms: a function that is called with arguments; a program as verl runs it; a program as ``python program.py``
runs it. verl's form puts everything from the first line on that is no import into a function, replaces ``sys.stdin`` by
a ``StringIO``, and ``exit`` and ``subprocess`` by nothing. Correct programs fail in it when they call ``exit()``, read
``sys.stdin.buffer`` or ``open(0)``, use ``from … import *`` or ``global``, or break an import over several lines; it is
the default because scores must equal verl's (``prime_code``); ``as_script`` avoids it.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import sys
import threading
import types
from typing import Any, NoReturn

import msgspec

from plaudit_sandbox import confinement
from plaudit_sandbox.assert_calls import perform_calls
from plaudit_sandbox.assert_evaluation import evaluate
from plaudit_sandbox.confinement import architecture, filter_program, install
from plaudit_sandbox.lifetime import end_with
from plaudit_sandbox.plain_values import encode
from plaudit_sandbox.sandbox import PREAMBLE, RunProgram, limit_this_process


def encode_result(value: Any) -> str:
    """Return a function's result as JSON that keeps what JSON does not: tuples, and keys that are no strings.

    Raises ``TypeError``, ``ValueError`` or ``RecursionError`` if plain JSON has no form for it.
    """
    json.dumps(value)
    return json.dumps(encode(value))


_RECURSION_LIMIT = 600_000
_FILE_NAME = "<program>"


def run_program(run: RunProgram) -> None:
    """Run it; its output or result is then on file descriptor 1."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    if run.part == "calls":
        perform_calls(run.source, run.payload)
    elif run.part == "evaluation":
        evaluate(run.source, run.payload)
    elif run.function is not None:
        _call_function(run.source, run.function)
    elif run.as_script:
        _run_script(run.source)
    else:
        _run_as_verl_does(run.source)


def _call_function(source: str, name: str) -> None:
    arguments = [json.loads(line) for line in _stdin_text().split("\n")]
    if arguments and isinstance(arguments[0], dict):  # JSON has text keys only; verl converts them back
        arguments = [{int(key): item for key, item in arguments[0].items()}]
    _remove_modules()
    sys.stdout = _Discard()
    module = _module("tmp_sol", PREAMBLE + source)
    holder = module.Solution() if "class Solution" in source else module
    result = getattr(holder, name)(*arguments)
    _write(encode_result(result))


def _run_script(source: str) -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the program's own
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        _module("__main__", PREAMBLE + source)
        _join_threads()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        sys.stdout.flush()


def _run_as_verl_does(source: str) -> None:
    text = _stdin_text()
    _remove_modules()
    sys.stdin, sys.stdout = _EarlyStdin(text), _Discard()
    module = _module("tmp_sol", PREAMBLE + as_function(source))
    captured = _Captured()
    sys.stdin, sys.stdout = io.StringIO(text), captured
    try:
        module.code()
        _join_threads()
    except SystemExit:
        pass
    _write(captured.getvalue())


def as_function(source: str) -> str:
    """Return the program's text with all but its leading imports inside a function ``code``, as verl does."""
    written: list[str] = []
    started = False
    for line in _without_main_guard(source).split("\n"):
        is_import = line.startswith(("from ", "import "))
        if not is_import and not started:
            written.append("stdin = sys.stdin\nstdout = sys.stdout\ndef code():\n")
            started = True
        written.append(f"\t{line}\n" if started else f"{line}\n")
    return "".join(written)


def _without_main_guard(source: str) -> str:
    """Return the text with a final ``if __name__ == '__main__'`` replaced by its body."""
    try:
        body = ast.parse(source).body
        last = body[-1]
        if isinstance(last, ast.If) and ast.unparse(last.test).strip() == "__name__ == '__main__'":
            return "\n".join(ast.unparse(ast.Module(part, [])) for part in (body[:-1], last.body))
    except (SyntaxError, ValueError, IndexError, RecursionError):
        pass  # it runs unchanged and raises its own error
    return source


def _module(name: str, source: str) -> Any:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, _FILE_NAME, "exec"), module.__dict__)  # noqa: S102 - the purpose of this process
    return module


def _remove_modules() -> None:
    """Remove what verl removes: this is no protection, but programs that use it fail in verl."""
    vars(builtins).update(exit=None, quit=None)
    for name in ("ctypes", "ipdb", "joblib", "psutil", "resource", "subprocess", "tkinter"):
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails


def _join_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _stdin_text() -> str:
    with open(0, encoding="utf-8", closefd=False, newline="") as stdin:
        return stdin.read()


def _write(text: str) -> None:
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(1, data) :]


class _EarlyStdin(io.TextIOWrapper):
    """``sys.stdin`` as verl's programs have it before they are called: lines without their ends."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._text = text
        self._lines = iter(text.split("\n"))

    def read(self, *_: Any) -> str:
        return self._text

    def readline(self, *_: Any) -> str:  # type: ignore[override]
        return next(self._lines)

    def readlines(self, *_: Any) -> list[str]:  # type: ignore[override]
        return self._text.split("\n")


class _Captured(io.StringIO):
    """Keep the output, also when the program closes the stream."""

    def close(self) -> None:
        """Keep the stream open."""


class _Discard(io.TextIOBase):
    """Discard the output."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


RAISED = 1
"""Exit code when the program raised."""
CONFINED = b"\x06"
"""Comes first on standard error, when the process is confined and the program begins."""
_RULESET = 3
"""File descriptor of Landlock's ruleset while all others are closed."""
_REASON_CHARACTERS = 300
_decoder = msgspec.msgpack.Decoder(RunProgram)


def run_and_leave(task: int, streams: tuple[int, int, int], ruleset: int | None, template: int) -> NoReturn:
    """Run the program in this process, then exit.

    ``task``: file with the ``RunProgram``; ``ruleset``: of Landlock, None where the kernel has none.
    """
    code = RAISED
    try:
        run = read_task(task)
        _confine(run, streams, ruleset, template)
        os.write(2, CONFINED)
        run_program(run)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) and ended.code else RAISED
    except BaseException as error:
        _report(error)
    finally:
        os._exit(code & 0xFF)  # whatever happens, a program must not return into the template's code


def read_task(task: int) -> RunProgram:
    """Read the program from the file that the supervising process wrote."""
    with open(task, "rb") as file:
        return _decoder.decode(file.read())


def _confine(run: RunProgram, streams: tuple[int, int, int], ruleset: int | None, template: int) -> None:
    """Take away everything a program could use against others; the template has given up all privileges before."""
    end_with(template)
    os.setsid()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    if ruleset is not None:
        os.dup2(ruleset, _RULESET)
    os.closerange(3 if ruleset is None else _RULESET + 1, os.sysconf("SC_OPEN_MAX"))
    limit_this_process(run.limits)
    if ruleset is not None:
        confinement.restrict(_RULESET)
        os.close(_RULESET)
    os.environ.clear()
    sys.argv = ["program.py"]
    install(filter_program(architecture(), os.getpid(), opens=ruleset is not None))


def _report(error: BaseException) -> None:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the program's own __str__
        text = type(error).__name__
    line = " ".join(text.split())[:_REASON_CHARACTERS]
    try:
        os.write(2, f"\n{line}".encode(errors="replace"))
    except OSError:
        return  # it closed its standard error
