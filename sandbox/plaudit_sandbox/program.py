"""Run a model's program: confine its process, which the template has just forked, run the program there, exit.

Three forms: a function that is called with arguments; a program as verl runs it; a program as ``python program.py``
runs it. verl's form puts everything from the first line on that is no import into a function, and replaces ``exit`` and
``subprocess`` by nothing. Correct programs fail in it when they call ``exit()``, use ``from … import *`` or ``global``,
or break an import over several lines; it is the default because scores must equal verl's (``prime_code``);
``as_script`` avoids it. ``sys.stdin.buffer``, ``sys.stdout.buffer`` and ``open(0)`` fail in verl as well; here they
work in every form.

Whatever the test case alone decides is done before the program may begin: an error there is the row's, and the
program, which has not run yet, cannot pretend it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import msgspec

from plaudit_sandbox import confinement
from plaudit_sandbox.assert_calls import perform_calls
from plaudit_sandbox.assert_evaluation import evaluate
from plaudit_sandbox.confinement import architecture, filter_program, install
from plaudit_sandbox.plain_values import encode, with_integer_keys
from plaudit_sandbox.privileges import end_with
from plaudit_sandbox.sandbox import PREAMBLE, RunProgram, limit_this_process


def encode_result(value: Any) -> str:
    """Return a function's result as JSON that keeps what JSON does not: tuples, and keys that are no strings.

    Raises ``TypeError``, ``ValueError`` or ``RecursionError`` if plain JSON has no form for it.
    """
    json.dumps(value)
    return json.dumps(encode(value))


_RECURSION_LIMIT = 600_000
_FILE_NAME = "<program>"


def prepared(run: RunProgram) -> Callable[[], None]:
    """Return what runs the program; its output or result is then on file descriptor 1.

    Raises whatever the test case's input raises, before any of the program runs.
    """
    if run.part == "calls":
        return partial(perform_calls, run.source, run.payload)
    if run.part == "evaluation":
        return partial(evaluate, run.source, run.payload)
    if run.function is not None:
        return partial(_call_function, run.source, run.function, arguments_of(_stdin_text()))
    if run.as_script:
        return partial(_run_script, run.source)
    return partial(_run_as_verl_does, run.source, _stdin_text())


def arguments_of(text: str) -> list[Any]:
    """Return a function's arguments, one JSON text a line; none for a blank text.

    JSON has text keys only. As in verl those of a first argument become integers where all of them are; those of
    further ones, which verl drops then, do as well.
    """
    arguments = [json.loads(line) for line in text.split("\n")] if text.strip() else []
    first = arguments[0] if arguments else None
    if isinstance(first, dict) and with_integer_keys(first) is not first:
        return [with_integer_keys(item) if isinstance(item, dict) else item for item in arguments]
    return arguments


def _call_function(source: str, name: str, arguments: list[Any]) -> None:
    _remove_modules()
    sys.stdout = _Discard()
    in_class = "class Solution" in source
    # Without the next line an empty program would pass where the preamble has such a name, as it has operator.add.
    forget = "" if in_class else f"globals().pop({name!r}, None)"
    module = _module("tmp_sol", source, forget)
    holder = module.Solution() if in_class else module
    result = getattr(holder, name)(*arguments)
    _write(encode_result(result))


def _run_script(source: str) -> None:
    stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the program's own
    stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    _set_streams(stdin, stdout)
    try:
        _module("__main__", source)
        _join_threads()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        _flush(stdout)


def _run_as_verl_does(source: str, text: str) -> None:
    _remove_modules()
    os.lseek(0, 0, os.SEEK_SET)  # for programs that open file descriptor 0 themselves
    sys.stdin, sys.stdout = _EarlyStdin(text), _Discard()
    module = _module("tmp_sol", as_function(source))
    captured = _Captured()
    _set_streams(_Stdin(io.BytesIO(text.encode()), encoding="utf-8", newline="\n"), captured)
    try:
        module.code()
        _join_threads()
    except SystemExit:
        pass
    _flush(captured)
    _write_bytes(captured.buffer.getvalue())


def _set_streams(stdin: io.TextIOWrapper, stdout: io.TextIOWrapper) -> None:
    """Make these the process's, and keep them: one that a program wraps anew and drops would close its buffer."""
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]


def _flush(stdout: io.TextIOWrapper) -> None:
    """Flush what the program printed, also to a stream of its own in place of ours, as Python does at its end."""
    for stream in (sys.stdout, stdout):
        with contextlib.suppress(Exception):  # closed, or no stream at all
            stream.flush()


_IMPORTS = ("from ", "import ")
_BEFORE_THE_BODY = "stdin = sys.stdin\nstdout = sys.stdout\ndef code():\n"


