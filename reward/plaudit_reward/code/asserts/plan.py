"""Read the text of an assert: which names belong to the program, and what it calls when that can be seen at once.

The text of a test is evaluated outside the program's process, so its names are divided: what the text binds itself,
the usual imports and builtins are the evaluating process's own; the rest is the program's. Where no name is left, the
text tests a program that defines a name of the usual imports (``add``, ``gcd``), or else a builtin (``sum``).
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

from plaudit_reward.code.sandbox.plain_values import encode
from plaudit_reward.code.sandbox.preamble import PREAMBLE
from plaudit_wire.errors import DataError

_ALIASES = {"np": "numpy", "pd": "pandas", "numpy": "numpy", "pandas": "pandas", "pytest": "pytest"}


class AssertPlan(NamedTuple):
    """The steps that evaluate one assert."""

    text: str
    names: tuple[str, ...]
    """Global names of the program."""
    modules: dict[str, str]
    """Modules that the text uses without an import, by the names that it gives them."""
    operations: list[dict[str, Any]]
    """Operations of the program, where the text compares calls with literals and nothing else."""
    expected: list[tuple[int, str]]
    """Number of the answer and source of the literal that it must equal, in that case."""

    @property
    def is_literal(self) -> bool:
        """Return True when every statement compares a call with a literal."""
        return bool(self.expected)


@lru_cache(maxsize=4096)
def plan_of(text: str) -> AssertPlan:
    """Read the text of an assert; raise ``DataError`` if it is no Python, or uses nothing of the program."""
    try:
        tree = ast.parse(text)
        names, modules = _names(tree)
        operations, expected = _literal_checks(tree, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"ground_truth.assert_case: {error} in {text[:200]!r}; give Python statements") from error
    if not names:
        raise DataError(
            f"ground_truth.assert_case: {text[:200]!r} uses no name of the program, so that every program would pass; "
            "assert something about what the program defines"
        )
    return AssertPlan(text, names, modules, operations, expected)


def _names(tree: ast.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = set(_bound(tree))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    bases = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    unknown = loaded - bound - _provided().keys()
    known = _ALIASES.keys() | sys.stdlib_module_names
    modules = {name: _ALIASES.get(name, name) for name in (unknown & bases - called) & known}
    unknown -= modules.keys()
    if unknown:
        return tuple(sorted(unknown)), modules
    used = _passed_to(tree, bound) - bound or called - bound
    imported = {name for name in used - vars(builtins).keys() if callable(_provided().get(name))}
    functions = {name for name in imported if not isinstance(_provided()[name], type)}
    return tuple(sorted(functions or imported or used & vars(builtins).keys())), modules


def _passed_to(tree: ast.Module, bound: set[str]) -> set[str]:
    """Return the names that are passed to functions of the text, such as ``f`` in ``check(f)``."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    own = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in bound]
    return {argument.id for call in own for argument in call.args if isinstance(argument, ast.Name)}


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name.partition(".")[0]
            case _:
                continue


@cache
def _provided() -> dict[str, Any]:
    """Return the names that the evaluating process has by itself."""
    provided = dict(vars(builtins))
    exec(PREAMBLE, provided)  # noqa: S102 - imports of the standard library
    return provided


def _literal_checks(tree: ast.Module, names: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Return the operations and what they must give; empty where the text is not of that form."""
    operations: list[dict[str, Any]] = []
    expected: list[tuple[int, str]] = []
    for statement in tree.body:
        match statement:
            case ast.Assert(
                test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]), msg=None | ast.Constant()
            ):
                sides = (left, right) if isinstance(left, ast.Call) else (right, left)
            case _:
                return [], []
        try:
            ast.literal_eval(sides[1])
            expected.append((_operate(sides[0], names, operations), ast.unparse(sides[1])))
        except (ValueError, TypeError):
            return [], []
    return operations, expected


def _operate(node: ast.expr, names: tuple[str, ...], operations: list[dict[str, Any]]) -> Any:
    """Append the operations that an expression takes; return the number of the last one, or a name.

    Raises:
        ValueError, TypeError: it is something else than calls and attributes of the program's names with literals.
    """
    match node:
        case ast.Name(id=name) if name in names:
            return name
        case ast.Attribute(value=value, attr=attribute) if not attribute.startswith("__"):
            operations.append({"do": "get", "on": _operate(value, names, operations), "attribute": attribute})
        case ast.Call(func=func, args=args, keywords=keywords):
            on = _operate(func, names, operations)
            positional = [encode(ast.literal_eval(argument)) for argument in args]
            named = {str(part.arg): encode(ast.literal_eval(part.value)) for part in keywords if part.arg is not None}
            if len(named) < len(keywords):
                raise ValueError("a mapping of arguments")
            operations.append({"do": "call", "on": on, "args": positional, "kwargs": named})
        case _:
            raise ValueError("no call of the program")
    return len(operations) - 1
