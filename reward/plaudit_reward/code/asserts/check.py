"""Decide one assert: run the program's calls and the evaluation of the text in turn, each in a process of its own."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from plaudit_reward.code.asserts.plan import AssertPlan, plan_of
from plaudit_reward.code.asserts.sources import Part
from plaudit_reward.code.backend import CaseResult
from plaudit_reward.code.cases import Case
from plaudit_reward.code.comparison import OutputComparison
from plaudit_reward.code.sandbox.messages import Ending
from plaudit_reward.code.sandbox.preamble import PREAMBLE
from plaudit_wire.errors import DataError

_MOST_ROUNDS = 64
_MOST_VERDICT_BYTES = 1 << 20
"""It may hold arguments that the program itself returned; the worker reads it within milliseconds."""
_CACHED_TEXTS = 4096


class Executed(NamedTuple):
    """The end of one process, and its output."""

    ending: Ending
    stdout: bytes = b""
    reason: str = ""


Execute = Callable[[Part, str, str, str], Awaitable[Executed]]
"""Runs one part of an assert in a process of its own: the part, its text, its payload, its standard input."""


class _Verdict(msgspec.Struct):
    """The verdict of the evaluating process."""

    passed: bool = False
    failed: str = ""
    used: int = 0
    needed: list[dict[str, Any]] = []
    kept: int = 0


class AssertCheck:
    """Decide asserts; programs may use the imports of ``preamble`` without their own."""

    def __init__(self, comparison: OutputComparison, preamble: str) -> None:
        self._comparison = comparison
        self._preamble = preamble
        self._first_operations: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    async def check_then_call(
        self, execute: Execute, program: str, case: Case, call: Callable[[], Awaitable[CaseResult]] | None
    ) -> CaseResult:
        """Decide a case that has an assert and perhaps an expected value of its own.

        Args:
            call: runs the case's function, once the assert has passed; None when the program is a script.
        """
        if call is None:
            return await self.check(execute, program, case)
        checked = await self.check(execute, program, case._replace(expected=None))
        if not checked.passed or case.expected is None:
            return checked
        return await call()

    async def check(self, execute: Execute, program: str, case: Case) -> CaseResult:
        """Decide whether a program passes an assert.

        Raises:
            DataError: the text is no assert about a program.
            InfrastructureError: programs cannot be run at present.
        """
        plan = plan_of(case.behind)
        operations = plan.operations or await self._first(execute, plan)
        for _ in range(_MOST_ROUNDS):
            payload = {"operations": operations, "preamble": self._preamble, "printed": case.expected is not None}
            called = await execute("calls", program, json.dumps(payload), case.stdin)
            if called.ending != "finished":
                return CaseResult(False, called.ending, called.reason)
            if plan.is_literal:
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
    task = {
        "preamble": PREAMBLE,
        "names": plan.names,
        "modules": plan.modules,
        "operations": operations,
    }
    return json.dumps(task)


def _verdict(evaluated: Executed) -> _Verdict | None:
    if evaluated.ending != "finished" or len(evaluated.stdout) > _MOST_VERDICT_BYTES:
        return None
    try:
        return msgspec.convert(json.loads(evaluated.stdout), _Verdict)
    except (ValueError, RecursionError):
        return None


def _how(evaluated: Executed) -> str:
    return f"{evaluated.ending}: {evaluated.reason}" if evaluated.reason else evaluated.ending
