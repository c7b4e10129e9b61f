"""Evaluate the text of an assert in a process that the program's code never enters.

Names that belong to the program stand for calls of it. Their answers are given beforehand, as plain values in the order
in which the text asks for them. Where an answer is missing, the evaluation goes on as if every comparison were true,
collects the operations that the text will need next, and reports them in place of a verdict. Standard library only:
Sandbox Fusion runs this file's text.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import operator
import os
import sys
from typing import Any

from plaudit_sandbox.plain_values import decode, encode

MOST_NEEDED = 1_000
"""Operations that are collected beyond the answered ones."""
_READING = ("len", "iter", "getitem", "contains", "next", "str", "repr", "int", "float", "index", "round", "reversed")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPUTING = "abs neg pos add radd sub rsub mul rmul truediv rtruediv floordiv mod pow matmul and or xor".split()  # noqa: SIM905
_ABSORBING = ("abs", "all", "any", "float", "int", "len", "list", "max", "min", "round", "set", "sorted", "str", "sum")


def evaluate(text: str, payload: str) -> None:
    """Evaluate an assert and write the verdict to file descriptor 1.

    The verdict is one of ``{"passed": true}``, ``{"failed": message, "used": number of answers}`` and
    ``{"needed": operations, "kept": number of answers that hold}``.

    ``payload`` is the JSON of ``preamble``; ``names`` of the program; ``modules`` by the names that the text gives
    them; and ``operations`` so far. What the program's process wrote for these is on standard input.
    """
    task = json.loads(payload)
    session = _Session(task)
    namespace: dict[str, Any] = {"__name__": "__assert__"}
    sys.stdout = io.StringIO()
    failure = None
    try:
        exec(task["preamble"], namespace)  # noqa: S102 - the usual imports
        for name, module in task["modules"].items():
            namespace[name] = importlib.import_module(module)
        if not session.num_answers:
            namespace.update({name: _absorbing(getattr(builtins, name)) for name in _ABSORBING})
        namespace.update({name: _Program(session, name) for name in task["names"]})
        exec(compile(text, "<assert>", "exec"), namespace)  # noqa: S102 - the data set's own text
    except BaseException as error:  # exits included
        failure = f"{type(error).__name__}: {error}"[:300]
    verdict: dict[str, Any] = {"passed": True}
    if session.needed:
        verdict = {"needed": session.needed, "kept": session.used}
    elif failure is not None:
        verdict = {"failed": failure, "used": session.used}
    data = memoryview(json.dumps(verdict).encode())
    while data:
        data = data[os.write(1, data) :]


class _Session:
    """Hold the answers of the program's process, in order."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._operations = task["operations"]
        self._answers = json.load(open(0, encoding="utf-8"))["answers"] if self._operations else []  # noqa: SIM115
        if len(self._answers) != len(self._operations):
            raise ValueError("the program's process did not answer every operation")
        self.num_answers = len(self._answers)
        self.used = 0
        self.needed: list[dict[str, Any]] = []

    def ask(self, operation: dict[str, Any], arguments: tuple[Any, ...] = ()) -> Any:
        """Return the answer to an operation, or something that stands for it; raise what the program raised."""
        index = self.used + len(self.needed)
        if not self.needed and index < len(self._answers) and self._operations[index] == operation:
            self.used += 1
            return self._read(self._answers[index], arguments)
        if len(self.needed) == MOST_NEEDED:
            raise _StopError("too many calls")
        self.needed.append(operation)
        return _Unknown(self, index)

    def refer(self, number: int) -> Any:
        """Return what stands for an object of the program."""
        return _Program(self, ["object", number])

    def _read(self, answer: Any, arguments: tuple[Any, ...]) -> Any:
        for position, tree in answer.get("changed", {}).items():
            _replace(arguments[int(position)], decode(tree, self.refer))
        if "raised" in answer:
            names, message = answer["raised"]
            raise _exception_class(names)(str(message))
        return decode(answer["value"], self.refer)


class _StopError(BaseException):
    """The operations that follow depend on answers that are missing."""


