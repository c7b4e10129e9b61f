"""Decide one assert: run the program's calls and the evaluation of the text in turn, each in a process of its own.

The text of a test is evaluated outside the program's process, so its names are divided: what the text binds itself,
the usual imports and builtins are the evaluating process's own; the rest is the program's. Where no name is left, the
text tests a program that defines a name of the usual imports (``add``, ``gcd``), or else a builtin (``sum``).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from plaudit_reward.code.cases import Case, CaseResult
from plaudit_reward.code.outputs import OutputComparison
from plaudit_sandbox import assert_calls, assert_evaluation, plain_values
from plaudit_sandbox.plain_values import encode
from plaudit_sandbox.sandbox import PREAMBLE, Ending
from plaudit_wire.errors import DataError

_ALIASES = {"np": "numpy", "pd": "pandas", "numpy": "numpy", "pandas": "pandas", "pytest": "pytest"}


class AssertPlan(NamedTuple):
    """List the steps that evaluate one assert."""

    text: str
    names: tuple[str, ...]
    """Global names of the program."""
    modules: dict[str, str]
    """Modules that the text uses without an import, by the names that it gives them."""
    operations: list[dict[str, Any]]
    """Operations of the program, where the text compares calls with literals and nothing else."""
    expected: list[tuple[int, str]]
    """Number of the answer and source of the literal that it must equal, in that case; else empty."""


@lru_cache(maxsize=4096)
def plan_of(text: str) -> AssertPlan:
    """Read which names of an assert belong to the program, and what it calls when that can be seen at once.

    Raises ``DataError`` if it is no Python, or uses nothing of the program.
    """
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
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in bound]
    return {argument.id for call in own for argument in call.args if isinstance(argument, ast.Name)}


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name.partition(".")[0]


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

    Raises ``ValueError`` or ``TypeError`` for anything but calls and attributes of the program's names with literals.
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


Part = Literal["calls", "evaluation"]
_MODULES = {"calls": assert_calls, "evaluation": assert_evaluation}


def script_of(part: Part, text: str, payload: str) -> str:
    """Return one side of an assert as one Python file, for a server that has no Plaudit.

    ``payload`` is that of the part's function.
    """
    run = "perform_calls" if part == "calls" else "evaluate"
    return f"{_modules(part)}\n{run}({text!r}, {payload!r})\nsys.stderr.flush()\nos._exit(0)\n"


@cache
def _modules(part: Part) -> str:
    sources = [inspect.getsource(module) for module in (plain_values, _MODULES[part])]
    lines = [line for source in sources for line in source.splitlines()]
    kept = [line for line in lines if not line.startswith(("from __future__", "from plaudit_"))]
    return "\n".join(["from __future__ import annotations", *kept])


_MOST_ROUNDS = 64
_MOST_VERDICT_BYTES = 1 << 20
"""It may hold arguments that the program itself returned; the worker reads it within milliseconds."""
_CACHED_TEXTS = 4096


class Executed(NamedTuple):
    """Report the end of one process, and its output."""

    ending: Ending
    stdout: bytes = b""
    reason: str = ""


Execute = Callable[[Part, str, str, str], Awaitable[Executed]]
"""Runs one part of an assert in a process of its own: the part, its text, its payload, its standard input."""
Call = Callable[[], Awaitable[CaseResult]]


class _Verdict(msgspec.Struct):
    """Hold the verdict of the evaluating process."""

    passed: bool = False
    failed: str = ""
    needed: list[dict[str, Any]] = []
    kept: int = 0


class AssertCheck:
    """Decide asserts; programs may use the imports of ``preamble`` without their own."""

    def __init__(self, comparison: OutputComparison, preamble: str) -> None:
        self._comparison = comparison
        self._preamble = preamble
        self._first_operations: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    async def check_then_call(
        self, execute: Execute, program: str, function: str | None, case: Case, call: Call
    ) -> CaseResult:
        """Decide a case: by its assert, if it has one, and then by ``call``, which runs the program or its function."""
        if not case.behind:
            return await call()
        if function is None:
            return await self.check(execute, program, case)
        checked = await self.check(execute, program, case._replace(expected=None))
        if not checked.passed or case.expected is None:
            return checked
        return await call()

    async def check(self, execute: Execute, program: str, case: Case) -> CaseResult:
        """Decide whether a program passes an assert; raise ``DataError`` for a text that is none about a program."""
        plan = plan_of(case.behind)
        operations = plan.operations or await self._first(execute, plan)
        for _ in range(_MOST_ROUNDS):
            payload = {"operations": operations, "preamble": self._preamble, "printed": case.expected is not None}
            called = await execute("calls", program, json.dumps(payload), case.stdin)
            if called.ending != "finished":
                return CaseResult(False, called.ending, called.reason)
            if plan.expected:
                passed = await self._comparison.compare("literals", called.stdout, json.dumps(plan.expected))
                return await self._with_output(CaseResult(passed, "finished"), called, case)
            answers = called.stdout.decode("utf-8", "replace")
            evaluated = await execute("evaluation", plan.text, _payload(plan, operations), answers)
            verdict = _verdict(evaluated)
            if verdict is None:
                return CaseResult(False, "finished", f"its results cannot be evaluated: {_how(evaluated)}")
            if not verdict.needed:
                failed = CaseResult(verdict.passed, "finished", verdict.failed)
                return await self._with_output(failed, called, case)
            operations = operations[: verdict.kept] + verdict.needed
        return CaseResult(False, "finished", f"the assert needs more than {_MOST_ROUNDS} rounds of calls")

    async def _first(self, execute: Execute, plan: AssertPlan) -> list[dict[str, Any]]:
        """Return the operations that the text needs first; no program is involved."""
        if plan.text in self._first_operations:
            self._first_operations.move_to_end(plan.text)
            return self._first_operations[plan.text]
        evaluated = await execute("evaluation", plan.text, _payload(plan, []), "")
        verdict = _verdict(evaluated)
        if verdict is None or not verdict.needed:
            ending = _how(evaluated) if verdict is None else verdict.failed or "it passes"
            raise DataError(
                f"ground_truth.assert_case: {plan.text[:200]!r} ends before it uses the program ({ending}); assert "
                "something about plain values that the program's functions return"
            )
        self._first_operations[plan.text] = verdict.needed
        if len(self._first_operations) > _CACHED_TEXTS:
            self._first_operations.popitem(last=False)
        return verdict.needed

    async def _with_output(self, result: CaseResult, called: Executed, case: Case) -> CaseResult:
        """Compare what the program printed, too, where the row has an output beside the assert."""
        if not result.passed or case.expected is None:
            return result
        same = await self._comparison.compare("printed beside", called.stdout, case.expected)
        return CaseResult(same, "finished", "" if same else "it passes the assert but prints something else")


def _payload(plan: AssertPlan, operations: list[dict[str, Any]]) -> str:
    names = {"names": plan.names, "modules": plan.modules}
    return json.dumps({"preamble": PREAMBLE, **names, "operations": operations})


def _verdict(evaluated: Executed) -> _Verdict | None:
    if evaluated.ending != "finished" or len(evaluated.stdout) > _MOST_VERDICT_BYTES:
        return None
    try:
        return msgspec.convert(json.loads(evaluated.stdout), _Verdict)
    except (ValueError, RecursionError):
        return None


def _how(evaluated: Executed) -> str:
    return f"{evaluated.ending}: {evaluated.reason}" if evaluated.reason else evaluated.ending
