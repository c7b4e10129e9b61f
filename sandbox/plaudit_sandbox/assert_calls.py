"""Perform, inside the program's process, the calls that an assert makes of it.

An operation is ``{"do": "call" | "get" | "name", "on": …}``: it calls an object, reads an attribute of it, or reads a
global variable. ``on`` is the name of a global variable, the number of an earlier answer, or ``["object", number]``.
An answer is ``{"value": …}`` or ``{"raised": [names of exception classes, message]}``; ``changed`` holds the arguments
that the call changed in place. Nobody trusts this process: it never holds what the assert expects, and its answers are
only values. Standard library only: Sandbox Fusion runs this file's text.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import sys
import types
from typing import Any

from plaudit_sandbox.plain_values import decode, encode


def perform_calls(source: str, payload: str) -> None:
    """Run the program, perform the operations, write the answers to file descriptor 1. Raises what the program raises.

    ``payload`` is the JSON of ``operations``; ``preamble``, imports that the program may use without its own; and
    ``printed``: whether to return what the program prints.
    """
    task = json.loads(payload)
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)
    sys.stdout = printed
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    provided = dict(vars(builtins))
    exec(task["preamble"], provided)  # noqa: S102 - names that are no definitions of the program
    module.__dict__["__builtins__"] = provided
    with contextlib.suppress(SystemExit):  # the functions that it has defined are still tested
        code = compile(source, "<program>", "exec", dont_inherit=True)  # not this file's own __future__
        exec(code, module.__dict__)  # noqa: S102 - the purpose of this process
    session = _Session(module.__dict__)
    answers = [session.answer(operation) for operation in task["operations"]]
    text = printed.buffer.getvalue().decode("utf-8", "replace") if task["printed"] else ""
    data = memoryview(json.dumps({"answers": answers, "printed": text}).encode())
    while data:
        data = data[os.write(1, data) :]


class _Session:
    """Hold the program's objects that operations refer to."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._objects: list[Any] = []
        self._results: list[Any] = []

    def answer(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Perform one operation."""
        changed: dict[str, Any] = {}
        try:
            self._results.append(self._perform(operation, changed))
        except BaseException as error:  # the program's own code: exits included
            self._results.append(None)
            return _raised(error, changed)
        try:
            return {"value": encode(self._results[-1], self._keep), "changed": changed}
        except BaseException as error:
            return _raised(error, changed)

    def _perform(self, operation: dict[str, Any], changed: dict[str, Any]) -> Any:
        on = self._resolve(operation["on"])
        if operation["do"] == "name":
            return on
        if operation["do"] == "get":
            return getattr(on, operation["attribute"])
        positional = [decode(tree, self._refer) for tree in operation["args"]]
        named = {name: decode(tree, self._refer) for name, tree in operation["kwargs"].items()}
        try:
            return on(*positional, **named)
        finally:
            for index, value in enumerate(positional):
                if isinstance(value, (list, dict, set, bytearray)):
                    after = encode(value, self._keep)
                    if after != operation["args"][index]:
                        changed[str(index)] = after

    def _resolve(self, on: Any) -> Any:
        if isinstance(on, str):
            if on not in self._namespace:
                raise NameError(f"the program does not define {on}")
            return self._namespace[on]
        return self._results[on] if isinstance(on, int) else self._objects[on[1]]

    def _refer(self, number: int) -> Any:
        """Return a program's object; negative numbers are answers, -1 the first."""
        return self._objects[number] if number >= 0 else self._results[-1 - number]

    def _keep(self, value: Any) -> int:
        for number, kept in enumerate(self._objects):
            if kept is value:
                return number
        self._objects.append(value)
        return len(self._objects) - 1


def _raised(error: BaseException, changed: dict[str, Any]) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    return {"raised": [names, _message(error)], "changed": changed}


def _message(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except Exception:  # the program's own __str__
        return ""