class _Program:
    """Stand for a global variable or an object of the program; compare by identity."""

    __hash__ = object.__hash__

    def __init__(self, session: _Session, on: Any) -> None:
        self.__dict__["_plaudit_session"] = session
        self.__dict__["_plaudit_on"] = on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._plaudit_call(*args, **kwargs)
        except StopIteration as error:  # it would end map, zip and for, as if there were nothing more to test
            raise RuntimeError("a function of the program raised StopIteration") from error

    def _plaudit_call(self, *args: Any, **kwargs: Any) -> Any:
        operation = {
            "do": "call",
            "on": self._plaudit_on,
            "args": [encode(_value_of(argument), _number_of) for argument in args],
            "kwargs": {name: encode(_value_of(argument), _number_of) for name, argument in kwargs.items()},
        }
        return self._plaudit_session.ask(operation, args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name[2:-2] not in _READING:
            raise AttributeError(name)
        return self._plaudit_session.ask({"do": "get", "on": self._plaudit_on, "attribute": name})

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("an assert cannot set attributes of the program's objects")

    def _plaudit_value(self) -> Any:
        """Return the value of a global variable; an object of the program stands for itself."""
        if not isinstance(self._plaudit_on, str):
            return self
        return self._plaudit_session.ask({"do": "name", "on": self._plaudit_on})

    def __bool__(self) -> bool:
        value = self._plaudit_value()
        return True if isinstance(value, _Program) else bool(value)

    def __eq__(self, other: object) -> Any:
        value = self._plaudit_value()
        if not isinstance(value, _Program):
            return value == other
        return isinstance(other, _Program) and bool(value._plaudit_on == other._plaudit_on)


class _Unknown(_Program):
    """Stand for an answer that is missing: every comparison is true, every computation unknown again."""

    __hash__ = object.__hash__

    def _plaudit_value(self) -> Any:
        return self

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        raise _StopError("unknown items")


class _Computed(_Unknown):
    """Stand for what was computed from a missing answer; no operation can refer to it."""

    def __getattr__(self, name: str) -> Any:
        raise _StopError("unknown object")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _StopError("unknown function")


def _value_of(argument: Any) -> Any:
    return argument._plaudit_value() if isinstance(argument, _Program) else argument


def _number_of(value: Any) -> int:
    """Return the number by which the program's process finds an object."""
    if isinstance(value, _Computed):
        raise _StopError("unknown argument")
    if isinstance(value, _Program):
        on = value._plaudit_on
        return -1 - on if isinstance(on, int) else int(on[1])
    raise TypeError(f"a value of type {type(value).__name__} cannot be passed to the program")


def _replace(argument: Any, value: Any) -> None:
    """Give an argument the content that the program's call left in it."""
    if isinstance(argument, (list, bytearray)) and isinstance(value, (list, bytearray)):
        argument[:] = value
    elif isinstance(argument, (dict, set)) and isinstance(value, (dict, set)):
        argument.clear()
        argument.update(value)


def _exception_class(names: list[str]) -> type[BaseException]:
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return type(name, (kind,), {"__init__": lambda self, message: Exception.__init__(self, message)})
    return RuntimeError


def _absorbing(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(argument, _Unknown) for argument in args):
            return _Computed(args[0]._plaudit_session, None)
        return function(*args, **kwargs)

    return call


def _reading(name: str) -> Any:
    special = f"__{name}__"

    def read(self: Any, *args: Any) -> Any:
        value = self._plaudit_value()
        if isinstance(value, _Program):
            return value.__getattr__(special)._plaudit_call(*args)
        return getattr(value, special)(*args)

    return read


def _comparing(name: str) -> Any:
    compare = getattr(operator, name)

    def of_program(self: Any, other: Any) -> Any:
        value = self._plaudit_value()
        if isinstance(value, _Program):
            return not value.__eq__(other) if name == "ne" else NotImplemented
        return compare(value, other)

    return of_program


for _name in _READING:
    setattr(_Program, f"__{_name}__", _reading(_name))
for _name in _COMPARING[1:]:
    setattr(_Program, f"__{_name}__", _comparing(_name))
for _name in _COMPARING:
    setattr(_Unknown, f"__{_name}__", lambda self, *_: True)
for _name in _COMPUTING:
    setattr(_Unknown, f"__{_name}__", lambda self, *_: _Computed(self._plaudit_session, None))