def as_function(source: str) -> str:
    """Return the program's text with all but its leading imports inside a function ``code``, as verl does."""
    written: list[str] = []
    started = False
    for line in _without_main_guard(source).split("\n"):
        if not line.startswith(_IMPORTS) and not started:
            written.append(_BEFORE_THE_BODY)
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


def _place(error: BaseException, run: RunProgram) -> str:
    """Return the line of the program, as the model wrote it, in which an error arose; empty where there is none."""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == _FILE_NAME else None
    trace = error.__traceback__
    while trace is not None and not isinstance(error, SyntaxError):
        if trace.tb_frame.f_code.co_filename == _FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    beside_the_fence = run.source.lstrip(" \t\r").startswith("\n")  # the program's first line is the one below
    written = _written_line(run, line or 0) - beside_the_fence
    return f" (line {written})" if written > 0 else ""


def _written_line(run: RunProgram, line: int) -> int:
    """Return the line of a run's source that stands in a line of the text that was compiled for it."""
    if run.part != "program":
        return line if run.part == "calls" else 0
    if run.as_script or run.function is not None:
        return line
    bare = _without_main_guard(run.source)
    lines = bare.split("\n")
    num_imports = next((i for i, text in enumerate(lines) if not text.startswith(_IMPORTS)), len(lines))
    if line > num_imports:
        line -= _BEFORE_THE_BODY.count("\n")
    if bare == run.source or line < 1:
        return line
    *body, guard = ast.parse(run.source).body
    assert isinstance(guard, ast.If)
    pairs = zip(_statements([*body, *guard.body]), _statements(ast.parse(bare).body), strict=False)
    starts = [(after.lineno, before.lineno) for before, after in pairs if after.lineno <= line]
    return max(starts, default=(0, 0))[1]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    return (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.stmt))


def _module(name: str, source: str, before: str = "") -> Any:
    """Run the text as a module, after the usual imports and ``before``."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(f"{PREAMBLE}{before}", module.__dict__)  # noqa: S102 - imports of the standard library
    code = compile(source, _FILE_NAME, "exec", dont_inherit=True)  # not this file's own __future__
    exec(code, module.__dict__)  # noqa: S102 - the purpose of this process
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
    _write_bytes(text.encode("utf-8", "surrogatepass"))


def _write_bytes(content: bytes) -> None:
    data = memoryview(content)
    while data:
        data = data[os.write(1, data) :]


class _EarlyStdin(io.TextIOWrapper):
    """``sys.stdin`` as verl's programs have it before they are called: lines without their ends."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")
        self._text = text
        self._lines = iter(text.split("\n"))

    def read(self, *_: Any) -> str:
        return self._text

    def readline(self, *_: Any) -> str:  # type: ignore[override]
        return next(self._lines)

    def readlines(self, *_: Any) -> list[str]:  # type: ignore[override]
        return self._text.split("\n")


class _Stdin(io.TextIOWrapper):
    """The input, which can also be read from its file descriptor."""

    mode = "r"

    def fileno(self) -> int:
        """Return the descriptor of the input, which has not been read."""
        return 0


class _Captured(io.TextIOWrapper):
    """Keep the output, also when the program closes the stream."""

    buffer: io.BytesIO
    mode = "w"

    def __init__(self) -> None:
        bytes_alone = {"encoding": "utf-8", "errors": "surrogatepass", "newline": "\n", "write_through": True}
        super().__init__(io.BytesIO(), **bytes_alone)  # type: ignore[arg-type]

    def close(self) -> None:
        """Keep the stream open."""

    def fileno(self) -> int:
        """Return the descriptor of the output; what is written to it stands before the rest."""
        return 1


class _Discard(io.TextIOBase):
    """Discard the output."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


RAISED = 1
"""Exit code when the program raised."""
UNPREPARED = 2
"""Exit code, before ``CONFINED``, when the test case's own input cannot be read."""
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
    code, run = RAISED, RunProgram("")
    try:
        run = read_task(task)
        _confine(run, streams, ruleset, template)
        code = UNPREPARED
        begin = prepared(run)
        code = RAISED
        os.write(2, CONFINED)
        sys.setrecursionlimit(_RECURSION_LIMIT)
        begin()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) and ended.code else RAISED
    except BaseException as error:
        _report(error, run)
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


def _report(error: BaseException, run: RunProgram) -> None:
    try:
        message = error.msg if isinstance(error, SyntaxError) and error.filename == _FILE_NAME else str(error)
        text = f"{type(error).__name__}: {message}"
    except Exception:  # the program's own __str__
        text = type(error).__name__
    line = " ".join(text.split())[:_REASON_CHARACTERS] + _place(error, run)
    try:
        os.write(2, f"\n{line}".encode(errors="replace"))
    except OSError:
        return  # it closed its standard error
